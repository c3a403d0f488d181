"""GPUs: slots in device memory, the host memory behind them, kernels on several devices."""
