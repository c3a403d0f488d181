"""Every kernel at every width, on arrays that end where memory ends (walls.py)."""
