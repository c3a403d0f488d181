"""Products with encoded matrices: each format is read, expanded and multiplied here."""
