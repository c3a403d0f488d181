"""GPU support: slots for experts, staging in host memory, and several devices."""
