"""Calibration of benchmark entries from the routing of a warm-up prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from greenroom.config import LoadConfig
from greenroom.core.cache.pins import Pins
from greenroom.errors import BudgetError, TraceError, UsageError
from greenroom.hf.measure import calibration
from greenroom.hf.measure.calibration import (
    Calibration,
    calibrate,
    entry_predictors,
    record_warm_up,
)
from greenroom.hf.measure.entries import Entry
from greenroom.hf.measure.harness import Harness
from greenroom.plan.configurator import TokenLatency
from greenroom.trace.prompts import Prompt
from tests.hf.measure.conftest import BASE
from tests.sim import small

PROMPT = Prompt("a few words", "one")


def entry(*calibrated_options: str, **options: Any) -> Entry:
    return Entry("row", LoadConfig(cache="50%", **options), calibrated_options=calibrated_options)


def test_recorded_routing_equals_the_requests_of_the_cache(harness: Harness):
    attached = harness.attach(BASE)
    by = entry_predictors(harness, entry("split", prefetch="next-gate:1"))
    calibration = record_warm_up(harness, PROMPT, 16, True, by)
    trace = calibration.trace
    assert trace.pass_prefill.tolist() == [True] + [False] * 15
    dense = trace.experts.astype(np.int64) + trace.offsets[:-1, None]
    request_counts = np.zeros(harness.experts, np.int64)
    for begin, end in zip(trace.pass_starts[:-1], trace.pass_starts[1:], strict=True):
        request_counts[np.unique(dense[begin:end])] += 1
    harness.learn()
    assert harness.request_counts.tolist() == request_counts.tolist()
    assert trace.predictions["next-gate:1"].distance == 1
    latency = calibration.latency
    assert latency is not None
    assert min(latency.attention, latency.moe, latency.head, latency.load) > 0
    meter = attached.driver.meter
    predicted = latency.head + 2 * (latency.attention + latency.moe)  # of two layers
    assert predicted == pytest.approx((meter.decode_s - meter.waited_s) / meter.decodes)


def test_pinned_experts_leave_the_slots_of_a_token():
    trace = small.trace([[-6, *[1] * 8]], layers=2, experts=8, top_k=2)
    row = entry("pin")
    Calibration(trace, None).fill(row, capacity=8, least=7)
    assert isinstance(row.pins, Pins)
    hot = row.pins.first
    assert hot.size == 5
    uses = np.bincount((trace.experts.astype(int) + trace.offsets[:-1, None]).reshape(-1))
    assert uses[hot].min() >= np.delete(uses, hot).max()
    per_layer = entry("pin", scope="per-layer")
    Calibration(trace, None).fill(per_layer, capacity=8, least=8)
    assert per_layer.pins is not None
    assert np.bincount(per_layer.pins.first // 8).tolist() == [2, 2]
    with pytest.raises(BudgetError, match="2 slots has none for pinned experts"):
        Calibration(trace, None).fill(entry("pin"), capacity=2, least=2)


def test_calibrated_splits_include_cache_sizes_unless_the_user_set_them():
    trace = small.trace([[-6, *[1] * 8]], layers=2, experts=8, top_k=2)
    warmed = Calibration(trace, TokenLatency(1.0, 1.0, 0.5, 4.0))
    row, split_alone = entry("scope", "split"), entry("split", scope="per-layer")
    for each in (row, split_alone):
        warmed.fill(each, capacity=8, least=8)
        assert len(each.config.split.split(",")) == 2
    assert sum(map(float, row.config.scope.split(","))) == pytest.approx(8, abs=1e-5)
    assert split_alone.config.scope == "per-layer"
    with pytest.raises(UsageError, match="raise --tokens"):
        Calibration(trace, None).fill(entry("split"), capacity=8, least=8)


def test_an_entry_that_cannot_be_calibrated_is_skipped_alone(harness: Harness):
    """A predictor without its file: its row says so, others have theirs."""
    rows = [entry("split", prefetch="learned"), entry("scope"), entry()]
    calibrate(harness, rows, PROMPT, 16, True)
    assert "needs a file of `greenroom train-predictor`" in rows[0].skip_reason
    assert sum(map(float, rows[1].config.scope.split(","))) == 8
    assert rows[2].config == LoadConfig(cache="50%")
    assert [row.skip_reason for row in rows[1:]] == ["", ""]


def test_entries_that_need_routing_are_skipped_if_it_cannot_be_recorded(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
):
    def refused(*args: Any) -> None:
        raise TraceError("a pass has layers of different top-k")

    monkeypatch.setattr(calibration, "record_warm_up", refused)
    rows = [entry("scope"), entry()]
    calibrate(harness, rows, PROMPT, 16, True)
    assert [row.skip_reason for row in rows] == ["a pass has layers of different top-k", ""]
    harness.learn()
    assert harness.request_counts.sum() > 0  # it was played all the same


def test_calibration_goes_on_after_an_error(harness: Harness):
    with pytest.raises(UsageError, match="greenroom pack"):
        harness.attach(LoadConfig(cache="50%", device="cpu", split="0.5"))
    harness.attach(BASE)
    assert len(harness.play([PROMPT], 16, raw=True).tokens[0]) == 16
