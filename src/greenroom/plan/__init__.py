"""Planner of a model's settings on a machine, from recorded routing and measured costs."""
