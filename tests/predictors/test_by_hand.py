"""Predictors against what their papers' formulas give by hand."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.core.predictor import LayerPrediction, LayerRouting, PassStart, Shape
from greenroom.core.prefetch.foresight import Foresight
from greenroom.errors import UnknownName, UsageError
from greenroom.predictors import PredictorSetup, predictor
from greenroom.predictors.helpers import measured, token_table
from greenroom.predictors.noisy_oracle import promoe_accuracy
from tests.predictors.replay import Predicted, accuracy, replay
from tests.predictors.small import SHAPE, FakeGates, decode, run_predictor

TWO = Shape((4, 4), 1)  # guesses name two experts


def predictions_of(text: str, experts, ids=None, shape: Shape = TWO, **setting):
    """Return (token, after layer, layer, rows) of all predictions in decode passes."""
    tested = predictor(text).build(PredictorSetup(shape, **setting))
    return [
        (at.first, layer, prediction.layer, prediction.experts.tolist())
        for at, layer, predicted in run_predictor(tested, decode(experts, ids))
        for prediction in predicted
    ]


def test_popularity_counts_with_decay():
    """Half-life 1: after 0 0 1 in layer 0, expert 0 counts 1/2 + 1/4 and expert 1 counts 1."""
    experts = [[[0], [3]], [[0], [3]], [[1], [3]]]
    predicted = predictions_of("popularity:1,half-life=1", experts)
    assert predicted[0] == (0, 0, 1, [[-1, -1]])
    assert predicted[1] == (0, 1, 2, [[0, -1]])
    assert predicted[-2:] == [(2, 0, 1, [[3, -1]]), (2, 1, 2, [[1, 0]])]
    longer = predictions_of("popularity:1,half-life=100", experts)
    assert longer[-1] == (2, 1, 2, [[0, 1]])


def test_token_predicts_the_experts_that_its_id_used_most():
    experts = [[[0], [1]], [[2], [3]], [[0], [2]], [[0], [2]], [[3], [3]], [[1], [1]]]
    predicted = predictions_of("token", experts, [7, 8, 7, 7, 7, 9])
    assert {layer for _, layer, _, _ in predicted} == {-1}
    assert predicted[:2] == [(0, -1, 0, [[-1, -1]]), (0, -1, 1, [[-1, -1]])]
    assert predicted[2:4] == [(1, -1, 0, [[0, -1]]), (1, -1, 1, [[1, -1]])]  # not known: popularity
    # 7 used 0, 0, 0 in layer 0 and 1, 2, 2 in layer 1; second comes what is popular
    assert predicted[8:10] == [(4, -1, 0, [[0, 2]]), (4, -1, 1, [[2, 1]])]
    # 9 is new: overall 0 three times, then 2 and 3 once each; 2 twice, 3 twice
    assert predicted[10:] == [(5, -1, 0, [[0, 2]]), (5, -1, 1, [[2, 3]])]


def test_token_without_ids_predicts_by_popularity():
    predicted = predictions_of("token", [[[0], [1]], [[0], [1]], [[2], [1]]])
    assert predicted[4:] == [(2, -1, 0, [[0, -1]]), (2, -1, 1, [[1, -1]])]


def test_the_least_recent_token_id_is_replaced(monkeypatch):
    monkeypatch.setattr(token_table, "MOST_BYTES", 2 * TWO.layers * 4 * 2)
    tested = predictor("token").build(PredictorSetup(TWO))
    used = {5: 0, 6: 1, 7: 2}

    def use(id_: int) -> int:
        tested.begin(PassStart(0, 0, 1, False, np.array([id_])))
        first = tested.predict(-1)[0].experts[0, 0]
        for layer in range(2):
            tested.observe(LayerRouting(layer, np.array([[used[id_]]])))
        return int(first)

    use(5), use(6), use(5), use(5)
    assert use(6) == 1  # though 0 is more popular
    assert use(7) == 0  # new: 5 leaves
    assert use(6) == 1
    assert use(7) == 2
    assert tested.state()["ids"].tolist() == [7, 6]
    # a pass with more ids than there is room for learns of the first
    tested.begin(PassStart(0, 0, 3, True, np.array([5, 6, 7])))
    tested.predict(-1)
    tested.observe(LayerRouting(0, np.array([[3], [1], [2]])))
    assert sorted(tested.state()["ids"].tolist()) == [5, 6]


def test_markov_predicts_the_experts_that_followed():
    """Layer 0's expert 0 was followed by 1, 1, 2 in layer 1; expert 3 by 0."""
    experts = [[[0], [1]], [[0], [1]], [[3], [0]], [[0], [2]], [[0], [3]], [[3], [1]]]
    predicted = predictions_of("markov", experts)
    inside = {first: rows for first, layer, _, rows in predicted if layer == 0}
    assert inside[4] == [[1, 2]]
    assert inside[5] == [[0, 1]]  # the others have the same count: the lowest id
    # beyond the last layer: the next token's first. 1 was followed by 0, then by 3; 0 by 0
    after = {first: (layer, rows) for first, when, layer, rows in predicted if when == 1}
    assert after[1] == (2, [[0, 1]])
    assert after[5] == (2, [[0, 3]])


