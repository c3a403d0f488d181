"""Policies that are not part of Greenroom: a file, an object, an edited file."""

from __future__ import annotations

from pathlib import Path

import pytest

import greenroom
from greenroom.core.compiling.function_digest import FunctionDigest
from greenroom.core.policy import Policy
from greenroom.errors import UsageError
from greenroom.policies import policy
from greenroom.sim.replay import replay
from greenroom.trace import stream
from tests.policies.streams import OFFSETS, as_stream, one_layer
from tests.sim.small import trace

FIRST = """
import numpy as np
from greenroom.core.policy import Policy, PolicyOption, compiled

@compiled
def victim(cache, state, group, piece, now):
    for slot in range(cache.first[group], cache.first[group + 1]):
        if cache.pinned[cache.piece_in[slot]] == 0:
            return cache.piece_in[slot]
    return -1

policy = Policy("first-slot", lambda setup: np.zeros(1), victim,
                options=(PolicyOption("x", 1, "nothing"),))
"""
LAST = FIRST.replace(
    "range(cache.first[group], cache.first[group + 1])",
    "range(cache.first[group + 1] - 1, cache.first[group] - 1, -1)",
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FIRST)
    return path


def misses(chosen: Policy, *pieces: int) -> int:
    return replay(as_stream(one_layer(*pieces)), OFFSETS, 2, chosen, pin="none").misses


def test_a_file_is_a_policy_and_takes_options(file: Path) -> None:
    assert policy(str(file)) is policy(str(file))
    assert policy(f"{file}:x=3").settings == {"x": 3}
    # The first slot is replaced for ever, so piece 1 stays.
    assert misses(policy(str(file)), 0, 1, 2, 1, 3, 1, 2, 1) == 5


def test_an_edited_file_is_another_policy(file: Path) -> None:
    """Names stay, content differs: neither the module nor its compiled code may be the old one."""
    first = policy(str(file))
    assert misses(first, 0, 1, 2, 0, 2, 0) == 6
    assert LAST != FIRST
    file.write_text(LAST)
    last = policy(str(file))
    assert misses(last, 0, 1, 2, 0, 2, 0) == 3
    assert FunctionDigest.of(first.victim.py_func) != FunctionDigest.of(last.victim.py_func)


def test_the_simulator_takes_files_and_objects(file: Path) -> None:
    small = trace([[-9, *[1] * 30]])
    by_hand = replay(stream(small, "natural"), small.offsets, 4, policy(str(file)))
    rows = greenroom.simulate(small, [policy(str(file)), f"lru,{file}:x=2"], 4)
    assert [row["policy"] for row in rows] == ["first-slot", "lru", "first-slot:x=2"]
    assert rows[0]["misses"] == rows[2]["misses"] == by_hand.misses


def test_two_policies_of_one_name_are_refused(file: Path) -> None:
    first = policy(str(file))
    file.write_text(LAST)
    with pytest.raises(UsageError, match="two policies are called first-slot"):
        greenroom.simulate(trace([[1, 1]]), [first, policy(str(file))])
    assert len(greenroom.simulate(trace([[1, 1]]), [first, first], 4)) == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "cannot be read: No such file"),
        ("x = 1", "defines no policy: its variable `policy`"),
        ("policy = 'lru'", "defines no policy"),
        ("import nowhere_to_be_found", "fails with ModuleNotFoundError: No module named"),
        ("def f(:", "fails with SyntaxError"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, source: str | None, message: str) -> None:
    path = tmp_path / "wrong.py"
    if source is not None:
        path.write_text(source)
    for _ in range(2):  # the second time, nothing is left of the first
        with pytest.raises(UsageError, match=message) as caught:
            policy(str(path))
        assert "\n" not in str(caught.value)
