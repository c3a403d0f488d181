"""Choices of experts, look-ups of slots, copied calls and stages at one width."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from greenroom.runtime.kernels.routing import Routing
from tests.runtime.kernels.widths.kernel import WalledKernel, is_near, is_untouched

INT64 = torch.int64


def check_select(kernel: WalledKernel, experts: int) -> Iterator[Tensor]:
    """The experts of the largest scores, all of which differ, and then of equal scores."""
    draw = torch.Generator().manual_seed(experts)
    logits = (torch.randperm(experts, generator=draw) / 8).to(kernel.dtype)
    top_k = min(8, experts)
    scores, order = logits.double().softmax(0).sort(descending=True)
    for summed, wide in product((False, True), (False, True)):
        dtype = torch.float32 if wide else kernel.dtype
        ids, weights = kernel.allocate(top_k, dtype=INT64), kernel.allocate(top_k, dtype=dtype)
        call = kernel.call(
            "Choice", logits=kernel.place(logits), experts=experts, top_k=top_k, summed=summed,
            wide=wide, ids=ids.data_ptr(), weights=weights.data_ptr(), scale=1,
        )  # fmt: skip
        assert call.chosen == top_k
        assert ids.tolist() == order[:top_k].tolist()
        want = scores[:top_k] / scores[:top_k].sum() if summed else scores[:top_k]
        assert is_near(weights, want, torch.finfo(dtype).eps + 1e-5, 2**-24)
        yield from (ids, weights)
    yield from _check_sigmoid(kernel, logits, top_k)
    equal = torch.zeros(experts, dtype=kernel.dtype)
    for knows_ties in (False, True):
        ids, weights = kernel.allocate(top_k, dtype=INT64), kernel.allocate(top_k)
        call = kernel.call(
            "Choice", logits=kernel.place(equal), experts=experts, top_k=top_k, wide=True,
            knows_ties=knows_ties, ids=ids.data_ptr(), weights=weights.data_ptr(), scale=1,
        )  # fmt: skip
        if call.chosen:
            assert len({*ids.tolist()}) == top_k
            assert is_near(weights, torch.tensor(1 / experts), 1e-6)
        else:
            assert top_k < experts
            assert is_untouched(ids)
            assert is_untouched(weights)
        yield ids


def _check_sigmoid(kernel: WalledKernel, logits: Tensor, top_k: int) -> Iterator[Tensor]:
    """The experts of the largest sums of sigmoid and bias, all of which differ."""
    bias = -torch.arange(len(logits)).float()
    scores = logits.double().sigmoid()
    ids, weights = kernel.allocate(top_k, dtype=INT64), kernel.allocate(top_k)
    call = kernel.call(
        "Choice", logits=kernel.place(logits), experts=len(logits), top_k=top_k, wide=True,
        ids=ids.data_ptr(), weights=weights.data_ptr(), bias=kernel.place(bias), scale=2.5,
    )  # fmt: skip
    assert call.chosen == top_k
    assert ids.tolist() == [*range(top_k)]
    assert is_near(weights, 2.5 * scores[:top_k], 1e-5, 2**-24)
    yield from (ids, weights)


def check_select_rows(kernel: WalledKernel, experts: int) -> Iterator[Tensor]:
    """The experts of several tokens, each of which are those of one token alone."""
    draw, top_k = torch.Generator().manual_seed(experts), min(3, experts)
    logits = [(torch.randperm(experts, generator=draw) / 8).to(kernel.dtype) for _ in range(3)]
    results = [
        (kernel.allocate(top_k, dtype=INT64), kernel.allocate(top_k, dtype=torch.float32))
        for _ in logits
    ]
    choices = [
        kernel.place_call(
            "Choice", logits=kernel.place(each), experts=experts, top_k=top_k, wide=True,
            ids=ids.data_ptr(), weights=weights.data_ptr(), scale=1,
        )
        for each, (ids, weights) in zip(logits, results, strict=True)
    ]  # fmt: skip
    kernel.call_of_tokens(choices)
    for each, choice, (ids, weights) in zip(logits, choices, results, strict=True):
        scores, order = each.double().softmax(0).sort(descending=True)
        assert choice.chosen == top_k
        assert ids.tolist() == order[:top_k].tolist()
        assert is_near(weights, scores[:top_k], 1e-5, 2**-24)
        yield from (ids, weights)


def check_find_slots(kernel: WalledKernel, top_k: int) -> Iterator[Tensor]:
    """The slots of a layer's experts, which are the last experts of the tables."""
    first, experts, tokens = 5, top_k + 3, 3
    draw = torch.Generator().manual_seed(top_k)
    for loaded in (True, False):
        ids = torch.stack([torch.randperm(experts, generator=draw)[:top_k] for _ in range(tokens)])
        slot_of = torch.randperm(first + experts, generator=draw)
        if not loaded:
            slot_of[first + ids[-1, -1]] = -1
        memory = torch.randperm(first + experts, generator=draw) * 3
        used, requests = (kernel.allocate(first + experts, dtype=INT64) for _ in range(2))
        used.fill_(7)
        requests.fill_(2)
        routing = Routing.of(ids.numpy(), experts)
        found = len(routing.experts)
        sizes = {"sorted": found, "slots": found, "starts": found + 1}
        sizes |= {"tokens": ids.numel(), "rows": ids.numel()}
        results = {name: kernel.allocate(n, dtype=INT64) for name, n in sizes.items()}
        tables = kernel.structure(
            "SlotTables", first=first, slot_of=kernel.place(slot_of), last_used=used.data_ptr(),
            requests=requests.data_ptr(), memory=kernel.place(memory), step=8,
        )  # fmt: skip
        counts = kernel.allocate(2, dtype=INT64)
        call = kernel.place_call(
            "SlotSearch", ids=kernel.place(ids), count=tokens, top_k=top_k, experts=experts,
            tables=tables, **{name: each.data_ptr() for name, each in results.items()},
        )  # fmt: skip
        call.found_places[:] = counts.data_ptr(), counts.data_ptr() + 8
        kernel.enter(call)
        assert call.found == (found if loaded else 0)
        chosen = torch.zeros(first + experts, dtype=INT64)
        if loaded:
            sorted_ids = torch.from_numpy(routing.experts)
            chosen[first + sorted_ids] = 1
            expected = {"sorted": sorted_ids, "slots": memory[slot_of[first + sorted_ids]]}
            for name in ("starts", "tokens", "rows"):
                expected[name] = torch.from_numpy(getattr(routing, name))
            assert all(torch.equal(results[name], each) for name, each in expected.items())
            assert counts.tolist() == [found, found]
            yield from results.values()
        assert torch.equal(used, 7 + chosen)
        assert torch.equal(requests, 2 + chosen)


