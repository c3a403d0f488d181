"""Benchmark harness: load a model once, and measure it with many settings.

Each setting gets a new expert cache, and answers the same prompts with the same seeds. Settings
that do not change the model's output give the same tokens; they differ only in time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.config import LoadConfig, SamplingConfig, scope_of
from greenroom.core.cache.cache import compile_for
from greenroom.core.cache.pins import Pins
from greenroom.errors import UsageError
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.history.warm_start import warm_up
from greenroom.hf.load.attach import Progress
from greenroom.hf.load.load import load_with
from greenroom.hf.memory.approximate import APPROXIMATION_OPTIONS
from greenroom.hf.text.generate import answer
from greenroom.plan.history.routing import RoutingHistory
from greenroom.policies import choose
from greenroom.trace.prompts import Prompt

Floats = NDArray[np.float64]
SETTLE = 8  # uncounted tokens after a prompt: the cache still has the prompt's experts
WARM_S = 10.0  # seconds for filling a cache with the experts used most before


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurement of one benchmark setting on some prompts; times are in seconds.

    ttft:   time to the first token of each answer
    gaps:   times between tokens, without the first tokens of each answer, which are not counted
    tokens: token ids of the answers, the same with every setting that does not change the output
    requests, misses, bytes_read: expert requests, cache misses, and bytes that were read, in the
            forward passes of the counted tokens
    stall_s: time in which these forward passes waited for experts
    busy_s:  time in which reads for these forward passes kept the disk busy
    """

    ttft: tuple[float, ...]
    gaps: tuple[float, ...]
    tokens: tuple[tuple[int, ...], ...]
    requests: int
    misses: int
    bytes_read: int
    stall_s: float
    busy_s: float

    @property
    def tpot_s(self) -> float:
        """Return the mean time per output token, in seconds."""
        return float(np.mean(self.gaps))

    @property
    def miss_ratio(self) -> float:
        return self.misses / self.requests if self.requests else 0.0


