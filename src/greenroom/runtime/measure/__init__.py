"""What this machine can do: memory, disk, kernels, GPU."""
