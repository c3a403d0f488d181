"""Budget a model's memory, and make the slots of its experts on their devices.

A slot is memory for one expert in the expert cache. The modules:

setup        options, sizes and devices of one run
slots        number, size and memory of slots
split        experts split into a top and a bottom segment
approximate  cache misses that are not exact: copies or other experts are computed
devices      devices and kernels that compute the experts, and links to the devices
budget       memory that is needed besides slots
slot_budget  number of slots, which falls as the KV cache grows
pressure     slots that are given back while other processes need memory
"""
