"""Count the experts of decoded tokens, to configure split experts as MoEpic does.

With `--split auto`, a run counts which experts decoded tokens use and which were predicted
(`core/activity.py`). The counts are saved with the model's routing history. A later run computes
its split from them, by Algorithm 1 of the MoEpic paper (hf/defaults.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from greenroom.core.activity import Activity
from greenroom.core.predictor import Ids
from greenroom.errors import BudgetError, DeviceError
from greenroom.hf.memory.setup import ModelSetup
from greenroom.plan.configurator import Division, TokenLatency
from greenroom.plan.history.routing import Arrays, RoutingHistory
from greenroom.runtime.driver.driver import Driver

NAME = "split"  # of this state in the routing history
log = logging.getLogger(__name__)


class HeadTimer:
    """Timer of a model's output head (T_head in the MoEpic paper).

    Only calls with one position per sequence are timed: decoded tokens, and the last position of
    prompts. `seconds` is the mean time of a call, 0 before the first.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._begun, self._spent, self._count = 0.0, 0.0, 0
        layer = model.get_output_embeddings()
        self._hooks = [] if layer is None else [
            layer.register_forward_pre_hook(self._start_timer),
            layer.register_forward_hook(self._stop_timer),
        ]  # fmt: skip

    @property
    def seconds(self) -> float:
        return self._spent / max(1, self._count)

    def close(self) -> None:
        """Remove the hooks that time the output head; the mean time stays available."""
        for hook in self._hooks:
            hook.remove()

    def _start_timer(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        self._begun = time.perf_counter()

    def _stop_timer(self, layer: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if out.shape[-2] == 1 and not out.is_meta:
            self._spent += time.perf_counter() - self._begun
            self._count += 1


def latency_of(driver: Driver, head: float) -> TokenLatency | None:
    """Return MoEpic's latencies, in seconds, as measured on decoded tokens.

    They are the times of a layer's attention, of its experts, of the output head (`head`), and of
    loading one whole expert. The time of attention includes all other work of the model, but
    no waits. None before the first decoded token, or if no expert was loaded.
    """
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
    """Counts of the experts that decoded tokens use, and of those that were predicted.

    They continue the counts of earlier runs if `history` has some. After every `tau` tokens, the
    cache's slots may be divided among layers anew; never if `tau` is 0.
    """

    def __init__(
        self, offsets: Sequence[int], history: RoutingHistory | None, tau: int = 0
    ) -> None:
        self._offsets = tuple(offsets)
        self.activity = Activity(np.diff(offsets).tolist())
        self.forecast: Callable[[int], Ids | None] = lambda layer: None  # the scheduler's view's
        self._in_prompt = False
        if history is not None and NAME in history.states:
            try:
                self.activity.restore(history.states[NAME])
            except ValueError as error:
                log.warning(
                    "--split auto ignores the expert counts of earlier runs: %s",
                    error,
                )

        self._tau, self._due = tau, int(self.activity.tokens.min()) + tau

    @classmethod
    def of(cls, setup: ModelSetup, history: RoutingHistory | None) -> SplitCounts | None:
        """Return the expert counts for a run with `--split auto`; None for other runs.

        If `--scope` is not shared, slots are never divided among layers anew.
        """
        if not setup.counts_split:
            return None
        config = setup.config
        return cls(setup.catalog.offsets, history, config.tau if config.scope == "shared" else 0)

    def on_pass(self, request: int, prompt: bool, sequences: int) -> None:
        """Handle the start of a forward pass; experts are not counted in passes of prompts."""
        self._in_prompt = prompt

    def on_routing(self, layer: int, experts: Ids) -> None:
        """Count the experts that decoded tokens use.

        `experts` are ids within the layer, of shape [tokens, top_k].
        """
        if self._in_prompt:
            return
        forecast = self.forecast(layer)
        expected = None if forecast is None else forecast - self._offsets[layer]
        n = self.activity.experts[layer]
        for row in experts:
            self.activity.token(layer, row[(row >= 0) & (row < n)], expected)

    def reconfigure(self, driver: Driver, head: float) -> bool:
        """Divide the cache's slots among layers by Algorithm 1, if tau tokens were counted.

        These are lines 8 to 10 of the algorithm in the MoEpic paper. Call the method while nothing
        is computed. The shares at which experts are split stay the same, because other shares need
        slots of other sizes. `head` is the mean time of the output
        head, in seconds. Returns whether the slots were divided anew.
        """
        counted, view = int(self.activity.tokens.min()), driver.scheduler.view
        if not self._tau or counted < self._due or view.scope == "shared" or driver.all_have_slots:
            return False
        self._due, latency = counted + self._tau, latency_of(driver, head)
        if latency is None:
            return False
        pieces, capacity = driver.pieces, driver.scheduler.capacity
        division = Division.of(capacity, latency, pieces.layers, pieces.split)
        scope = division(self.activity, view.scope)
        try:
            driver.resize(None, scope)  # another thread may have changed the capacity
        except (BudgetError, DeviceError) as error:  # for a moment both divisions need memory
            log.warning("--split auto does not divide the slots among layers anew: %s", error)
            return False
        return True

    def state(self, driver: Driver, head: float) -> Arrays | None:
        """Return the expert counts and latencies to save for later runs.

        `head` is the mean time of the output head, in seconds. None before the first decoded token,
        or if no expert was loaded.
        """
        latency = latency_of(driver, head)
        if latency is None:
            return None
        return {**self.activity.state(), "latency": np.array(astuple(latency))}
