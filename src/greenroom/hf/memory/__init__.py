"""What a model takes of memory: its budget, slots for its experts, the devices they are on.

setup    all that was decided about a model
slots    how many, of what size, where; split: experts cut in two; approximate: inexact misses
devices  where experts are computed, behind which links, by which kernels
budget   what must be in memory beside slots; growth: slots make room for keys and values
"""
