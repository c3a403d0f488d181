"""Parts of a benchmark's report: options without names of files, and figures by hand."""

from __future__ import annotations

import pytest

from greenroom.config import BenchmarkConfig, LoadConfig
from greenroom.hf.measure.entries import Entry
from greenroom.hf.measure.harness import Measurement
from greenroom.hf.measure.share import _figures, _settings


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"scope": "3,5"}, "3,5"),
        ({"scope": "per-layer"}, "per-layer"),
        ({"pin": "jane.json"}, "(a file)"),
        ({"predictor": "jane", "prefetch": "learned"}, "(a file)"),
        ({"repack": "jane"}, "(a file)"),
        ({"config": "jane/model"}, "(a file)"),
        ({"read_limit": "50MB"}, "50MB"),
        ({"memory": "8GiB"}, "8GiB"),
        ({"threads": 3}, 3),
    ],
)
def test_an_option_shows_its_value_unless_that_may_be_a_file(options, shown):
    name = f"--{next(iter(options)).replace('_', '-')}"
    assert _settings(LoadConfig(**options), BenchmarkConfig())[name] == shown


def test_figures_are_means_over_rounds():
    """Two rounds of 10 and 20 ms a token, with one and three misses of ten."""
    entry = Entry("llru", LoadConfig(), [
        Measurement((0.5,), (0.01, 0.01), ((1, 2),), 10, 1, 200, 0.0, 0.0),
        Measurement((0.7,), (0.02, 0.02), ((1, 2),), 10, 3, 600, 0.0, 0.0),
    ])  # fmt: skip
    row = _figures(entry)
    assert row["tpot_s"] == pytest.approx((0.015, 0.01, 0.02))
    assert row["tokens_per_s"] == pytest.approx((1 / 0.015, 50, 100))
    assert row["ttft_s"] == pytest.approx((0.6, 0.5, 0.7))
    assert row["hit_ratio"] == pytest.approx((0.8, 0.7, 0.9))
    assert row["bytes_per_token"] == pytest.approx((200, 100, 300))
