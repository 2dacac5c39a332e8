"""What the distributed tests run on their ranks, and how they start them."""