def test_markov_combines_counts_as_if_independent():
    """top-2: 0 was followed by {0, 1} and 1 by {0, 2}; log counts with a prior of 0.1."""
    shape = Shape((4, 4), 2)
    experts = [[[0, 2], [0, 1]], [[1, 3], [0, 2]], [[0, 1], [3, 2]]]
    tested = predictor("markov").build(PredictorSetup(shape))
    predicted = [
        g for at, layer, g in run_predictor(tested, decode(experts)) if (at.first, layer) == (2, 0)
    ]
    pair, once, never = np.log(1.1), np.log(1.1), np.log(0.1)
    total = np.log([4.4, 2.4, 2.4, 0.4])  # each token counts once for both that it used before
    scores = [once + pair, once + never, never + once, 2 * never] - total
    assert predicted[0][0].experts.tolist() == [np.argsort(-scores, kind="stable").tolist()]


def test_markov_learns_within_a_prompt_but_not_across_requests():
    tested = predictor("markov").build(PredictorSetup(TWO))
    tested.begin(PassStart(0, 0, 3, True))
    tested.observe(LayerRouting(0, np.array([[0], [1], [2]])))
    assert tested.predict(0)[0].experts.shape == (3, 2)
    tested.observe(LayerRouting(1, np.array([[3], [3], [0]])))
    next_first = tested.predict(1)[0]
    assert next_first.layer == 2
    assert next_first.experts.shape == (1, 2)
    pairs = np.exp(tested.state()["pairs"]).round(1)
    assert pairs[1, 3] == pytest.approx([0.1, 1.1, 1.1, 0.1])  # token 0 -> 1, token 1 -> 2
    assert pairs[0].sum() == pytest.approx(16 * 0.1 + 3)
    tested.begin(PassStart(1, 3, 1, False))
    tested.observe(LayerRouting(0, np.array([[3]])))
    assert (np.exp(tested.state()["pairs"])[1, 0].round(1) == 0.1).all()


def test_the_oracle_looks_into_the_next_pass():
    experts = [[[0], [1]], [[2], [3]]]
    routed = np.array(experts, np.uint8)
    assert predictions_of("oracle:1", experts, routed_experts=routed) == [
        (0, -1, 0, [[0]]),  # nothing was before the first pass
        (0, 0, 1, [[1]]),
        (0, 1, 2, [[2]]),
        (1, 0, 1, [[3]]),
    ]
    assert predictions_of("oracle:2", experts, routed_experts=routed) == [
        (0, -1, 0, [[0]]),
        (0, -1, 1, [[1]]),
        (0, 0, 2, [[2]]),
        (0, 1, 3, [[3]]),
    ]


def test_the_oracle_cannot_predict_beyond_the_trace():
    tested = predictor("oracle").build(
        PredictorSetup(TWO, routed_experts=np.zeros((3, 2, 1), np.uint8))
    )
    with pytest.raises(
        UsageError, match="oracle has predictions for 3 tokens, but a pass ends at token 3"
    ):
        tested.begin(PassStart(0, 2, 2, True))


