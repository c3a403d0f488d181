"""Probes for predictors: a model's routers, and the hidden states that enter them."""

from greenroom.runtime.probes.gates import RouterGates, top_k_of
from greenroom.runtime.probes.inputs import GateInputProbe
from greenroom.runtime.probes.routers import Router, find_routers

__all__ = ["GateInputProbe", "Router", "RouterGates", "find_routers", "top_k_of"]
