"""Slots: equal ranges of memory, each of which holds one expert for computation."""
