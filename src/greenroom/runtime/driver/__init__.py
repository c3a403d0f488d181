"""The scheduler with real bytes: the driver, its threads, and what they count."""
