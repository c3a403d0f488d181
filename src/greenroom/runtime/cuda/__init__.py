"""GPU support: slots for experts, host memory behind a GPU, and several devices."""
