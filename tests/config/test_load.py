"""Options of a run that belong together."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.config import LoadConfig, ServeConfig, SimulateConfig
from greenroom.config.values import NamedAdapter, parse_adapters
from greenroom.errors import UsageError
from tests.options import needs_option


def test_tau_needs_splits_that_are_chosen_while_running():
    assert LoadConfig(split="auto", tau=100).tau == 100
    assert LoadConfig(split="auto", tau=0).tau == 0
    with pytest.raises(UsageError, match="--tau has an effect only with --split auto, got --split"):
        LoadConfig(split="0.5", tau=100)
    with pytest.raises(UsageError, match="--tau must be at least 0 token"):
        LoadConfig(split="auto", tau=-1)
    with pytest.raises(UsageError, match="--tau has an effect only with --system moepic"):
        SimulateConfig(capacity="4", policy="lru", tau=100, machine="auto")


def test_adapters_have_names() -> None:
    assert parse_adapters(None) == ()
    assert parse_adapters("some/math") == (NamedAdapter("math", "some/math"),)
    assert parse_adapters(("math=/a/b=c", "/d=e/law")) == (
        NamedAdapter("math", "/a/b=c"), NamedAdapter("law", "/d=e/law"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("=/a", "--adapter =/a: write NAME=DIR"),
        ("math=", "--adapter math=: write NAME=DIR"),
        ("two words=/a", "--adapter two words=/a: write NAME=DIR"),
        ("math:latest=/a", "--adapter math:latest=/a: write NAME=DIR"),
        ("/", "--adapter /: write NAME=DIR"),
        (("math=/a", "/b/math"), "--adapter /b/math: two adapters have the name math"),
    ],
)
def test_adapters_without_a_name_of_their_own_are_refused(value: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        LoadConfig(adapter=value)
    assert str(error.value).startswith(message)


def test_a_copy_of_the_model_has_no_experts_of_adapters() -> None:
    with pytest.raises(UsageError, match="--repack reads experts from a copy of the model"):
        LoadConfig(adapter="/a", repack="/b")


@pytest.mark.parametrize(
    ("load", "serve", "name"),
    [
        ({}, {"speculate": "mtp"}, "--speculate mtp"),
        ({"split": "0.5"}, {}, "--split"),
        ({"pin": "hot.txt"}, {}, "--pin"),
        ({"prefetch": "learned", "predictor": "file"}, {}, "--predictor"),
        pytest.param({"skip_below": 0.1}, {}, "--miss-precision, --skip-below",
                     marks=needs_option("skip_below")),
        pytest.param({"co_compute": "auto"}, {}, "--co-compute auto",
                     marks=needs_option("co_compute")),
    ],
)  # fmt: skip
def test_a_server_with_adapters_refuses_what_knows_one_model(
    load: Any, serve: Any, name: str
) -> None:
    config = LoadConfig(adapter=("math=/a", "law=/b"), **load)
    with pytest.raises(UsageError) as error:
        ServeConfig(**serve).check_variants(config)
    assert str(error.value).startswith(name)
    assert str(error.value).endswith("cannot be used with --adapter here: leave out one of them")


def test_a_server_with_adapters_takes_the_other_options() -> None:
    load = LoadConfig(adapter="/a", policy="lru", scope="per-layer", kv="int8", prefetch="markov")
    ServeConfig(speculate="lookup", batch_invariant=True).check_variants(load)
