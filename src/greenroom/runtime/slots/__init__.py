"""Slots: equal pieces of memory, each of which holds one expert for computation."""
