"""The scheduler: the event machine, and the state of the current step."""
