"""What the server does: strategies, the round loop, and the Flower ServerApp that runs them."""
