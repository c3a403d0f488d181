"""Frames of the live screen: the expert cache, tokens and requests of a process at one time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from greenroom.hf.attach.snapshot import CacheSnapshot, SnapshotReader

if TYPE_CHECKING:
    from greenroom.hf.text.generate import TokenClock
    from greenroom.server.engine.loop import ContinuousEngine

WAITING, PROMPT, ANSWER = "waiting", "prompt", "answer"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Names of a running model and its parts, and each layer's number of experts."""

    title: str
    layers: tuple[int, ...]
    policy: str
    predictor: str | None
    links: tuple[str, ...]

    @classmethod
    def of(cls, title: str, greenroom: Any) -> ModelFacts:
        driver, predictor = greenroom.driver, greenroom.predictor
        return cls(
            title,
            tuple(greenroom.setup.catalog.experts_per_layer),
            driver.scheduler.policy.name,
            predictor.name if predictor is not None else None,
            tuple(driver.links),
        )


@dataclass(frozen=True, slots=True)
class RequestState:
    """State of a request: its phase, tokens of prompt and answer, and age in seconds."""

    phase: str
    prompt: int
    new: int
    most: int
    age: float


@dataclass(frozen=True, slots=True)
class Frame:
    """State of a process with a model at one time.

    at:     seconds of the monotonic clock
    tokens: new tokens of all answers since loading
    ttfts:  seconds to the first token of the last requests, oldest first
    """

    at: float
    tokens: int
    ttfts: tuple[float, ...]
    requests: tuple[RequestState, ...]
    cache: CacheSnapshot


class RunReader:
    """Reads frames of a model that answers one prompt with transformers' `generate`."""

    def __init__(self, model: Any) -> None:
        self._reader = SnapshotReader(model.greenroom, model)
        self._keys_values = model.greenroom.setup.keys_values
        self._clock: TokenClock | None = None

    def start(self, clock: TokenClock) -> None:
        """Take the tokens' clock of the answer that begins now."""
        self._clock = clock

    def read(self) -> Frame:
        clock, now = self._clock, time.monotonic()
        if clock is None:
            return Frame(now, 0, (), (), self._reader.read(0))
        new = len(clock.times)
        request = RequestState(
            ANSWER if new else PROMPT, clock.prompt_tokens, new, clock.most_tokens,
            time.perf_counter() - clock.begin,
        )  # fmt: skip
        ttfts = (clock.times[0] - clock.begin,) if new else ()
        keys_values = self._keys_values.held_bytes(clock.prompt_tokens + new)
        return Frame(now, new, ttfts, (request,), self._reader.read(keys_values))


class EngineReader:
    """Reads frames of a serving engine in this process, without its locks."""

    def __init__(self, engine: ContinuousEngine) -> None:
        self._engine = engine
        self._reader = SnapshotReader(engine.greenroom, engine.model)

    def read(self) -> Frame:
        engine, now = self._engine, time.monotonic()
        (running, waiting), totals = engine.sequences(), engine.totals
        ttfts = [one.ttft_s for _, one in list(totals.recent) if one.ttft_s is not None]
        ttfts += [each.answered - each.arrived for each in running if each.answered is not None]
        keys_values = engine.admission.reserved + engine.admission.prefixes.nbytes
        return Frame(
            now,
            totals.new_tokens + sum(each.new for each in running),
            tuple(ttfts),
            tuple(_request(each, now) for each in (*running, *waiting)),
            self._reader.read(keys_values),
        )


def _request(sequence: Any, now: float) -> RequestState:
    phase = WAITING if sequence.admitted is None else PROMPT
    return RequestState(
        ANSWER if sequence.answered is not None else phase,
        sequence.prompt, sequence.new, sequence.request.max_new_tokens, now - sequence.arrived,
    )  # fmt: skip
