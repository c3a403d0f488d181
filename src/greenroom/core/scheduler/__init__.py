"""The scheduler of experts: its event machine, and the state of the current step."""
