"""The policy that knows the next tokens' routing: next-use without them, OPT with all of them."""

from __future__ import annotations

import pytest

from benchmarks.papers.known_policy import foresighted_policy
from greenroom.policies import policy
from greenroom.sim.replay import replay
from tests.policies.plain import plain_policies
from tests.policies.streams import OFFSETS, as_stream, tokens

STREAM = as_stream(tokens(seed=3, count=60))


@pytest.mark.parametrize(
    ("count", "equal"), [(0, policy("next-use")), (60, policy("opt"))], ids=["none", "all"]
)
def test_knowing_no_token_is_next_use_and_knowing_all_is_opt(count, equal):
    with plain_policies():
        got, expected = (
            replay(STREAM, OFFSETS, 5, each, pin="none").misses
            for each in (foresighted_policy(count), equal)
        )
    assert got == expected


def test_routing_of_the_next_token_lowers_misses():
    with plain_policies():
        some, more = (
            replay(STREAM, OFFSETS, 5, foresighted_policy(count), pin="none").misses
            for count in (0, 3)
        )
    assert more < some
