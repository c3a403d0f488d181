"""Simulator of cached MoE inference: the runtime's scheduler, with events and a cost model."""
