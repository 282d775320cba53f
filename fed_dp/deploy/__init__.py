"""Real sites: provisioning, running and watching a federation of sites that do not trust the network."""
