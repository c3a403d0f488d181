"""Planner of a model's settings on a machine, from recorded routing and measured costs.

Settings are the eviction policy, the prefetching and other options of a run.
"""
