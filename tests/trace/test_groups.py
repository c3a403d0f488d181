from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given

from greenroom.config import TopicsConfig
from greenroom.trace import Trace, groups, synth
from tests.trace.strategies import SETTINGS, traces
from tests.trace.test_trace import small


def alike(which: list[int], tokens: int = 6) -> Trace:
    """One request for each entry, whose tokens use experts of that kind alone."""
    random = np.random.default_rng(1)
    kinds = {0: [0, 1, 2], 1: [3, 4, 5], 2: [6, 7, 8]}
    rows = [
        [random.permutation(kinds[kind])[:2] for _layer in range(2)]
        for kind in which
        for _token in range(tokens)
    ]
    starts = np.arange(len(which) + 1) * tokens
    return Trace(
        np.array(rows, np.uint8),
        np.array([9, 9]),
        starts,
        starts,
        np.ones(len(which), np.bool_),
        tuple(map(str, which)),
    )


def test_activation_matrices_of_a_hand_worked_trace():
    assert groups.activation_matrices(small()).tolist() == [
        [1, 3, 1, 1, 3, 1, 2],
        [2, 1, 0, 1, 1, 2, 1],
    ]


def test_kinds_of_requests_are_found():
    which = [0, 1, 2, 0, 1, 2, 2, 1, 0, 0, 0, 1]
    found = groups.group_requests(alike(which), most=8)
    assert found.number == 3
    names = {kind: found.of[which.index(kind)] for kind in range(3)}
    assert found.of.tolist() == [names[kind] for kind in which]
    assert found.largest == 5 / 12
    a, b = names[0], names[1]
    assert found.transitions[a, b] == pytest.approx(3 / 5)  # 0 is followed by 1, 1, 0, 0, 1
    assert found.transitions[a, a] == pytest.approx(2 / 5)


def test_requests_that_are_all_alike_are_one_group():
    trace = small().head(1)
    assert groups.group_requests(trace).number == 1
    same = small().select([0, 0, 0, 0])
    assert groups.group_requests(same).number == 1
    assert groups.group_requests(same).transitions.tolist() == [[1.0]]


def test_the_elbow_is_where_the_curve_bends_most():
    assert groups.find_elbow(np.array([10.0, 4.0, 1.0, 0.8, 0.6, 0.5])) == 3
    assert groups.find_elbow(np.array([5.0])) == 1
    assert groups.find_elbow(np.array([5.0, 0.0])) == 2
    assert groups.find_elbow(np.array([3.0, 3.0, 3.0])) == 1


@SETTINGS
@given(traces())
def test_inertia_is_what_its_definition_says_and_never_rises(trace):
    found = groups.group_requests(trace)
    assert (np.diff(found.inertia) <= 1e-9).all()
    counts = groups.activation_matrices(trace).astype(float)
    for a, b in zip(trace.offsets[:-1], trace.offsets[1:], strict=True):
        counts[:, a:b] /= counts[:, a:b].sum(axis=1, keepdims=True)
    total = sum(
        ((counts[found.of == g] - counts[found.of == g].mean(axis=0)) ** 2).sum()
        for g in set(found.of.tolist())
    )
    assert found.inertia[found.number - 1] == pytest.approx(total, abs=1e-9)
    assert json.dumps(groups.summary(trace), allow_nan=False)


def test_topics_are_groups():
    options = TopicsConfig(requests=40, topics=4, drift=0, tokens=4000, skew=2)
    trace = synth.topics(options)
    found = groups.group_requests(trace, most=12)
    assert found.number == 4
    assert len(set(zip(trace.labels, found.of.tolist(), strict=True))) == 4
