"""Calibrate cache sizes, splits and pinned experts from the routing of a warm-up prompt.

Before the first round of a benchmark, one prompt is answered and its expert routing is recorded.
From the routing, AdapMoE's dynamic programme computes cache sizes for each layer, MoEpic's
Algorithm 1 computes cache sizes and the split of experts, and the most used experts are pinned.
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
    """Expert routing and predictions recorded on a warm-up prompt, for benchmark settings.

    latency: measured times of decoded tokens; None if too few tokens were decoded
    """

    trace: Trace
    latency: TokenLatency | None

    def fill(self, entry: Entry, capacity: int, least: int) -> None:
        """Set the options that a benchmark entry calibrates, from a warm-up prompt's routing.

        `calibrated_options` of the entry names these options.

        capacity: expert slots that are divided among the layers
        least:    expert slots that remain with a full context; pinned experts leave enough of them
                  free for one token, or BudgetError is raised
        """
        options: dict[str, Any] = {}
        if "split" in entry.calibrated_options:
            options = self._moepic_options(entry, capacity)
        elif "scope" in entry.calibrated_options:
            requests = stream(self.trace, "runtime")
            slots = slots_with_fewest_misses(requests, self.trace.offsets, capacity)
            options = {"scope": _as_option(slots)}
            entry.notes.append(f"sizes by a dynamic programme over the {self._source}")
        if "pin" in entry.calibrated_options:
            entry.pins = self._hot_set(entry.config.scope, least)
            count = next(iter(entry.pins.tasks.values())).experts.size
            entry.notes.append(f"{count} pinned experts, those used most in the {self._source}")
        entry.config = replace(entry.config, **options)

    @property
    def _source(self) -> str:
        return f"warm-up ({self.trace.tokens} tokens)"

    def _moepic_options(self, entry: Entry, capacity: int) -> dict[str, str]:
        """Return MoEpic's splits, and its cache sizes if `scope` is calibrated too."""
        if self.latency is None:
            raise UsageError(
                "calibrating splits and cache sizes of layers (MoEpic) needs the times of more"
                " decoded tokens: raise --tokens"
            )
        activity = recorded_activity(self.trace)
        chosen = CacheConfiguration.of(activity, capacity, self.latency)
        ratios = chosen.split or (1.0,) * self.trace.layers
        entry.notes.append(
            f"budgets by Algorithm 1 over the {self._source}, tops {min(ratios):.2f} to"
            f" {max(ratios):.2f} of an expert"
        )
        options = {"split": _as_option(ratios)}
        if "scope" in entry.calibrated_options:
            options["scope"] = _as_option(chosen.scope)
        return options

    def _hot_set(self, scope: str, least: int) -> Pins:
        """Choose the most used experts to pin, in the slots that a token leaves free."""
        trace, offsets = self.trace, self.trace.offsets.tolist()
        groups = 1 if scope == "shared" else trace.layers
        room = least - trace.top_k * groups
        if room < groups:
            each = f" in each of {groups} layers" if groups > 1 else ""
            raise BudgetError(
                f"an expert cache of {least} slots has none for pinned experts: a token needs"
                f" {trace.top_k} slots{each}; give more memory or a larger --cache"
            )
        experts = trace.experts.astype(np.int64) + trace.offsets[:-1, None]
        uses = np.bincount(experts.reshape(-1), minlength=offsets[-1])
        hot = np.sort(RoutingHistory.of_counts(uses).hot_set(offsets, room, scope_of(scope)))
        return Pins({"warm-up": Task(hot, uses / trace.tokens)}, tuple(offsets))


def _as_option(numbers: Sequence[float]) -> str:
    """Format numbers as a command-line option's value, separated by commas."""
    return ",".join(f"{number:.6f}".rstrip("0").rstrip(".") for number in numbers)


def record_warm_up(
    harness: Harness, prompt: Prompt, tokens: int, raw: bool, predictors: ModelPredictors
) -> Calibration:
    """Answer the warm-up prompt, and record its routing with the predictors' predictions.

    Raises TraceError if this model's passes cannot be recorded.
    """
    model, catalog = harness.model, harness.setup.catalog
    header = Header(
        catalog.experts_per_layer,
        predictions={name: distance_of(each) for name, each in predictors.predictors.items()},
    )
    length, head = encode(harness.tokenizer, prompt.content, raw).shape[1], HeadTimer(model)
    with (
        closing(head),
        TemporaryDirectory(prefix="greenroom-") as folder,
        closing(Journal(Path(folder) / "warm-up", header)) as journal,
    ):
        with (
            recorder_of(model, catalog, journal, predictors) as recorder,
            recorder.request(0, prompt.label, length),
        ):
            harness.play([prompt], tokens, raw=raw)
        trace = read(journal.path)
    return Calibration(trace, latency_of(model.greenroom.driver, head.seconds))


def entry_predictors(harness: Harness, entry: Entry) -> ModelPredictors:
    """Return the expert predictors that a benchmark entry's calibration observes.

    There are none unless the entry's split is calibrated. Raises UsageError for an encoder-decoder
    model, which cannot be calibrated, and PredictorError or UsageError if a predictor cannot
    run with this model.
    """
    model, catalog = harness.model, harness.setup.catalog
    if model.config.is_encoder_decoder:
        raise UsageError(
            "this setting is calibrated from recorded expert routing, which works only with"
            " decoder-only models: leave the setting out"
        )
    name = entry.config.prefetch if "split" in entry.calibrated_options else OFF
    if predictor(name).kind is AUTO:
        name = AUTOMATIC[0]
    if name == OFF:
        return build_predictors(model, catalog, [])
    return build_predictors(model, catalog, parse_predictors(name), file=entry.config.predictor)


def calibrate(
    harness: Harness, entries: Sequence[Entry], prompt: Prompt, tokens: int, raw: bool
) -> None:
    """Answer a warm-up prompt, and calibrate benchmark entries from its expert routing.

    The answer is not measured. It is generated with the config that the model was loaded with. An
    entry that cannot be calibrated gets a `skip_reason`.
    """
    attached = harness.attach(harness.config)
    calibrated = [entry for entry in entries if entry.calibrated_options and not entry.skip_reason]
    predictors: ModelPredictors | None = None
    for entry in calibrated:
        with _or_skip(entry):
            candidate = entry_predictors(harness, entry)
            if predictors is None or candidate.predictors:
                predictors = candidate
    calibration = None
    try:
        if predictors is not None:
            calibration = record_warm_up(harness, prompt, tokens, raw, predictors)
    except TraceError as error:
        for entry in calibrated:
            entry.skip_reason = entry.skip_reason or str(error)
    if calibration is None:
        harness.play([prompt], tokens, raw=raw)
        return
    budget = attached.slot_budget
    least = attached.capacity if budget is None else budget.full_context_slots
    for entry in calibrated:
        if not entry.skip_reason:
            with _or_skip(entry):
                calibration.fill(entry, attached.capacity, least)


@contextmanager
def _or_skip(entry: Entry) -> Iterator[None]:
    """Return a context that turns an error into a benchmark entry's `skip_reason`."""
    try:
        yield
    except (UsageError, PredictorError) as error:
        entry.skip_reason = str(error)
