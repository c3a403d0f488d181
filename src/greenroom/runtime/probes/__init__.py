"""Access to a model's routers and their input hidden states, for predictors."""

from greenroom.runtime.probes.gates import RouterGates, top_k_of
from greenroom.runtime.probes.inputs import GateInputProbe
from greenroom.runtime.probes.routers import Router, find_routers

__all__ = ["GateInputProbe", "Router", "RouterGates", "find_routers", "top_k_of"]
