"""The scheduler of experts: its event machine, and the state of the current step.

A step is one layer of one forward pass.
"""
