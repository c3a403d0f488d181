"""`greenroom.simulate`, as a notebook calls it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import greenroom
from greenroom.core.cost import Link
from greenroom.core.machine import Machine, Processor, Route, Table
from greenroom.errors import TraceError, UnknownName, UnknownOption, UsageError
from greenroom.policies import policy
from greenroom.sim.replay import replay
from greenroom.trace import Trace, save, stream
from tests.sim.small import trace


@pytest.fixture(scope="module")
def small() -> Trace:
    return trace([[-5, 1, 1, 1], [-3, 1, 1]])


def test_every_policy_at_every_capacity_in_order(small: Trace) -> None:
    results = greenroom.simulate(small, ["lru", "opt"], ["25%", 8])
    assert [(row["policy"], row["capacity"]) for row in results] == [
        ("lru", 4), ("lru", 8), ("opt", 4), ("opt", 8),
    ]  # fmt: skip
    by_hand = replay(stream(small, "natural"), small.offsets, 8, policy("lru"))
    assert (results[1]["requests"], results[1]["misses"]) == (by_hand.requests, by_hand.misses)
    assert len(results) == 4
    assert results[-1] == results[2:][1]
    sizes, ratios = results.curves()["lru"]
    assert sizes == [4, 8]
    assert ratios == [results[0]["miss_ratio"], results[1]["miss_ratio"]]
    with pytest.raises(UnknownName, match="miss_ratio"):
        results.curves("colour")


def test_it_shows_itself_as_a_table(small: Trace) -> None:
    results = greenroom.simulate(small, "lru,opt", "25%")
    title, order, empty, header, _, *lines = repr(results).splitlines()
    assert "13 tokens of 2 requests, 16 experts in 2 layers, top-2" in title
    assert order == "order natural, scope shared, pin step"
    assert not empty
    assert re.split(r" {2,}", header)[-1] == "miss ratio"
    assert [line.split()[0] for line in lines] == ["lru", "opt"]
    assert lines[0].split()[1:4] == ["4", "(25%)", f"{results[0]['requests']}"]
    html = results._repr_html_()
    assert html.count("<tr>") == 3
    assert "<td>opt</td>" in html


def test_a_file_and_a_limit(small: Trace, tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    save(small, path)
    entire, part = greenroom.simulate(path, "lru"), greenroom.simulate(str(path), "lru", limit=4)
    assert entire[0] == greenroom.simulate(small, "lru")[0]
    assert part[0]["requests"] == 4 * 2 * 2 < entire[0]["requests"]


def test_a_machine_adds_times_and_prefetching(small: Trace) -> None:
    work = Table((1000,), (1,), ((1e-3,),))
    machine = Machine((Route("disk", "host", Link(1e6)),), (Processor("cpu", "host", work, work),))
    results = greenroom.simulate(
        small, "lru", 8, machine=machine, expert_bytes=1000, prefetch=["off", "markov"]
    )
    assert [row["prefetch"] for row in results] == ["off", "markov"]
    assert results[0]["order"] == "runtime"
    assert results[0]["seconds"] > 0
    assert "tokens/s" in repr(results)
    assert set(results.curves("tpot_s")) == {"lru", "lru, markov"}


def test_speculation_is_simulated_per_cell() -> None:
    work = Table((1000,), (1, 16), ((1e-3, 1e-3),))  # for any number of tokens
    machine = Machine((Route("disk", "host", Link(1e6)),), (Processor("cpu", "host", work, work),))
    repeating = trace([[-4, *[1] * 80]])
    ids = np.resize([5, 6, 7, 8], repeating.tokens).astype(np.int32)
    repeating = replace(repeating, token_ids=ids)
    options: Any = {"machine": machine, "expert_bytes": 1000}
    plain = greenroom.simulate(repeating, "lru", [8, 16], **options)
    drafted = greenroom.simulate(repeating, "lru", [8, 16], speculate="lookup", **options)
    for one, other in zip(plain, drafted, strict=True):
        assert other["requests"] < one["requests"]  # a pass asks for an expert once
        assert other["tokens_per_s"] > one["tokens_per_s"]


WRONG = {
    "speculation": ({"speculate": "lookup"}, UsageError, "only with --machine"),
    "a drafter": ({"speculate": "best"}, UnknownName, "lookup"),
    "policy": ({"policy": "nope"}, UnknownName, "nope"),
    "no policy": ({"policy": []}, UsageError, "policy is an empty list"),
    "capacity": ({"capacity": "300%"}, UsageError, "300%"),
    "capacity of none": ({"capacity": 0}, UsageError, "from 1 to 16"),
    "no capacity": ({"capacity": []}, UsageError, "capacity is an empty list"),
    "order": ({"order": "random"}, UnknownName, "natural"),
    "pin": ({"pin": "all"}, UnknownName, "step"),
    "limit": ({"limit": 0}, UsageError, "at least 1 token"),
    "workers": ({"workers": 0}, UsageError, "at least 1"),
    "prefetch": ({"prefetch": "markov"}, UsageError, "only with --machine"),
    "sizes": ({"expert_bytes": 5}, UsageError, "only with --machine"),
    "option": ({"polcy": "lru"}, UnknownOption, "did you mean 'policy'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_line(small: Trace, case: str) -> None:
    options, kind, message = WRONG[case]
    with pytest.raises(kind, match=message) as caught:
        greenroom.simulate(small, **options)
    assert "\n" not in str(caught.value)


def test_what_is_no_trace_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        greenroom.simulate(tmp_path / "none.trace")
