"""What leaves a site and what comes back: the contract between strategies and clients."""
