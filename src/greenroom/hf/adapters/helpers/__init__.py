"""What adapters are made of."""
