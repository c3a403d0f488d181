"""Candidates by rank alone, worked by hand: 3 layers of 4 experts, as in test_lookahead."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.core.build import build_scheduler
from greenroom.core.config.base import ALL, TOP_K, VALUE
from greenroom.core.config.scheduler import SchedulerConfig
from greenroom.core.events import Computed
from greenroom.core.pieces import Pieces
from greenroom.core.prefetch.by_rank import RankedLookahead, lookahead_of
from greenroom.core.prefetch.lookahead import Lookahead
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.errors import UnknownName, UsageError
from greenroom.policies import policy
from tests.core.prefetch.test_lookahead import ABSENT, PRESENT, drain, ids
from tests.core.prefetch.test_prefetching import ManualDriver

PIECES = Pieces.unsplit([0, 4, 8, 12], [100] * 3, [2] * 12)


def saturated(depth: int | None) -> RankedLookahead:
    """A link that is never idle, on which no prefetch is worth its transfer by time."""
    ahead = RankedLookahead(PIECES, depth)
    ahead.pace.chunk.add(1.0)
    for prefill in (False, True):
        ahead.pace.idle[prefill].add(0.0)
    return ahead


def test_the_depth_limits_the_candidates_of_each_layer():
    for depth, expected in ((2, [5, 6, 8, 9]), (None, [5, 6, 7, 8, 9, 10])):
        ahead = saturated(depth)
        ahead.routed(0, ids(0, 1), False, 0.0, ABSENT)
        ahead.expect(2, ids(8, 9, 10))
        ahead.expect(1, ids(5, 6, 7))
        assert drain(ahead) == expected


def test_a_step_of_several_sequences_widens_the_depth_until_the_next():
    ahead = saturated(1)
    ahead.routed(0, ids(0, 1, 2), False, 0.0, ABSENT)
    ahead.expect(1, ids(7, 6, 5, 4))
    assert drain(ahead) == [7, 6, 5]
    ahead.routed(1, ids(7), False, 0.0, ABSENT)
    ahead.expect(2, ids(8, 9))
    assert drain(ahead) == [8]


def test_a_prompt_s_step_leaves_the_depth_and_fetches_the_next_layer():
    ahead = saturated(1)
    ahead.routed(1, ids(6, 7), True, 0.0, ABSENT)
    ahead.clear()
    ahead.routed(0, ids(0, 1, 2), True, 0.0, ABSENT)
    assert drain(ahead) == [6, 7, 4, 5]
    ahead.expect(2, ids(9, 8))
    assert drain(ahead) == [9]


def test_resident_experts_are_left_out():
    ahead = saturated(3)
    ahead.expect(0, ids(2, 1, 0))
    slots = ABSENT.copy()
    slots[1] = 5
    assert ahead.nearest(slots).piece == 2
    assert ahead.nearest(slots, borrowed={2}).piece == 0
    assert ahead.nearest(PRESENT) is None


def test_accuracy_is_that_of_the_other_rule_and_nothing_else_is_counted():
    by_rank, by_value = saturated(2), Lookahead(PIECES)
    rng = np.random.default_rng(3)
    for step in range(60):
        layer = step % 3
        for ahead in (by_rank, by_value):
            ahead.evicted(4 * layer)
        predicted, used = (4 * layer + rng.permutation(4)[: rng.integers(1, 5)] for _ in range(2))
        for ahead in (by_rank, by_value):
            ahead.expect(layer, predicted)
            ahead.routed(layer, np.sort(used), False, 0.0, ABSENT)
    assert by_rank.accuracy.by_layer() == by_value.accuracy.by_layer()
    assert by_rank.accuracy.counts == by_value.accuracy.counts
    assert by_rank.regret == 0.0 < by_value.regret


def test_a_full_buffer_keeps_what_it_has_and_the_next_prefetch_waits():
    """Two slots may be borrowed. Layer 2's second rank takes one, and stays in it."""
    h = ManualDriver(lookahead=RankedLookahead(Pieces.unsplit([0, 4, 8, 12], [100] * 3), 2))
    h.step(0, 0)
    h.predict(2, 8, 9)
    h.settle()
    assert h.s.counts.prefetches == 2
    assert h.predict(1, 5) == []
    assert h.s.counts.displaced == 0
    h.step(1, 6)
    h.step(2, 8, 9)
    assert (h.s.counts.useful, h.s.counts.wasted) == (2, 0)


def test_promoe_s_figure_10_with_all_of_its_techniques():
    """ProMoE, figure 10: 1, 3, 4 and 5 are prefetched, and the gate chooses 1, 2, 4 and 5.

    The first of three chunks of a prefetch for the next layer moves when the gate chooses. 2 comes
    before the second chunk (5.1), since it is requested before 1 is computed (5.2), and 4 and 5 are
    computed while it moves (5.3). 3 was wrong, and gives its slot up.
    """
    pieces, h = Pieces.unsplit([0, 12, 24], [300] * 2, [3] * 24), ManualDriver()
    h.s = Scheduler(
        pieces, 20, policy("lru"), lanes=1, ahead=5, lookahead=RankedLookahead(pieces, 4)
    )
    h.step(1, 12)
    h.predict(0, 1, 3, 4, 5)
    h.settle()
    assert h.predict(1, 13) == [(13, 0, False)]
    (compute,) = h.route(0, 1, 2, 4, 5)
    assert compute.experts.tolist() == [1, 4, 5]
    assert h.s.counts.wasted == 1
    assert h.started(h.landed()) == [(2, 0, True)]
    assert h.started(h.landed()) == [(2, 1, True)]
    assert h.send(Computed()) == []
    assert h.started(h.landed()) == [(2, 2, True)]
    h.group = None
    assert h.started(h.landed()) == [(13, 1, False)]
    assert h.group.experts.tolist() == [2]
    h.finish([])
    assert (h.s.counts.useful, h.residents) == (3, [1, 2, 4, 5, 12])


def test_the_rule_of_a_configuration_is_the_scheduler_s():
    kinds = {VALUE: Lookahead, TOP_K: RankedLookahead, ALL: RankedLookahead}
    for rule, kind in kinds.items():
        config = SchedulerConfig(prefetch_rule=rule)
        built = build_scheduler(PIECES, 8, policy("lru"), config, top_k=2, ahead=2)
        assert type(built.lookahead) is kind
        later = build_scheduler(PIECES, 8, policy("lru"), config, top_k=2, ahead=2, after=built)
        assert later.lookahead is built.lookahead


def test_wrong_rules_are_named():
    with pytest.raises(UnknownName, match="unknown prefetch_rule 'always': choose one of value"):
        SchedulerConfig(prefetch_rule="always")
    with pytest.raises(UsageError, match="how many experts a token uses"):
        lookahead_of(PIECES, TOP_K)
