"""The runtime: real bytes and tensors, driven by the scheduler's decisions."""
