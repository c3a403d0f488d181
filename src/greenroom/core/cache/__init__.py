"""Slots of experts: the cache under a policy, borrowed slots and secondary slots."""
