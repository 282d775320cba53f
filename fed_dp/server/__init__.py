"""The server: the ServerApp, the round loop and its drivers, discovery of sites, ledger heads, the summary."""
