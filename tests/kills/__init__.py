"""Commands that are killed at random moments: the next start recovers."""
