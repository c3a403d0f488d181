"""Traces of expert routing: which experts each token used, in each layer.

The modules read, write, order, measure and synthesise traces.

trace = load("olmoe-1b-7b.npz")
requests = stream(trace, "runtime")
"""

from greenroom.config import ORDERS
from greenroom.trace.file import load, save
from greenroom.trace.orders import stream
from greenroom.trace.trace import GateInputs, Prediction, Trace

__all__ = ["ORDERS", "GateInputs", "Prediction", "Trace", "load", "save", "stream"]