class Harness:
    """Benchmark harness: a loaded model whose expert cache is replaced for each setting."""

    def __init__(
        self, source: str, config: LoadConfig, progress: Progress = lambda share, what: None
    ) -> None:
        """Load a model for benchmarks; nothing from earlier runs is used or saved."""
        self.model: Any
        self.source, self._progress = source, progress
        self._load(config)
        self.request_counts = np.zeros(self.experts, np.int64)  # of each expert, up to `learn`
        self._pending = self.request_counts.copy()

    def _load(self, config: LoadConfig) -> None:
        self.model, self.tokenizer = load_with(
            self.source, config, remember=False, progress=self._progress
        )
        self.config = config
        self.setup = self.model.greenroom.setup
        self.capacity = int(self.model.greenroom.capacity)  # slots that the budget leaves
        self.experts = self.setup.catalog.experts
        self._slot_budget = self.model.greenroom.slot_budget
        self.process_bytes: int | None = self.model.greenroom.process_bytes

    def learn(self) -> None:
        """Let later expert caches start with the experts that were used most so far."""
        self.request_counts += self._pending
        self._pending[:] = 0

    def attach(
        self, config: LoadConfig, capacity: int | None = None, pins: Pins | None = None
    ) -> Greenroom:
        """Replace the model's expert cache by one of this config, and fill it.

        The new cache has `capacity` slots, or as many as the memory budget leaves, and starts with
        the experts used most before. `pins` replaces the file of `--pin`. The model is loaded again
        if the split of experts or the approximation of misses changes. After an error the model
        has no cache until the next call.
        """
        self.close()
        cut = {name: getattr(config, name) for name in ("split", *APPROXIMATION_OPTIONS)}
        if any(getattr(self.config, name) != value for name, value in cut.items()):
            self._load(replace(self.config, scope=config.scope, **cut))
            self.close()
        slots = self.capacity if capacity is None else capacity
        if pins is None and config.pin is not None:
            pins = Pins.load(config.pin, self.setup.catalog.offsets)
        chosen = choose(config.policy, slots, self.experts)
        compile_for(chosen)
        full = slots >= self.experts
        setup = replace(
            self.setup,
            capacity=slots,
            policy=chosen.name,
            scope=self.setup.scope if config.split == "auto" else scope_of(config.scope),
            pins=pins,
            prefetch="off" if full else config.prefetch,
            predictor=config.predictor,
            guard=not config.no_guard,
            config=config
            if self.setup.approximation is not None
            else config.without_approximation(),
        )
        self.model.greenroom = attached = Greenroom(self.model, setup)
        if self._slot_budget is not None and capacity is None:
            attached.use_slot_budget(self._slot_budget)
        attached.pin()
        self._warm(attached)
        return attached

    def _warm(self, attached: Greenroom) -> None:
        """Fill an expert cache with the experts used most; these reads are not counted."""
        view, offsets = attached.driver.scheduler.view, self.setup.catalog.offsets
        hot = RoutingHistory.of_counts(self.request_counts).hot_set(offsets, view.slots, view.scope)
        if hot.size:
            warm_up(attached.driver, hot, WARM_S)
        attached.driver.request_counts[:] = 0

    def fill(self) -> None:
        """Load every expert into the present expert cache, which has a slot for each."""
        warm_up(self.model.greenroom.driver, np.arange(self.experts), 10 * WARM_S)

    def close(self) -> None:
        """Detach the model's expert cache, if any: end its threads and free its slots."""
        if (attached := getattr(self.model, "greenroom", None)) is not None:
            attached.detach()

    def play(
        self, prompts: Sequence[Prompt], tokens: int, settle: int = SETTLE, raw: bool = False
    ) -> Measurement:
        """Generate answers with the present expert cache, and measure times and misses.

        Each answer has `tokens` tokens, of which the first `settle` are not counted. The seed of
        sampling is the prompt's number. Raises UsageError if the context has no room for a counted
        token.
        """
        greenroom: Greenroom = self.model.greenroom
        ttft, gaps, answers = [], [], []
        totals = np.zeros(5)
        for number, prompt in enumerate(prompts):
            sampling = SamplingConfig(max_new_tokens=tokens, temperature=1.0, seed=number)
            with _decodes(self.model, settle) as before:
                done = answer(
                    self.model, self.tokenizer, prompt.content, sampling, raw=raw,
                    context=self.setup.context, to_the_end=True,
                )  # fmt: skip
            ttft.append(done.ttft_s)
            gaps += done.gaps[settle:]
            answers.append(tuple(done.token_ids))
            if before:
                totals += _counters(greenroom) - before[0]
        if not gaps:
            raise UsageError(
                f"nothing was measured: the first {settle} tokens of an answer are not counted, and"
                f" --context {self.setup.context} leaves no room for more after the prompt:"
                " raise --context"
            )
        counts = greenroom.driver.request_counts
        self._pending += counts[: self.experts]  # of split experts, the tops
        counts[:] = 0
        requests, misses, nbytes, stall, busy = totals.tolist()
        return Measurement(
            tuple(ttft), tuple(gaps), tuple(answers), int(requests), int(misses), int(nbytes),
            stall, busy,
        )  # fmt: skip


def _counters(greenroom: Greenroom) -> Floats:
    """Return [requests, misses, bytes read, seconds stalled, seconds of the first link]."""
    counts, meter = greenroom.driver.scheduler.view.counted(), greenroom.driver.meter.copy()
    busy = meter.links[0].busy_s
    return np.array([counts.requests, counts.misses, meter.bytes_read, meter.stall_s, busy])


@contextmanager
def _decodes(model: Any, settle: int) -> Iterator[list[Floats]]:
    """Yield a list that gets the counters' totals after `settle` decode passes of an answer.

    The list stays empty if the answer has fewer decode passes.
    """
    snapshots: list[Floats] = []
    passed = 0

    def ended(module: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        nonlocal passed
        ids = kwargs.get("input_ids")
        passed += ids is not None and ids.shape[1] == 1
        if passed == settle and not snapshots:
            snapshots.append(_counters(model.greenroom))

    hook = model.register_forward_hook(ended, with_kwargs=True)
    try:
        yield snapshots
    finally:
        hook.remove()
