"""Decisions about experts: residency, eviction, the order of fetches and of computation.

Nothing here knows tensors, threads or clocks. The runtime drives it with real bytes, the simulator
with an event heap and a cost model.
"""
