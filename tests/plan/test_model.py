from __future__ import annotations

from dataclasses import replace

import pytest

from greenroom.errors import BudgetError
from tests.plan.models import MIB, MODEL


def test_slots_and_memory_are_each_others_inverse():
    assert MODEL.fixed_bytes == 30 * MIB
    assert [MODEL.slots(MODEL.memory(n)) for n in (2, 7, 64)] == [2, 7, 64]
    assert MODEL.slots(MODEL.memory(7) + MIB - 1) == 7
    assert MODEL.slots(1 << 40) == MODEL.experts == 64
    assert MODEL.offsets.tolist() == [0, 16, 32, 48, 64]


def test_a_full_context_takes_slots():
    model = replace(MODEL, full_bytes=10 * MIB)
    assert model.least_memory == 42 * MIB
    assert model.slots(42 * MIB) == 12
    assert model.slots_when_full(42 * MIB) == 2
    assert model.memory(2) == model.memory(12) == 42 * MIB  # with less a context would not fit
    assert model.memory(13) == 43 * MIB
    with pytest.raises(
        BudgetError, match=r"12 MiB for a KV cache and activations of 128 tokens .* --memory 42MiB"
    ):
        model.slots(41 * MIB)


def test_a_budget_that_is_too_small_says_what_would_do():
    with pytest.raises(BudgetError, match="; give --memory 32MiB"):
        MODEL.slots(31 * MIB)
    assert MODEL.slots(32 * MIB) == MODEL.least_slots == 2
