"""The expert cache: its slots, eviction under a policy, borrowed and secondary slots."""