def test_the_256th_expert_is_an_expert_to_the_oracle_and_nothing_in_a_recording():
    shape = Shape((256,), 1)
    routed = np.full((1, 1, 1), 255, np.uint8)
    assert predictions_of("oracle", routed, shape=shape, routed_experts=routed) == [
        (0, -1, 0, [[255]])
    ]
    recorded = {"x": Predicted(routed, 1)}
    assert predictions_of("recorded", routed, shape=shape, predictions=recorded) == [
        (0, -1, 0, [[-1]])
    ]


def test_wrong_predictions_are_unused_experts():
    routed = np.tile(np.array([[[0, 1]]], np.uint8), (50, 1, 1))
    shape = Shape((3,), 2)
    predicted = predictions_of(
        "noisy-oracle:accuracy=0", routed, shape=shape, routed_experts=routed
    )
    assert all(rows in ([[2, -1]], [[-1, 2]]) for *_, rows in predicted)
    assert len(predicted) == 50


def test_all_ranks_follow_the_predicted_ones():
    """Sizes 4 and 3, one of two experts right: the wrong guess comes second, the rest in some
    order; a smaller layer's row ends with -1. A true expert that was not guessed is in the rest."""
    routed = np.tile(np.array([[[0, 1], [0, 1]]], np.uint8), (200, 1, 1))
    shape = Shape((4, 3), 2)
    predicted = predictions_of(
        "noisy-oracle:width=all,accuracy=0.5", routed, shape=shape, routed_experts=routed
    )
    narrow = predictions_of("noisy-oracle:accuracy=0.5", routed, shape=shape, routed_experts=routed)
    for (*at, rows), (*same, first) in zip(predicted, narrow, strict=True):
        assert at == same
        layer = at[-1] % 2
        for row, few in zip(rows, first, strict=True):
            named = [e for e in few if e >= 0]
            assert row[: len(named)] == named
            assert sorted(row) == ([0, 1, 2, 3] if layer == 0 else [-1, 0, 1, 2])
            assert layer == 0 or row[3] == -1
    rest = {tuple(rows[0][2:]) for *at, rows in predicted if at[-1] % 2 == 0}
    assert len(rest) == 12  # every pair of the four experts, in both orders


def test_the_default_accuracy_is_that_of_promoe():
    assert promoe_accuracy(1) == pytest.approx(0.905)
    assert promoe_accuracy(8) == pytest.approx(0.545)
    assert promoe_accuracy(4) == pytest.approx(0.905 * (0.545 / 0.905) ** (3 / 7))
    assert promoe_accuracy(20) == 0.54
    routed = np.random.default_rng(0).integers(0, 4, (20_000, 2, 1)).astype(np.uint8)
    tested = predictor("noisy-oracle:2").build(PredictorSetup(TWO, routed_experts=routed))
    predicted = replay(tested, decode(routed), TWO)
    assert accuracy(predicted.experts, routed) == pytest.approx(promoe_accuracy(2), abs=0.015)


def test_recorded_replays_learned_in_the_pass_that_it_predicts():
    """Distance 2 of three layers: layer 0 predicts layers 1 and 2, and no later layer any."""
    shape = Shape((4, 4, 4), 1)
    routed = np.zeros((2, 3, 1), np.uint8)
    rows = np.array([[[255], [1], [2]], [[255], [3], [0]]], np.uint8)
    recorded = {"learned": Predicted(rows, 2)}
    assert predictions_of("recorded", routed, shape=shape, predictions=recorded) == [
        (0, 0, 1, [[1]]), (0, 0, 2, [[2]]), (1, 0, 1, [[3]]), (1, 0, 2, [[0]]),
    ]  # fmt: skip
    other = {"next-gate:2": Predicted(rows, 2)}
    assert predictions_of("recorded", routed, shape=shape, predictions=other)[-3:] == [
        (0, 1, 3, [[-1]]), (0, 2, 4, [[3]]), (1, 0, 2, [[0]]),
    ]  # fmt: skip


