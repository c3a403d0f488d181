"""Runtime of streamed experts: executes the scheduler's decisions with real bytes and tensors."""
