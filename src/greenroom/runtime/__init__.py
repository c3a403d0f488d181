"""Runtime of streamed experts: executes the scheduler's decisions on real files and tensors."""
