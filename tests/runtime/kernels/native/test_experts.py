"""Groups of experts and sums over experts in C++: small integers by hand, and several threads."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from greenroom.runtime.kernels.activation import CLAMPED
from tests.runtime.kernels.native.experts import (
    LIMIT,
    PADDING,
    TOP_K,
    EncodedLayer,
    Layer,
    Step,
    normals,
    on_one_thread,
    on_threads,
)
from tests.runtime.kernels.native.variants import DTYPES, LIBRARIES, entries, same_bits

# Tokens [3, 1] and [1, 2]; both experts serve the first token, expert 1 the second.
X = [[3, 1], [1, 2]]
UP = [[[1, 0], [0, 1], [1, -1]], [[2, 1], [-1, 0], [0, 1]]]
DOWN = [[[1, 0, 1], [0, 2, 0]], [[1, 1, 0], [0, 0, 1]]]
CHOICES = [[0, 1], [1, None]]
OUT = [[13, 2], [49, 1], [16, 4]]  # rows 0, 1 and 2: token * TOP_K + rank


def hand_step(dtype: torch.dtype, slots: Sequence[int] = (0, 1)) -> Step:
    """A step of the experts and tokens that are written out above."""
    layer = Layer(torch.tensor(UP, dtype=dtype), torch.tensor(DOWN, dtype=dtype), slots)
    return Step(layer, torch.tensor(X), CHOICES)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_experts_worked_out_by_hand(dtype):
    for group, total in zip(
        entries("compute_group", dtype), entries("sum_experts", dtype), strict=True
    ):
        step = hand_step(dtype)
        step.compute(on_one_thread(group))
        assert step.mid.tolist() == [[3, 1, 2], [4, -1, 2], [7, -3, 1]]  # by expert, then by rank
        assert step.act.tolist() == [[9, 1, 4], [16, 0, 4], [49, 0, 1]]
        assert step.out.tolist() == [*OUT, [PADDING] * 2]
        weights = torch.tensor([[0.5, 0.25], [2, PADDING]])
        result = step.sum(on_one_thread(total), weights)
        assert result.tolist() == [[0.5 * 13 + 0.25 * 49, 0.5 * 2 + 0.25 * 1], [2 * 16, 2 * 4]]


@pytest.mark.parametrize("slots", [(1, 0), (0, 5), (7, 2)])
def test_experts_lie_in_slots_of_any_order(slots):
    for entry in entries("compute_group", torch.bfloat16):
        step = hand_step(torch.bfloat16, slots)
        step.compute(on_one_thread(entry), [1, 0])
        assert step.out[:3].tolist() == OUT


def test_a_group_writes_the_rows_of_its_experts_alone():
    for entry in entries("compute_group", torch.bfloat16):
        step = hand_step(torch.bfloat16)
        step.compute(on_one_thread(entry), [1])
        assert step.out.tolist() == [[PADDING] * 2, *OUT[1:], [PADDING] * 2]
        assert step.mid[0].tolist() == step.act[0].tolist() == [PADDING] * 3
        step.compute(on_one_thread(entry), [0])
        assert step.out.tolist() == [*OUT, [PADDING] * 2]


def test_the_projections_one_after_the_other_and_a_result_that_is_added():
    for entry in entries("compute_group", torch.bfloat16):
        step, enter = hand_step(torch.bfloat16), on_one_thread(entry)
        step.compute(enter, up=1, down=0)
        assert step.act.tolist() == [[9, 1, 4], [16, 0, 4], [49, 0, 1]]
        assert (step.out == PADDING).all()
        step.act[1] = torch.tensor([5, 6, 7])  # expert 1's for token 1
        step.compute(enter, up=0, down=1)
        assert step.out.tolist() == [[13, 2], [49, 1], [11, 7], [PADDING] * 2]
        step.compute(enter, [1], up=0, down=1, accumulate=1)
        assert step.out.tolist() == [[13, 2], [98, 2], [22, 14], [PADDING] * 2]


@pytest.mark.parametrize(
    ("rounds", "outputs", "sums"),
    [
        (0, [[257, 256], [1, 260], [257, 260]], [[258, 516], [256, 260]]),
        (1, [[256, 256], [1, 260], [256, 260]], [[256, 516], [256, 260]]),
    ],
)
def test_a_sum_adds_biases_and_rounds_outputs_and_sums_if_asked(rounds, outputs, sums):
    """In bfloat16 257 is rounded to 256, 259 and 261 to 260."""
    bias = torch.tensor([[0, 256], [0, 1]], dtype=torch.bfloat16)
    weights = torch.ones(2, TOP_K, dtype=torch.bfloat16)
    for entry in entries("sum_experts", torch.bfloat16):
        step = hand_step(torch.bfloat16)
        step.out[:3] = torch.tensor([[257, 0], [1, 259], [257, 259]])
        result = step.sum(
            on_one_thread(entry), weights, narrow=1, rounds=rounds, bias=bias.data_ptr(),
            round_product=rounds, round_sum=rounds,
        )  # fmt: skip
        assert step.out[:3].tolist() == outputs
        assert result.tolist() == sums


def integers(*shape: int, most: int = 2) -> Tensor:
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(shape[-1]))


def half_gated(gate: float, up: float) -> float:
    """The clamped activation whose sigmoid is 1/2: that of alpha 0."""
    return (max(-LIMIT, min(up, LIMIT)) + 1) * min(gate, LIMIT) / 2


def expert_output(
    x: list[int], up: list[list[int]], down: list[list[int]], bias: list[int], interleaved: bool
) -> list[float]:
    """One expert's output for a token, one number after another."""
    h = [
        b + sum(a * w for a, w in zip(x, row, strict=True)) for row, b in zip(up, bias, strict=True)
    ]
    inner = len(h) // 2
    gates, ups = (h[::2], h[1::2]) if interleaved else (h[:inner], h[inner:])
    act = list(map(half_gated, gates, ups))
    return [sum(a * w for a, w in zip(act, row, strict=True)) for row in down]


