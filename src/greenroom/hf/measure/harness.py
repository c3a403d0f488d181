"""One loaded model whose cache is exchanged, so that many settings are measured with one load.

Settings have the model's slots one after another, and answer the same prompts with the same seeds.
Lossless settings give the same tokens and do the same work; they differ in their waits.
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
SETTLE = 8  # tokens after a prompt that are not counted: the cache still holds the prompt's
WARM_S = 10.0  # for filling a cache with what was asked for most before


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one setting did with some prompts. Times in seconds; counts are of the decode passes
    that were counted.

    ttft: of each prompt; gaps: between tokens, without the first ones after a prompt
    tokens: what was answered, to be the same with every lossless setting
    """

    ttft: tuple[float, ...]
    gaps: tuple[float, ...]
    tokens: tuple[tuple[int, ...], ...]
    requests: int
    misses: int
    bytes_read: int
    stall_s: float
    busy_s: float  # of the link, with those bytes

    @property
    def tpot_s(self) -> float:
        """The mean: slow tokens count."""
        return float(np.mean(self.gaps))

    @property
    def miss_ratio(self) -> float:
        return self.misses / self.requests if self.requests else 0.0


class Harness:
    """A model that was loaded once, and what it is attached to now."""

    def __init__(
        self, source: str, config: LoadConfig, progress: Progress = lambda share, what: None
    ) -> None:
        """Loads it. Nothing is remembered of earlier runs, nor left to later ones."""
        self.model: Any
        self.source, self._progress = source, progress
        self._load(config)
        self.request_counts = np.zeros(
            self.experts, np.int64
        )  # of each expert, by what was learned
        self._pending = self.request_counts.copy()

    def _load(self, config: LoadConfig) -> None:
        self.model, self.tokenizer = load_with(
            self.source, config, remember=False, progress=self._progress
        )
        self.config = config
        self.setup = self.model.greenroom.setup
        self.capacity = int(self.model.greenroom.capacity)  # slots that the budget leaves
        self.experts = self.setup.catalog.experts
        self._growth = self.model.greenroom.slot_budget
        self.process_bytes: int | None = self.model.greenroom.process_bytes

    def learn(self) -> None:
        """From here on, caches begin with what was asked for most in all that was played."""
        self.request_counts += self._pending
        self._pending[:] = 0

    def attach(
        self, config: LoadConfig, capacity: int | None = None, pins: Pins | None = None
    ) -> Greenroom:
        """Exchange the cache for an empty one of this policy, scope and predictor, with so many
        slots (those of the budget without it), filled with what was asked for most so far. A model
        whose experts are cut otherwise, or whose misses are served otherwise, is loaded again.
        `pins` stay, in place of those of a file. After an error there is none, until the next."""
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
        self.model.greenroom = made = Greenroom(self.model, setup)
        if self._growth is not None and capacity is None:
            made.use_slot_budget(self._growth)
        made.pin()
        self._warm(made)
        return made

    def _warm(self, made: Greenroom) -> None:
        """Fill its cache with what was asked for most so far; nothing of that is counted."""
        view, offsets = made.driver.scheduler.view, self.setup.catalog.offsets
        hot = RoutingHistory.of_counts(self.request_counts).hot_set(offsets, view.slots, view.scope)
        if hot.size:
            warm_up(made.driver, hot, WARM_S)
        made.driver.request_counts[:] = 0

    def fill(self) -> None:
        """Have every expert in a cache that has a slot for each."""
        warm_up(self.model.greenroom.driver, np.arange(self.experts), 10 * WARM_S)

    def close(self) -> None:
        """End the threads and free the slots, where there are any."""
        if (attached := getattr(self.model, "greenroom", None)) is not None:
            attached.detach()

    def play(
        self, prompts: Sequence[Prompt], tokens: int, settle: int = SETTLE, raw: bool = False
    ) -> Measurement:
        """Have the model answer with what it is attached to. Tokens are drawn by fixed seeds."""
        greenroom: Greenroom = self.model.greenroom
        ttft, gaps, said = [], [], []
        counted = np.zeros(5)
        for number, prompt in enumerate(prompts):
            sampling = SamplingConfig(max_new_tokens=tokens, temperature=1.0, seed=number)
            with _decodes(self.model, settle) as before:
                done = answer(
                    self.model, self.tokenizer, prompt.content, sampling, raw=raw,
                    context=self.setup.context, to_the_end=True,
                )  # fmt: skip
            ttft.append(done.ttft_s)
            gaps += done.gaps[settle:]
            said.append(tuple(done.token_ids))
            if before:
                counted += _counters(greenroom) - before[0]
        if not gaps:
            raise UsageError(
                f"nothing was measured: the first {settle} tokens of an answer are not counted, and"
                f" --context {self.setup.context} has no room for more after the prompt: raise it"
            )
        self._pending += greenroom.driver.request_counts[: self.experts]  # of what is cut, the tops
        greenroom.driver.request_counts[:] = 0
        requests, misses, nbytes, stall, busy = counted.tolist()
        return Measurement(
            tuple(ttft), tuple(gaps), tuple(said), int(requests), int(misses), int(nbytes), stall,
            busy,
        )  # fmt: skip


def _counters(greenroom: Greenroom) -> Floats:
    """[5]: requests, misses, bytes read, seconds stalled, seconds of the link, so far."""
    counts, meter = greenroom.driver.scheduler.view.counted(), greenroom.driver.meter.copy()
    busy = meter.links[0].busy_s
    return np.array([counts.requests, counts.misses, meter.bytes_read, meter.stall_s, busy])


@contextmanager
def _decodes(model: Any, settle: int) -> Iterator[list[Floats]]:
    """Leaves the counters as they were when an answer's first `settle` decode passes were over;
    nothing where there were fewer."""
    found: list[Floats] = []
    passed = 0

    def ended(module: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        nonlocal passed
        ids = kwargs.get("input_ids")
        passed += ids is not None and ids.shape[1] == 1
        if passed == settle and not found:
            found.append(_counters(model.greenroom))

    hook = model.register_forward_hook(ended, with_kwargs=True)
    try:
        yield found
    finally:
        hook.remove()
