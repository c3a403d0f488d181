"""Decisions about experts: residency, eviction, the order of fetches and of computation.

This package has no tensors, threads or clocks. In a run, the runtime sends events to it and carries
out its actions on real bytes; in a simulation, an event heap and a cost model replace the runtime.
A step is one layer of one forward pass.
"""
