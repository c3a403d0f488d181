"""What a run begins with of earlier ones, and what it counts for later ones."""
