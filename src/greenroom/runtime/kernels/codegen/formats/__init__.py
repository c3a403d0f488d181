"""Products with encoded matrices: how each format is read, expanded and multiplied."""
