from __future__ import annotations

import pytest

from greenroom.errors import BudgetError, UsageError
from greenroom.hf.attach import attach
from greenroom.hf.check.verify import verify
from greenroom.runtime.kernels.eager import EagerKernel
from greenroom.runtime.slots.host import HostSlots
from tests.models import WRAPPED, cached_tiny


@pytest.fixture(scope="module")
def folder():
    return str(cached_tiny("qwen3_moe", dtype="bfloat16", tokenizer=True))


@pytest.mark.parametrize("layers", [False, True])
def test_a_sound_model_passes(folder, layers):
    lines: list[str] = []
    verdict = verify(folder, "13%", tokens=5, prompt="The", layers=layers, say=lines.append)
    assert verdict.identical
    assert verdict.near
    assert verdict.entire_model is not layers
    assert verdict.tokens_compared > 5 - layers
    assert sum(line.startswith("ok") for line in lines) == len(verdict.checks) >= 6
    assert sum("no prefetching" in line for line in lines) == 1
    assert len(set(lines)) == len(lines)
    compared = "every expert in memory" if not layers else "2 slots, from disk"
    ours = [line for line in lines if "native kernels" in line]
    assert ours
    assert all(line.endswith(f"the same bits as with {compared}") for line in ours)
    assert any("kernels, 1 slot, " in line for line in lines)
    assert all("transformers' eager" in line for line in lines if "eager kernels" in line)


FIRST, *OTHERS = sorted(WRAPPED)


@pytest.mark.parametrize(
    "name", [FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_a_text_model_in_a_wrapper(name):
    folder = str(cached_tiny(name, dtype="bfloat16", tokenizer=True))
    verdict = verify(folder, "30%", tokens=2, layers=False)
    assert verdict.entire_model
    assert verdict.identical
    assert verdict.near


@pytest.mark.parametrize("layers", [False, True])
def test_a_kernel_that_is_off_by_a_bit_fails(folder, layers, monkeypatch):
    class Off(EagerKernel):
        def combine(self, step):
            return super().combine(step) * (1 + 2**-6)

    monkeypatch.setattr(attach, "make_kernel", lambda name: Off())
    assert not verify(folder, "13%", tokens=3, prompt="The", layers=layers).identical


def test_a_slot_that_reads_the_wrong_bytes_fails(folder, monkeypatch):
    write = HostSlots.write

    def swapped(self, slot, copies, data, start):
        write(self, slot, copies, data[::-1].copy() if slot == 1 else data, start)

    monkeypatch.setattr(HostSlots, "write", swapped)
    verdict = verify(folder, "25%", tokens=3, prompt="The")
    assert not verdict.identical


def test_distance_beyond_twice_grouped_mm_is_not_near(folder):
    verdict = verify(folder, "25%", tokens=2, prompt="The")
    verdict.layer_differences = 2.5, 1.0
    assert not verdict.near
    verdict.layer_differences = 1.5, 1.0
    assert verdict.near


def test_a_default_kernel_that_is_wrong_but_consistent_is_not_near(folder, monkeypatch):
    class Wrong(EagerKernel):
        def combine(self, step):
            return super().combine(step) * 1.5

    monkeypatch.setattr(
        attach, "make_kernel", lambda name: EagerKernel() if name == "eager" else Wrong()
    )
    verdict = verify(folder, "25%", tokens=2, prompt="The green room is")
    assert verdict.identical
    assert not verdict.near


def test_wrong_options_are_refused_before_the_work(folder):
    with pytest.raises(UsageError, match="at least 1"):
        verify(folder, tokens=0)
    with pytest.raises(BudgetError, match="no room for an expert"):
        verify(folder, cache="1%")
