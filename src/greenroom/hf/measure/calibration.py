"""Calibration: sizes, splits and pinned sets of systems, from the routing of the warm-up prompt.

The prompt that is played before the first round is recorded in memory. AdapMoE's sizes come from a
dynamic programme over it, MoEpic's budgets and splits from Algorithm 1, and a pinned set is what it
asked for most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from greenroom.config import scope_of
from greenroom.core.cache.pins import Pins, Task
from greenroom.errors import BudgetError, PredictorError, TraceError, UsageError
from greenroom.hf.attach.predictors import ModelPredictors, build_predictors
from greenroom.hf.history.split_counts import HeadTimer, latency_of
from greenroom.hf.measure.entries import Entry
from greenroom.hf.measure.harness import Harness
from greenroom.hf.measure.recording import recorder_of
from greenroom.hf.text.generate import encode
from greenroom.plan.configurator import TokenLatency
from greenroom.plan.history.routing import RoutingHistory
from greenroom.plan.sizing import CacheConfiguration, recorded_activity, slots_with_fewest_misses
from greenroom.predictors import AUTO, AUTOMATIC, OFF, predictor
from greenroom.runtime.recording.forecasts import distance_of, parse_predictors
from greenroom.trace import Trace, stream
from greenroom.trace.journal import Journal, read
from greenroom.trace.prompts import Prompt
from greenroom.trace.segments import Header


@dataclass(frozen=True)
class Calibration:
    """The routing of a warm-up, with the predictions that were recorded beside it, and the seconds
    that its tokens took, where any was decoded."""

    trace: Trace
    latency: TokenLatency | None

    def fill(self, entry: Entry, capacity: int, least: int) -> None:
        """Set an entry's `calibrated_options` from this routing.

        Sizes and splits share out `capacity` slots. A pinned set may have the `least` slots that
        there will be, but for those of a token; BudgetError where none is left.
        """
        found: dict[str, Any] = {}
        if "split" in entry.calibrated_options:
            found = self._configured(entry, capacity)
        elif "scope" in entry.calibrated_options:
            requests = stream(self.trace, "runtime")
            found = {
                "scope": _said(slots_with_fewest_misses(requests, self.trace.offsets, capacity))
            }
            entry.notes.append(f"sizes by a dynamic programme over the {self._what}")
        if "pin" in entry.calibrated_options:
            entry.pins = self._hot(entry.config.scope, least)
            kept = next(iter(entry.pins.tasks.values())).experts.size
            entry.notes.append(f"{kept} experts stay, those asked for most in the {self._what}")
        entry.config = replace(entry.config, **found)

    @property
    def _what(self) -> str:
        return f"warm-up ({self.trace.tokens} tokens)"

    def _configured(self, entry: Entry, capacity: int) -> dict[str, str]:
        """Algorithm 1's splits, and its budgets where they are wanted."""
        if self.latency is None:
            raise UsageError("Algorithm 1 needs seconds of decoded tokens: give longer --tokens")
        activity = recorded_activity(self.trace)
        chosen = CacheConfiguration.of(activity, capacity, self.latency)
        ratios = chosen.split or (1.0,) * self.trace.layers
        entry.notes.append(
            f"budgets by Algorithm 1 over the {self._what}, tops {min(ratios):.2f} to"
            f" {max(ratios):.2f} of an expert"
        )
        found = {"split": _said(ratios)}
        return found | (
            {"scope": _said(chosen.scope)} if "scope" in entry.calibrated_options else {}
        )

    def _hot(self, scope: str, least: int) -> Pins:
        """What was asked for most, but for the slots that a token needs."""
        trace, offsets = self.trace, self.trace.offsets.tolist()
        groups = 1 if scope == "shared" else trace.layers
        room = least - trace.top_k * groups
        if room < groups:
            raise BudgetError(
                f"{least} slots leave none to a set that stays: a token needs {trace.top_k} of"
                f" {groups} groups"
            )
        experts = trace.experts.astype(np.int64) + trace.offsets[:-1, None]
        uses = np.bincount(experts.reshape(-1), minlength=offsets[-1])
        hot = np.sort(RoutingHistory.of_counts(uses).hot_set(offsets, room, scope_of(scope)))
        return Pins({"warm-up": Task(hot, uses / trace.tokens)}, tuple(offsets))


def _said(numbers: Sequence[float]) -> str:
    """As an option says them."""
    return ",".join(f"{number:.6f}".rstrip("0").rstrip(".") for number in numbers)


def record_warm_up(
    harness: Harness, prompt: Prompt, tokens: int, raw: bool, by: ModelPredictors
) -> Calibration:
    """Play the warm-up and record it, with what predictors that run `by` its side say.

    TraceError where this model's passes cannot be recorded.
    """
    model, catalog, made = harness.model, harness.setup.catalog, by.predictors
    header = Header(
        catalog.experts_per_layer,
        predictions={name: distance_of(each) for name, each in made.items()},
    )
    length, head = encode(harness.tokenizer, prompt.content, raw).shape[1], HeadTimer(model)
    with (
        closing(head),
        TemporaryDirectory(prefix="greenroom-") as folder,
        closing(Journal(Path(folder) / "warm-up", header)) as journal,
    ):
        with (
            recorder_of(model, catalog, journal, by) as recorder,
            recorder.request(0, prompt.label, length),
        ):
            harness.play([prompt], tokens, raw=raw)
        trace = read(journal.path)
    return Calibration(trace, latency_of(model.greenroom.driver, head.seconds))


def entry_predictors(harness: Harness, entry: Entry) -> ModelPredictors:
    """What an entry that splits will be prefetched by; nothing for others.

    UsageError or PredictorError where it cannot run beside this model, or no routing be recorded.
    """
    model, catalog = harness.model, harness.setup.catalog
    if model.config.is_encoder_decoder:
        raise UsageError("its parts are found from routing, and a pass of an encoder-decoder goes"
                         " through a part of the layers")  # fmt: skip
    name = entry.config.prefetch if "split" in entry.calibrated_options else OFF
    if predictor(name).kind is AUTO:
        name = AUTOMATIC[0]
    if name == OFF:
        return build_predictors(model, catalog, [])
    return build_predictors(model, catalog, parse_predictors(name), file=entry.config.predictor)


def calibrate(
    harness: Harness, entries: Sequence[Entry], prompt: Prompt, tokens: int, raw: bool
) -> None:
    """Play a prompt that is not counted, with the settings that the model was loaded with. Entries
    that want what its routing says have it then; of one that cannot, `skip_reason` says why."""
    made = harness.attach(harness.config)
    wanting = [entry for entry in entries if entry.calibrated_options and not entry.skip_reason]
    by: ModelPredictors | None = None
    for entry in wanting:
        with _or_without(entry):
            mine = entry_predictors(harness, entry)
            by = mine if by is None or mine.predictors else by
    found = None
    try:
        if by is not None:
            found = record_warm_up(harness, prompt, tokens, raw, by)
    except TraceError as error:
        for entry in wanting:
            entry.skip_reason = entry.skip_reason or str(error)
    if found is None:
        harness.play([prompt], tokens, raw=raw)
        return
    least = made.slot_budget.full_context_slots if made.slot_budget is not None else made.capacity
    for entry in wanting:
        if not entry.skip_reason:
            with _or_without(entry):
                found.fill(entry, made.capacity, least)


@contextmanager
def _or_without(entry: Entry) -> Iterator[None]:
    """An entry that cannot have something says why."""
    try:
        yield
    except (UsageError, PredictorError) as error:
        entry.skip_reason = str(error)
