"""The driver, which executes the scheduler's actions, its threads and its counters."""
