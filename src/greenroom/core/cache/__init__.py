"""The expert cache: its slots, eviction under a policy, borrowed and secondary slots.

Prefetches borrow cache slots. Secondary slots hold bottom segments or low-precision copies.
"""