def test_recorded_replays_the_chosen_predictions():
    one, two = (Predicted(np.full((1, 2, 1), i, np.uint8), 1) for i in (1, 2))
    both = {"one": one, "two": two}
    assert predictions_of("recorded:of=two", [[[0], [0]]], predictions=both)[0] == (0, -1, 0, [[2]])
    assert predictions_of("recorded", [[[0], [0]]], predictions={"one": one})[0] == (
        0,
        -1,
        0,
        [[1]],
    )
    with pytest.raises(UsageError, match=r"give recorded:of=NAME, with NAME one of one\|two"):
        predictions_of("recorded", [[[0], [0]]], predictions=both)
    with pytest.raises(UnknownName, match="prediction of the trace 'three': choose one of one"):
        predictions_of("recorded:of=three", [[[0], [0]]], predictions=both)


def test_pregated_predicts_by_the_inputs_of_the_layer_before():
    tested = predictor("pregated").build(PredictorSetup(SHAPE, gates=FakeGates()))
    inputs = np.ones((2, 3), np.float32)
    tested.begin(PassStart(0, 0, 2, True))
    assert tested.predict(-1) == []
    tested.observe(LayerRouting(0, np.zeros((2, 2), np.int64), None, inputs))
    (predicted,) = tested.predict(0)
    assert isinstance(predicted, LayerPrediction)
    assert predicted.layer == 1
    assert (predicted.experts == FakeGates().rank(1, inputs, 2)).all()
    tested.observe(LayerRouting(2, np.zeros((2, 2), np.int64), None, inputs))
    assert tested.predict(2) == []


def test_pregated_replays_the_routing_of_all_layers_but_the_first():
    experts = [[[0], [1]], [[2], [3]]]
    routed = np.array(experts, np.uint8)
    assert predictions_of("pregated", experts, routed_experts=routed) == [
        (0, 0, 1, [[1]]), (1, 0, 1, [[3]]),
    ]  # fmt: skip


def test_first_layers_are_predicted_at_layer_0_or_in_the_token_before():
    shape, routed = Shape((4,) * 4, 1), np.array([[[0], [1], [2], [3]]] * 2, np.uint8)
    inside, across = (
        predictions_of(f"noisy-oracle:2,{accuracy}", routed, shape=shape, routed_experts=routed)
        for accuracy in ("like=learned", "accuracy=1")
    )
    of_a_token = [(0, 1), (0, 2), (1, 3)]
    assert [(after, layer) for _, after, layer, _ in inside] == of_a_token * 2
    assert [(after, layer) for _, after, layer, _ in across] == [
        (-1, 0), (-1, 1), (0, 2), (1, 3), (2, 4), (3, 5), (0, 2), (1, 3),
    ]  # fmt: skip
    assert all(rows == [[layer % 4]] for *_, layer, rows in across)


@pytest.fixture
def measured_table(tmp_path, monkeypatch):
    """Three layers: at distance 1, and at distance 2."""
    file = tmp_path / "accuracy.json"
    file.write_text('{"accuracy": {"learned": {"1": [0, 0.5, 0.9], "2": [0, 0.3, 0.7]}}}')
    monkeypatch.setattr(measured, "FILE", file)


def test_measured_accuracies_are_those_of_the_same_relative_depth(measured_table):
    """Distance 1: layers 1 to 4 of five lie between those of 0.5 and 0.9, a third at a time."""
    five = measured.measured_accuracy("learned", 1, 5)
    assert five == pytest.approx([0, 0.5, 0.5 + 0.4 / 3, 0.5 + 0.8 / 3, 0.9])
    assert measured.measured_accuracy("learned", 1, 2) == pytest.approx([0, 0.5])
    assert measured.measured_accuracy("learned", 2, 4) == pytest.approx([0, 0.3, 0.7, 0.7])
    with pytest.raises(UsageError, match="at the distances 1, 2, not 3: choose one of these"):
        measured.measured_accuracy("learned", 3, 4)


