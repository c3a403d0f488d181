"""The expert driver: it reads and computes experts as the scheduler decides, and counts."""