class _Copies:
    """A call of `copy_calls` with several runs of numbers."""

    def __init__(self, kernel: WalledKernel, lengths: list[int]) -> None:
        self.sources = [torch.arange(n) * 3 + n for n in lengths]
        self.targets = [kernel.allocate(n, dtype=INT64) for n in lengths]
        runs = [
            kernel.structure(
                "Run", target=target.data_ptr(), source=kernel.place(source), length=len(source)
            )
            for source, target in zip(self.sources, self.targets, strict=True)
        ]
        self.call: Any = kernel.place_call(
            "CopyCall", count=len(runs), runs=kernel.place_structures(runs)
        )

    @property
    def done(self) -> bool:
        return all(map(torch.equal, self.targets, self.sources))


def check_copies(kernel: WalledKernel, length: int) -> Iterator[Tensor]:
    """Runs of one length and of others."""
    for lengths in ([length], [length, 1, length + 1], [1] * length):
        copies = _Copies(kernel, lengths)
        kernel.enter(copies.call)
        assert copies.done
        yield from copies.targets


def check_stages(kernel: WalledKernel, count: int) -> Iterator[Tensor]:
    """Copies one after another, of which a number that is 0 leaves out the last."""
    copy = kernel.of.address("copy_calls")
    for flag in (0, 1):
        copies = [_Copies(kernel, [3]) for _ in range(count)]
        stages = [(copy, each.call) for each in copies]
        number = kernel.allocate(1, dtype=INT64).fill_(flag)
        addresses = [(entry, ctypes.addressof(call)) for entry, call in stages]
        addresses.insert(count - 1, (0, number.data_ptr()))
        described = [kernel.structure("Stage", kernel=k, call=c) for k, c in addresses]
        kernel.call("StagesCall", count=len(described), stages=kernel.place_structures(described))
        assert [each.done for each in copies] == [True] * (count - 1) + [bool(flag)]
        yield from (each.targets[0] for each in copies)


def check_measured(kernel: WalledKernel, length: int) -> Iterator[Tensor]:
    """A copy, and how long its only thread has waited for a core."""
    copies, waiting = _Copies(kernel, [length]), kernel.allocate(2, dtype=INT64).fill_(-1)
    call = kernel.call(
        "MeasuredCall", kernel=kernel.of.address("copy_calls"),
        call=ctypes.addressof(copies.call), threads=waiting.data_ptr(),
    )  # fmt: skip
    assert copies.done
    assert call.count == 1
    assert waiting[0] == threading.get_native_id()
    assert waiting[1] >= 0
    yield from copies.targets


def check_await(kernel: WalledKernel, amount: int) -> Iterator[Tensor]:
    yield torch.tensor(kernel.call("AwaitTest", counter=amount, amount=amount).counter)


def check_count(kernel: WalledKernel, counter: int) -> Iterator[Tensor]:
    call = kernel.call("AwaitTest", counter=counter)
    assert call.counter == counter + 1
    yield torch.tensor(call.counter)
