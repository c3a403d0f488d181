"""The expert driver: reads and computes experts as the scheduler decides, and keeps statistics."""
