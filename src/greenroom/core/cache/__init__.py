"""Which expert has which slot: the cache under a policy, slots on loan, and slots of extras."""
