"""Keys and values: caches that grow in place, their kinds and sizes, several in one pass."""