# Three tokens of one expert each, and nine of two: the weights of expert 1 are widened for all.
CHOICES_OF_MANY = [
    [2, None],
    [0, None],
    [1, None],
    *([e % 3, (e + 1) % 3] for e in range(8)),
    [1, 2],
]


@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_experts_of_several_tokens_are_those_of_plain_loops(
    dtype, interleaved, transposed, biased
):
    hidden, inner = 5, 70
    up, down = integers(3, 2 * inner, hidden), integers(3, hidden, inner, most=1)
    bias = integers(3, 2 * inner) if biased else torch.zeros(3, 2 * inner, dtype=torch.int64)
    layer = Layer(
        up.to(dtype), down.to(dtype), (4, 0, 2), CLAMPED, bias.to(dtype) if biased else None,
        interleaved=interleaved, transposed=transposed, rounds=1,
    )  # fmt: skip
    for tokens in (1, 3, len(CHOICES_OF_MANY)):
        x, choices = integers(tokens, hidden, most=3), CHOICES_OF_MANY[-tokens:]
        expected = []
        for token, ranks in enumerate(choices):
            for e in ranks:
                parts = [x[token], *(() if e is None else (up[e], down[e], bias[e]))]
                numbers = [part.tolist() for part in parts]
                row = [PADDING] * hidden if e is None else expert_output(*numbers, interleaved)
                expected.append(row)
        for entry in entries("compute_group", dtype):
            step = Step(layer, x, choices)
            step.compute(on_one_thread(entry), step.routed.experts[::-1])
            assert step.out.tolist() == expected


def random_layer(dtype: torch.dtype, hidden: int, inner: int, **fields: int) -> Layer:
    up, down = normals(3, inner, hidden).to(dtype), normals(3, hidden, inner).to(dtype)
    return Layer(up, down, (1, 2, 0), rounds=1, **fields)


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_and_their_sums_have_the_same_bits_in_every_library(dtype, transposed):
    layer = random_layer(dtype, 75, 139, transposed=transposed)
    for tokens in (1, 3, len(CHOICES_OF_MANY)):
        steps, sums = [], []
        for group, total in zip(
            entries("compute_group", dtype), entries("sum_experts", dtype), strict=True
        ):
            step = Step(layer, normals(tokens, 75), CHOICES_OF_MANY[-tokens:])
            step.compute(on_one_thread(group))
            steps.append(torch.cat([each.flatten() for each in (step.mid, step.act, step.out)]))
            weights = normals(tokens, TOP_K)
            sums.append(step.sum(on_one_thread(total), weights, rounds=1, round_product=1))
        assert same_bits(steps)
        assert same_bits(sums)


