"""GPU support: slots for experts, host memory that serves a GPU, and several devices."""
