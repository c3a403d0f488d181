"""The simulator: the runtime's scheduler, driven by an event heap and a cost model."""
