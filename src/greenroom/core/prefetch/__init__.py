"""What is fetched before it is asked for: predictions, their value, and the guard."""