def test_a_noisy_oracle_is_as_accurate_in_each_layer_as_was_measured(measured_table):
    shape = Shape((4, 4, 4), 1)
    routed = np.random.default_rng(0).integers(0, 4, (20_000, 3, 1)).astype(np.uint8)
    tested = predictor("noisy-oracle:1,like=learned")
    predicted = replay(
        tested.build(PredictorSetup(shape, routed_experts=routed)), decode(routed), shape
    )
    assert accuracy(predicted.experts, routed) == pytest.approx([0, 0.5, 0.9], abs=0.015)
    with pytest.raises(UsageError, match=r"accuracy=0.5 and like=learned.* give one of them"):
        predictor("noisy-oracle:accuracy=0.5,like=learned").build(
            PredictorSetup(shape, routed_experts=routed)
        )


@pytest.mark.parametrize("name", measured.MEASURED)
def test_the_measured_file_has_a_share_for_each_layer_and_falls_with_the_distance(name):
    near, far = (measured.measured_accuracy(name, distance, 24) for distance in (1, 4))
    assert ((near[1:] > 0) & (near[1:] < 1) & (far[1:] > 0) & (far[1:] < 1)).all()
    assert near[4:].mean() > far[4:].mean()
    assert near[0] < near[4:].min()  # of the next token, or not predicted


def test_accuracy_counts_only_the_top_k():
    experts = np.array([[[0, 1]], [[0, 1]]], np.uint8)
    predicted = np.array([[[1, 2, 0, 3]], [[255, 255, 0, 1]]], np.uint8)
    assert accuracy(predicted, experts).tolist() == [0.25]
    assert accuracy(predicted, experts, since=1).tolist() == [0.0]


def test_eamc_predicts_the_experts_of_the_nearest_past_request():
    """Requests used layers like 0 1 and 3 2 (answers of two tokens); this one begins like the
    second."""
    tested = predictor("eamc:2").build(PredictorSetup(Shape((4, 4, 4), 1)))
    predicted = {}
    for request, path in enumerate([[0, 1, 0], [3, 2, 0], [3, 0, 0]]):
        for token in range(2):
            tested.begin(PassStart(request, 2 * request + token, 1, False))
            assert tested.predict(-1) == []
            for layer, expert in enumerate(path if token == 0 else [path[0], path[1], 1]):
                tested.observe(LayerRouting(layer, np.array([[expert]])))
                predicted[request, token, layer] = [
                    (g.layer, g.experts.tolist()) for g in tested.predict(layer)
                ]
    # nothing collected: this pass's own EAM, so that the layers of the next pass alone are known
    assert predicted[0, 0, 0] == [(1, [[-1, -1]]), (2, [[-1, -1]])]
    assert predicted[0, 0, 2] == [(3, [[0, -1]]), (4, [[1, -1]])]
    # one collected: it is the nearest, whatever comes. Layer 2 used 0 and 1 once each
    assert predicted[1, 0, 0] == [(1, [[1, -1]]), (2, [[0, 1]])]
    # of two, the second is nearer once layer 0 chose 3
    assert predicted[2, 0, 0] == [(1, [[2, -1]]), (2, [[0, 1]])]


def test_eamc_gives_priorities_by_likelihood_and_proximity():
    """Layer 1 is even between four, layer 2 certain: 1/4 * (1 - 1/4) < 1 * (1 - 2/4).

    So the one expert of layer 2 is prefetched before those of layer 1.
    """
    shape = Shape((4, 4, 4, 4), 1)
    tested = predictor("eamc:2").build(PredictorSetup(shape))
    for token in range(4):
        tested.begin(PassStart(0, token, 1, False))
        for layer, expert in enumerate([0, token, 2, 0]):
            tested.observe(LayerRouting(layer, np.array([[expert]])))
    foresight = Foresight(tested, [0, 4, 8, 12, 16])
    foresight.begin(PassStart(1, 4, 1, False))
    predicted = foresight.routed(LayerRouting(0, np.array([[0]])))
    assert [(p.layer, p.experts.tolist(), p.priorities.tolist()) for p in predicted] == [
        (1, [4, 5], [0.1875, 0.1875]),
        (2, [10], [0.5]),
    ]


