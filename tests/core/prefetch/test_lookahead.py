"""Candidates, chances and value, worked by hand: 3 layers of 4 experts, as in test_prefetching."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.core.pieces import Pieces
from greenroom.core.prefetch.lookahead import CARRY, KEEP, PRIOR, Lookahead

ABSENT, PRESENT = np.full(12, -1), np.zeros(12, np.int64)


def ids(*pieces: int) -> np.ndarray:
    return np.array(pieces, np.int64)


def lookahead(chunks: int = 2) -> Lookahead:
    return Lookahead(Pieces.unsplit([0, 4, 8, 12], [100] * 3, [chunks] * 12))


def paced(chunk: float, gap: float, chunks: int = 2) -> Lookahead:
    """Chunks take `chunk` seconds, and the link is idle for `gap` seconds a layer."""
    ahead = lookahead(chunks)
    ahead.pace.chunk.add(chunk)
    for prefill in (False, True):
        ahead.pace.idle[prefill].add(gap)
    return ahead


def drain(ahead: Lookahead) -> list[int]:
    """Candidates in the order in which they would be fetched."""
    candidates = []
    while (candidate := ahead.nearest()) is not None:
        ahead.remove(candidate)
        candidates.append(candidate.piece)
    return candidates


def test_layers_are_counted_on_into_the_next_pass():
    ahead = lookahead()
    assert [ahead.ahead(layer) for layer in range(3)] == [1, 2, 3]
    ahead.routed(1, ids(4), False, 0.0, ABSENT)
    assert [ahead.ahead(layer) for layer in range(3)] == [2, 3, 1]


def test_a_prediction_counts_at_the_distance_at_which_it_was_made():
    """Layers 1 and 0 are predicted after layer 2, and arrive after layer 0 of the next pass."""
    ahead = lookahead()
    ahead.routed(0, ids(0), False, 0.0, ABSENT)
    ahead.expect(1, ids(5, 4), distance=2)
    ahead.expect(2, ids(9), distance=3)
    assert ahead.forecast(1).tolist() == [5, 4]
    assert ahead.routed(1, ids(5), False, 0.0, ABSENT).distance == 2
    assert ahead.forecast(1) is None
    assert ahead.routed(2, ids(9), False, 0.0, ABSENT).distance == 3
    ahead.expect(0, ids(1), distance=4)  # more than all layers: as after the layer before it
    assert ahead.routed(0, ids(1), False, 0.0, ABSENT).distance == 1


def test_candidates_of_the_nearest_layer_come_first_likeliest_first():
    ahead = lookahead()
    ahead.routed(1, ids(4), False, 0.0, ABSENT)
    ahead.expect(1, ids(5, 4))
    ahead.expect(0, ids(3, 0))
    ahead.expect(2, ids(9, 8))
    assert drain(ahead) == [9, 8, 3, 0, 5, 4]


def test_candidates_with_priorities_come_in_their_order_whatever_their_layer():
    ahead = lookahead()
    ahead.routed(1, ids(4), False, 0.0, ABSENT)
    for layer, pieces, priorities in ((2, (9, 8), (0.5, 0.1)), (0, (3, 0), (0.7, 0.4))):
        ahead.expect(layer, ids(*pieces))
        ahead.prioritise(layer, ids(*pieces), np.array(priorities))
    assert ahead.nearest(slot_of=np.where(np.arange(12) == 3, 0, -1)).piece == 9  # 3 has a slot
    assert ahead.nearest(can_start=lambda piece: piece != 9).piece == 0
    assert drain(ahead) == [9, 0, 8]  # 3 was dropped
    ahead.expect(2, ids(9, 8))
    ahead.prioritise(2, ids(9, 8), np.array([0.5, 0.1]))
    ahead.expect_certain(1, ids(6))  # without a priority, before all others
    ahead.expect(0, ids(3, 0))
    assert drain(ahead) == [3, 0, 6, 9, 8]
    ahead.expect(2, ids(8))  # a new prediction has lost the priorities of the old one
    assert drain(ahead) == [8]


def test_a_later_prediction_replaces_an_earlier_one_and_routing_ends_it():
    ahead = lookahead()
    ahead.expect(0, ids(1, 2))
    ahead.expect(0, ids(3))
    assert ahead.nearest().piece == 3
    expected = ahead.routed(0, ids(3), False, 0.0, ABSENT)
    assert expected.pieces.tolist() == [3]
    assert ahead.nearest() is None
    assert ahead.routed(0, ids(3), False, 0.0, ABSENT) is None


@pytest.mark.parametrize(
    ("chance", "gap", "layers", "regret", "value"),
    [
        # transfer 2, idle 10: all of it is saved; a wrong one is in the way one time in ten
        (0.75, 10.0, 1, 0.0, 0.75 * 2 - 0.25 * (0.05 + CARRY * 2)),
        # idle 1 of 2: half is saved; a demand waits half a chunk for a wrong one
        (0.75, 1.0, 1, 0.0, 0.75 * 1 - 0.25 * (0.5 + CARRY * 2)),
        # one layer further away there is time for all
        (0.75, 1.0, 2, 0.0, 0.75 * 2 - 0.25 * (0.5 + CARRY * 2)),
        # gaps of a quarter of a chunk: every chunk overruns its gap by three quarters
        (0.75, 0.25, 1, 0.0, 0.75 * 0.25 - 0.25 * (1.5 + 0.25 * 0.5 + CARRY * 2)),
        # a saturated link saves nothing
        (1.0, 0.0, 1, 0.0, 0.0),
        # what it evicts would be used too
        (0.75, 10.0, 1, 0.5, 0.25 * 2 - 0.25 * (0.05 + CARRY * 2)),
    ],
)
def test_a_prefetch_s_value_is_its_expected_saving(chance, gap, layers, regret, value):
    ahead = paced(1.0, gap)
    ahead.regret = regret
    assert ahead.value(2, chance, layers) == pytest.approx(value)


def test_a_transfer_fits_the_idle_time_before_any_measurement():
    ahead = lookahead(chunks=3)
    assert ahead.value(3, 0.5, 1) == pytest.approx(0.5 * 3 - 0.5 * (1 / 6 + CARRY * 3))
    assert ahead.value(3, 0.1, 1) < 0


def test_candidates_not_worth_their_transfer_are_dropped():
    ahead = paced(1.0, 0.0)
    ahead.expect(1, ids(4, 5))
    assert ahead.nearest() is None
    ahead.pace.idle[False].value = 10.0
    assert ahead.nearest() is None


def test_a_rank_s_chance_counts_experts_that_were_not_resident():
    """Rank 0 of layer 0 is always used, rank 1 never, while both were absent."""
    ahead = lookahead()
    for _ in range(400):
        ahead.expect(0, ids(2, 3))
        ahead.routed(0, ids(2), False, 0.0, ABSENT)
    used, never = ahead._chances(0, 2)
    assert used > 0.98
    assert never < 0.02
    for _ in range(400):  # resident: nothing is learned of a rank's worth
        ahead.expect(0, ids(2, 3))
        ahead.routed(0, ids(3), False, 0.0, PRESENT)
    assert list(ahead._chances(0, 2)) == [used, never]


def test_a_layer_without_counts_has_the_chances_of_all_layers():
    """The chance is (used + 1/2) / (predicted + 1), counted over all layers."""
    ahead = lookahead()
    for _ in range(2):
        ahead.expect(0, ids(2))
        ahead.routed(0, ids(2), False, 0.0, ABSENT)
    predictions = KEEP + 1
    assert list(ahead._chances(1, 1)) == pytest.approx([(predictions + 0.5) / (predictions + 1)])
    own_rate = (predictions + PRIOR * (predictions + 0.5) / (predictions + 1)) / (
        predictions + PRIOR
    )
    assert list(ahead._chances(0, 1)) == pytest.approx([own_rate])


def test_accuracy_counts_as_many_predictions_as_experts_used():
    ahead = lookahead()
    assert ahead.accuracy.share() is None
    ahead.expect(0, ids(0, 1, 2))
    ahead.routed(0, ids(1, 2), False, 0.0, ABSENT)  # of the first two, 1 was used; 2 is third
    ahead.expect(1, ids(4, 5))
    ahead.routed(1, ids(4, 5), False, 0.0, ABSENT)
    assert ahead.accuracy.by_layer() == [0.5, 1.0, None]
    assert ahead.accuracy.share() == 0.75
    assert set(ahead.accuracy.counts) == {(0, 1), (1, 1)}


def test_regret_is_the_share_of_victims_that_were_used_in_their_layer_s_next_step():
    ahead = lookahead()
    for piece in (4, 5, 9):
        ahead.evicted(piece)
    ahead.routed(0, ids(0), False, 0.0, ABSENT)
    assert ahead.regret == 0.0  # of layer 0 nobody was evicted
    ahead.routed(1, ids(4), False, 0.0, ABSENT)
    assert ahead.regret == pytest.approx((1 - KEEP**2) / 2)
    before = ahead.regret
    ahead.routed(1, ids(4), False, 0.0, ABSENT)
    assert ahead.regret == before


def test_a_prompt_prefetches_for_the_next_layer_by_what_prompts_used():
    ahead = paced(1.0, 10.0)
    for _ in range(3):
        ahead.routed(1, ids(6, 7), True, 0.0, ABSENT)
    ahead.routed(0, ids(0), True, 0.0, ABSENT)
    assert drain(ahead)[:4] == [6, 7, 4, 5]
    ahead.routed(2, ids(8), True, 0.0, ABSENT)
    assert ahead.nearest() is None  # after the last layer comes a token, not this prompt's first


def test_clear_drops_all_candidates():
    ahead = lookahead()
    ahead.expect(0, ids(0, 1))
    ahead.clear()
    assert ahead.nearest() is None
