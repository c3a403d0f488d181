"""Budget a model's memory, and make the slots of its experts on their devices.

setup        options, sizes and devices of one run
slots        number, size and memory of slots
split        experts split in two parts
approximate  approximated misses
devices      devices, links and kernels that compute the experts
budget       memory that is needed besides slots
slot_budget  slots that leave memory to the KV cache as it grows
"""
