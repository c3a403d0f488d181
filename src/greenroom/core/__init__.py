"""Decisions: what is resident, who is evicted, what is fetched next, what is computed when.

Nothing here knows tensors, threads or clocks. The runtime drives it with real bytes, the simulator
with an event heap and a cost model.
"""
