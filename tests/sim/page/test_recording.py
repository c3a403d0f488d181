"""Recordings of simulations: what the map of experts shows of a trace."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from greenroom.config import ZipfConfig
from greenroom.sim.page.recording import MOST_FRAMES, recording
from greenroom.sim.study import Cell, Study
from greenroom.trace import Trace
from greenroom.trace.synth import zipf
from tests.drawing.decode import unpack

EXPERTS = 30


def example() -> Trace:
    return zipf(ZipfConfig(layers=3, experts=10, top_k=2, requests=4, tokens=15))


def study(order: str = "runtime", **options: Any) -> Study:
    return Study.of(example(), order, **options)


@pytest.mark.parametrize("name", ["lru", "next-use", "opt"])
@pytest.mark.parametrize(
    ("order", "pin", "options"),
    [
        ("runtime", "step", {}),
        ("natural", "none", {"scope": "per-layer"}),
        ("rounds", "step", {"reset": True}),
        ("runtime", "step", {"resizes": ((5, 6), (10, 12))}),
    ],
)
def test_the_cache_is_that_of_a_simulation(
    name: str, order: str, pin: str, options: dict[str, Any]
) -> None:
    if name == "opt" and "resizes" in options:
        pytest.skip("OPT knows one size of the cache")
    source, cell = study(order, **options), Cell(name, 9, pin)
    played, row = recording(source, cell, "synthetic"), source.run(cell)
    last = played["frames"][-1]
    assert sum(last["misses"]) == row["misses"]
    assert sum(last["hits"]) + row["misses"] == row["requests"]
    assert played["greeting"]["layers"] == [10, 10, 10]
    assert last["t"] == source.trace.tokens
    if order == "runtime":
        assert len(played["frames"]) == source.trace.passes
    for frame in played["frames"]:
        states = unpack(frame["states"], 2, EXPERTS)
        assert states.count(3) == frame["slots"][1] <= frame["slots"][0]
    if "resizes" in options:
        assert {frame["slots"][0] for frame in played["frames"]} == {9, 6, 12}
    json.dumps(played, allow_nan=False)


def test_a_hit_was_in_memory_a_frame_before() -> None:
    """Residents and misses agree: the experts of a pass that were absent before it missed."""
    played = recording(study(), Cell("lru", 12), "")["frames"]
    for before, after in pairwise(played):
        present = np.array(unpack(before["states"], 2, EXPERTS)) == 3
        used = np.array(unpack(after["used"], 1, EXPERTS)) == 1
        missed = sum(after["misses"]) - sum(before["misses"])
        assert missed >= np.count_nonzero(used & ~present)
        if missed == 0:
            assert present[used].all()


def test_a_frame_has_the_experts_of_its_pass() -> None:
    trace = example()
    played = recording(study(), Cell("lru", EXPERTS), "")
    for number, frame in enumerate(played["frames"]):
        tokens = slice(*trace.pass_starts[number : number + 2])
        ids = trace.experts[tokens].astype(np.int64) + trace.offsets[:-1, None]
        used = np.flatnonzero(unpack(frame["used"], 1, EXPERTS))
        assert used.tolist() == np.unique(ids).tolist()
        assert frame["t"] == tokens.stop


@pytest.mark.parametrize("last", [1, 7])
def test_the_last_passes_are_those_of_the_whole(last: int) -> None:
    whole = recording(study(), Cell("next-use", 9), "")
    part = recording(study(), Cell("next-use", 9), "", last)
    assert part["frames"] == whole["frames"][-last:]
    assert part["greeting"] == whole["greeting"]


def test_use_is_counted_in_tokens() -> None:
    trace, begun = example(), recording(study(), Cell("lru", 9), "")["greeting"]
    assert begun["uses"] == trace.uses().tolist()
    assert sum(begun["uses"]) == trace.tokens * trace.layers * trace.top_k
    levels = np.array(unpack(begun["levels"], 4, EXPERTS))
    assert (levels == 0).tolist() == (trace.uses() == 0).tolist()


def test_long_traces_have_fewer_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_FRAMES >= 1000
    monkeypatch.setattr("greenroom.sim.page.recording.MOST_FRAMES", 10)
    passes = example().passes
    every = -(-passes // 10)
    few = recording(study(), Cell("lru", 9), "")["frames"]
    assert len(few) == -(-passes // every) <= 10
    assert few[-1]["t"] == example().tokens