def test_eamc_computes_the_example_of_figure_5():
    """Two matched EAMs, 0.25 and 0.29 away, are summed: 2 + 0 and 0 + 3 in layer 2, 0 + 1 and
    2 + 2 in layer 3. So the likelihoods are 0.4, 0.6 and 0.2, 0.8; their layers are 1 and 2 of 4
    ahead. The first EAM has nothing in common with the current one.
    """
    tested = predictor("eamc:2,tolerance=0.05").build(PredictorSetup(Shape((2, 2, 2, 2), 1)))
    collection = [
        [[2, 0], [0, 2], [2, 0], [2, 0]],
        [[0, 2], [2, 0], [2, 0], [0, 2]],
        [[0, 3], [3, 0], [0, 3], [1, 2]],
    ]
    for request, eam in enumerate(collection):
        tested.begin(PassStart(request, 0, sum(eam[0]), False))
        for layer, (first, second) in enumerate(eam):
            tested.observe(LayerRouting(layer, np.array([[0]] * first + [[1]] * second)))
    tested.begin(PassStart(3, 0, 1, False))
    tested.observe(LayerRouting(0, np.array([[1]])))
    tested.observe(LayerRouting(1, np.array([[0]])))
    near, far = tested.predict(1)
    assert near.priorities.tolist() == pytest.approx([0.3, 0.45])
    assert far.priorities.tolist() == pytest.approx([0.1, 0.4])


def test_eamc_replaces_the_eam_that_figure_10_replaces():
    """Of three EAMs the new one replaces the third, at a cosine distance of 0.11."""
    p1, p2 = [0, 1, 1, 0, 0, 1], [2, 0, 2, 0, 2, 0]
    p3, p4 = [1, 1, 0, 2, 1, 1], [1, 1, 0, 2, 0, 2]
    tested = predictor("eamc:1,capacity=3").build(PredictorSetup(Shape((2, 2, 2), 1)))
    for request, eam in enumerate([p1, p2, p3, p4, p1]):
        tested.begin(PassStart(request, 0, 2, False))
        for layer in range(3):
            first, second = eam[2 * layer : 2 * layer + 2]
            tested.observe(LayerRouting(layer, np.array([[0]] * first + [[1]] * second)))
    assert tested.state()["decode.collection"].tolist() == [p1, p2, p4]


def test_eamc_prefers_near_layers_among_equally_likely_experts():
    """Both layers are certain: 1 - 1/4 and 1 - 2/4."""
    tested = predictor("eamc:2").build(PredictorSetup(Shape((4, 4, 4, 4), 1)))
    for request in range(2):
        tested.begin(PassStart(request, request, 1, False))
        for layer, expert in enumerate([0, 1, 2, 0][: 1 if request else 4]):
            tested.observe(LayerRouting(layer, np.array([[expert]])))
    near, far = tested.predict(0)
    assert (near.priorities[1], far.priorities[2]) == (0.75, 0.5)


def test_eamc_has_separate_collections_for_prefill_and_decode():
    tested = predictor("eamc:1").build(PredictorSetup(TWO))

    def run(request: int, prefill: bool, experts: list[int]) -> list[int]:
        rows = len(experts)
        tested.begin(PassStart(request, 0, rows, prefill))
        tested.observe(LayerRouting(0, np.array(experts)[:, None]))
        predicted = tested.predict(0)[0].experts
        assert (predicted == predicted[0]).all()
        assert len(predicted) == rows
        tested.observe(LayerRouting(1, np.array(experts)[:, None]))
        return predicted[0].tolist()

    run(0, True, [0, 0, 1])
    run(0, False, [3])
    run(1, False, [3])
    assert run(1, True, [0, 1]) == [0, 1]  # the prompt's: 0 twice, 1 once
    assert run(1, False, [0]) == [3, -1]  # the answer's
    state = tested.state()
    assert state["prefill.collection"].tolist() == [[2, 1, 0, 0, 2, 1, 0, 0]]
    assert state["decode.collection"].tolist() == [[0, 0, 0, 1, 0, 0, 0, 1]]
    assert state["decode.request"].tolist() == [1, 0, 0, 1, 1, 0, 0, 1]


