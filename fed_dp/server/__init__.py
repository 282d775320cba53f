"""The server: ServerApp, round loop and its drivers, discovery of sites, ledger heads, summary."""
