"""Slots: the memory that experts are computed from, and how an expert lies in one."""
