"""Counts for MoEpic's configurator, taken while a model answers.

`--split auto` counts what decoded tokens activate and what had been predicted (`core/activity.py`).
The counts are a state of the model's routing history; hf/defaults.py runs Algorithm 1 over them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from greenroom.core.activity import Activity
from greenroom.core.events import Predicted
from greenroom.core.predictor import Ids
from greenroom.plan.configurator import TokenLatency
from greenroom.plan.history.routing import Arrays, RoutingHistory
from greenroom.runtime.driver.driver import Driver

NAME = "split"  # of the state
log = logging.getLogger(__name__)


class HeadTimer:
    """Times the head layer, T_head, where it computes one position of each sequence: after a
    decoded token, and at the end of a prompt. `seconds` is a mean, 0 before the first."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._begun, self._spent, self._count = 0.0, 0.0, 0
        layer = model.get_output_embeddings()
        self._hooks = [] if layer is None else [
            layer.register_forward_pre_hook(self._begins), layer.register_forward_hook(self._ends)
        ]  # fmt: skip

    @property
    def seconds(self) -> float:
        return self._spent / max(1, self._count)

    def close(self) -> None:
        """Take the hooks out again; what was measured stays."""
        for hook in self._hooks:
            hook.remove()

    def _begins(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        self._begun = time.perf_counter()

    def _ends(self, layer: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if out.shape[-2] == 1 and not out.is_meta:
            self._spent += time.perf_counter() - self._begun
            self._count += 1


def latency_of(driver: Driver, head: float) -> TokenLatency | None:
    """Seconds as MoEpic names them, of the decoded tokens so far; None before a token, and where
    nothing was loaded. `head` is T_head; what is neither head, experts nor waits is T_att."""
    meter, pieces = driver.meter, driver.pieces
    link = meter.links[-1]
    if not meter.decodes or not link.nbytes:
        return None
    token = (meter.decode_s - meter.waited_s - meter.computed_s) / meter.decodes
    split = pieces.split
    expert = split.unsplit_bytes if split is not None else int(pieces.nbytes.max())
    return TokenLatency(
        attention=max(0.0, token - head) / pieces.layers,
        moe=meter.computed_s / meter.decodes / pieces.layers,
        head=head,
        load=link.busy_s / link.nbytes * expert,
    )


class SplitCounts:
    """Counts the tokens of decode passes."""

    def __init__(self, offsets: Sequence[int], known: RoutingHistory | None) -> None:
        self._offsets = tuple(offsets)
        self.activity = Activity(np.diff(offsets).tolist())
        self._expected: dict[int, Ids] = {}
        self._reading = False
        if known is not None and NAME in known.states:
            try:
                self.activity.restore(known.states[NAME])
            except ValueError as error:
                log.warning("what was recorded for --split auto is not used: %s", error)

    def predicted(self, event: Predicted) -> None:
        """A layer is expected to need these, likeliest first."""
        self._expected[event.layer] = event.experts - self._offsets[event.layer]

    def on_pass(self, request: int, prompt: bool, sequences: int) -> None:
        """A pass begins; those of prompts are not counted."""
        self._reading = prompt

    def on_choice(self, layer: int, experts: Ids) -> None:
        """A router has chosen, [T, K]."""
        if self._reading:
            return
        expected = self._expected.pop(layer, None)
        n = self.activity.experts[layer]
        for row in experts:
            self.activity.token(layer, row[(row >= 0) & (row < n)], expected)

    def state(self, driver: Driver, head: float) -> Arrays | None:
        """What is stored: the counts, and seconds as MoEpic names them; None before a token."""
        latency = latency_of(driver, head)
        if latency is None:
            return None
        return {**self.activity.state(), "latency": np.array(astuple(latency))}
