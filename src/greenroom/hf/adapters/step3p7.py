"""Step 3.7: its experts have the form of the socket, and only lack the decorator."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from greenroom.hf.adapters.socket import Adapter, decorated, plug


def adapt(experts: nn.Module, model: PreTrainedModel) -> None:
    experts.__class__ = decorated(type(experts))
    plug(experts, model)


ADAPTER = Adapter("Step3p7Experts", adapt)
