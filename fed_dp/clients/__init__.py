"""Client-side trainers and the Flower ClientApp that runs them."""
