"""The CUDA tier: slots in device memory, host memory behind them, kernels that read the slots."""