def test_a_full_collection_replaces_the_nearest_matrix():
    tested = predictor("eamc:1,capacity=2").build(PredictorSetup(TWO))
    for request, experts in enumerate([[0, 0], [3, 3], [3, 2], [1, 1]]):
        tested.begin(PassStart(request, request, 1, False))
        for layer, expert in enumerate(experts):
            tested.observe(LayerRouting(layer, np.array([[expert]])))
    assert tested.state()["decode.collection"].tolist() == [
        [1, 0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 1, 0],
    ]


def test_matching_by_request_remembers_earlier_passes():
    """The pass alone is equally near to both; the request so far is nearer to the first."""
    predicted = {}
    for matching in ("iteration", "request"):
        tested = predictor(f"eamc:1,matching={matching}").build(PredictorSetup(TWO))
        for request, passes in enumerate([[(0, 1), (2, 1)], [(3, 2), (2, 2)], [(0, 0), (2, 0)]]):
            for token, path in enumerate(passes):
                tested.begin(PassStart(request, token, 1, False))
                tested.observe(LayerRouting(0, np.array([[path[0]]])))
                predicted[matching] = tested.predict(0)[0].experts.tolist()
                tested.observe(LayerRouting(1, np.array([[path[1]]])))
    assert predicted == {"iteration": [[1, 2]], "request": [[1, -1]]}


def test_routing_path_takes_the_steps_of_its_formulas():
    """Two layers of four, top-1: the first layer's logits after one and two tokens, by hand."""
    tested = predictor("routing-path:1").build(PredictorSetup(TWO))
    even = -np.log(3.0)  # three in four are not used
    step = np.array([0.0, 1, 0, 0]) - 0.25  # token 0 used 1 in layer 0
    tested.begin(PassStart(0, 0, 1, False, np.array([7])))
    tested.observe(LayerRouting(0, np.array([[1]])))
    bias, by_id = even + 0.03 * step, 2.0 * step
    assert tested.state()["bias"][0] == pytest.approx(bias, abs=1e-6)
    assert tested.state()["rows"][0, 0] == pytest.approx(by_id, abs=1e-6)
    assert not tested.state()["last"].any()  # no token came before
    assert not tested.state()["link"].any()
    tested.observe(LayerRouting(1, np.array([[3]])))
    assert tested.state()["link"][0, 1, 1] == pytest.approx(0.1 * ([0, 0, 0, 1] - np.full(4, 0.25)))
    # the next token, of the same id, uses 2: what was expected, and how wrong it was
    tested.begin(PassStart(0, 1, 1, False, np.array([7])))
    assert tested.predict(-1)[0].experts.tolist() == [[1, 0]]
    tested.observe(LayerRouting(0, np.array([[2]])))
    error = np.array([0.0, 0, 1, 0]) - 1 / (1 + np.exp(-(bias + by_id)))
    assert tested.state()["last"][0, 1] == pytest.approx(0.1 * error, abs=1e-6)
    assert tested.state()["rows"][0, 0] == pytest.approx(by_id + 2 * error, abs=1e-6)
    assert tested.state()["link"][0, 0, 3] == pytest.approx(0.1 * error, abs=1e-6)  # m = 0: layer 1
    assert tested.state()["link"][1, 0, 1] == pytest.approx(0.1 * error, abs=1e-6)  # m = 1: layer 0
    assert not tested.state()["link"][2, 0].any()  # m = 2: a layer of the token before that


def test_routing_path_learns_which_experts_follow_from_layers_and_ids():
    """Layer 1 repeats layer 0, whose experts depend only on the token's id."""
    random = np.random.default_rng(0)
    ids = random.integers(0, 4, 300)
    routed = np.stack([ids, ids], axis=1)[..., None].astype(np.uint8)
    predicted = replay(
        predictor("routing-path:1").build(PredictorSetup(TWO)), decode(routed, ids.tolist()), TWO
    )
    first, second = accuracy(predicted.experts, routed, 150)
    assert second == 1.0
    assert first < 0.5  # a layer before, the id is not known yet
    tested = predictor("routing-path:1").build(PredictorSetup(TWO))
    early = [
        g[0].experts[0, 0]
        for _, layer, g in run_predictor(tested, decode(routed, ids.tolist()))
        if layer < 0
    ]
    assert early[150:] == ids[150:].tolist()