@pytest.mark.parametrize("cuts", [(0, 64, 150), (0, 128, 150), (0, 64, 128, 150)])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_segments_one_after_another_have_the_bits_of_the_whole_experts(transposed, cuts):
    dtype, inner = torch.bfloat16, 150
    up, down = normals(3, inner, 40).to(dtype), normals(3, 40, inner).to(dtype)
    layer = Layer(up, down, rounds=1, transposed=transposed)
    segments = [
        Layer(up[:, a:b], down[:, :, a:b], (2, 0, 1), rounds=1, transposed=transposed)
        for a, b in pairwise(cuts)
    ]
    for tokens in (1, len(CHOICES_OF_MANY)):
        for entry in entries("compute_group", dtype):
            x, choices = normals(tokens, 40), CHOICES_OF_MANY[-tokens:]
            whole, parts = (Step(layer, x, choices) for _ in range(2))
            whole.compute(on_one_thread(entry))
            for number, segment in enumerate(segments):
                parts.compute(on_one_thread(entry), layer=segment, accumulate=number > 0)
            assert same_bits([whole.out, parts.out])


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_several_threads_compute_the_bits_of_one(transposed):
    dtype, tokens = torch.bfloat16, len(CHOICES_OF_MANY)
    layer, x = random_layer(dtype, 300, 200, transposed=transposed), normals(tokens, 300)
    weights = normals(tokens, TOP_K)
    for group, total in zip(
        entries("compute_group", dtype), entries("sum_experts", dtype), strict=True
    ):
        one = Step(layer, x, CHOICES_OF_MANY)
        one.compute(on_one_thread(group))
        sums = one.sum(on_one_thread(total), weights, rounds=1)
        for count in (2, 3, 5) * 4:
            step = Step(layer, x, CHOICES_OF_MANY)
            step.compute(on_threads(group, count), threads=count)
            assert same_bits([step.mid, one.mid])
            assert same_bits([step.sum(on_threads(total, count), weights, rounds=1), sums])
            assert same_bits([step.out, one.out])


@pytest.mark.parametrize("tokens", [1, 4])
def test_threads_that_are_delayed_between_their_claims_compute_the_bits_of_one(tokens):
    x, choices = normals(tokens, 160), CHOICES_OF_MANY[-tokens:]
    moments = random.Random(0)

    def delay(*place: int) -> None:
        time.sleep(moments.random() / 1000)

    for of, entry in zip(LIBRARIES, entries("compute_group", torch.bfloat16), strict=True):
        one = Step(EncodedLayer(of, 160, 192), x, choices)
        one.compute(on_one_thread(entry))
        assert one.out[-1].isfinite().all()
        for count in (2, 4):
            step = Step(EncodedLayer(of, 160, 192, delay), x, choices)
            step.compute(on_threads(entry, count), threads=count)
            assert same_bits([step.mid, one.mid])
            assert same_bits([step.out, one.out])


class FirstPartIsLate:
    """Products of which the first waits until the up projections of other threads are done.

    Its own thread has claimed the next part, too.

    events: (projection, start or end, slot), in order
    """

    def __init__(self, up_parts: int) -> None:
        self.events: list[tuple[str, str, int]] = []
        self.layer: EncodedLayer | None = None
        self._others, self._others_done = up_parts - 2, threading.Event()

    def before(self, layout: int, slot: int) -> None:
        event = self._projection(layout), "start", slot
        self.events.append(event)
        if self.events == [event]:
            self._others_done.wait(30)
            time.sleep(0.02)  # other threads claim down projections, and must wait

    def after(self, layout: int, slot: int) -> None:
        self.events.append((self._projection(layout), "end", slot))
        if sum(event[:2] == ("up", "end") for event in self.events) == self._others:
            self._others_done.set()

    def _projection(self, layout: int) -> str:
        assert self.layer
        return "up" if layout == ctypes.addressof(self.layer.layouts["up"]) else "down"


def test_a_down_projection_waits_for_all_parts_of_the_up_projection():
    """Each of two experts has three parts of 64 channels, and two of 128 outputs."""
    for of, entry in zip(LIBRARIES, entries("compute_group", torch.bfloat16), strict=True):
        late = FirstPartIsLate(up_parts=6)
        late.layer = EncodedLayer(of, 160, 192, late.before, late.after)
        step = Step(late.layer, normals(1, 160), CHOICES_OF_MANY[-1:])
        step.compute(on_threads(entry, 3), threads=3)
        places = {event: [] for event in late.events}
        for place, event in enumerate(late.events):
            places[event].append(place)
        slots = {slot for _, _, slot in places}
        assert len(slots) == 2
        assert places["up", "end", late.events[0][2]][-1] > 2 * 4  # others were done before it
        for slot in slots:
            assert len(places["up", "end", slot]) == 3
            assert len(places["down", "start", slot]) == 2
            assert max(places["up", "end", slot]) < min(places["down", "start", slot])
