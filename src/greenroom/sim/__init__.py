"""The simulator: the scheduler of the runtime, driven by an event heap and a cost model."""
