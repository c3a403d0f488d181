"""Planes that arrive in any order, in any chunks, by several threads, become int8 codes."""

from __future__ import annotations

import random
import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from greenroom.core.layout import Copy
from greenroom.runtime.fakes import POISON, FakeSlots
from greenroom.runtime.slots.host import HostSlots
from greenroom.runtime.slots.nested_planes import MatrixPlanes, NestedLayout, PlaneJoiner, join

CODES, SCALES = 256, 8  # bytes of a matrix's codes, and of its scales


def run(source: int, target: int, n: int) -> Copy:
    return Copy(source, target, (1, n), (n, 1), (n, 1), "uint8", "uint8")


HALF, SCALE = CODES // 2, CODES
FIRST = run(0, 0, HALF), run(HALF, SCALE, SCALES)
SECOND_HALF = (run(0, HALF, HALF),)
AT = HALF + SCALES  # where the rest begins in a run
BOTH = (*FIRST, run(AT, HALF, HALF))
NESTING = NestedLayout(
    (MatrixPlanes(0, CODES, SCALE, SCALES),), FIRST, {BOTH: AT + HALF, SECOND_HALF: HALF}
)


def expert(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(a run of bytes, the codes, the scales)."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(-119, 120, CODES).astype(np.int8)
    h = (codes.astype(int) + 8) >> 4
    planes = [(p + 8).astype(np.uint8) for p in (h, codes - 16 * h)]
    high, low = (p[::2] | p[1::2] << 4 for p in planes)
    scale = rng.integers(1, 30, SCALES // 2).astype(np.float16)
    return np.concatenate([high, (16 * scale).view(np.uint8), low]), codes, scale


def assert_joined(slots: HostSlots, slot: int, codes: np.ndarray, scale: np.ndarray) -> None:
    content = slots.bytes(slot)
    assert content[:CODES].view(np.int8).tolist() == codes.tolist()
    assert content[SCALE : SCALE + SCALES].view(np.float16).tolist() == scale.tolist()


def test_every_code_is_joined():
    codes = np.arange(-119, 120).astype(np.int8)
    codes = np.append(codes, codes[:1])
    h = (codes.astype(int) + 8) >> 4
    planes = [(p + 8).astype(np.uint8) for p in (h, codes - 16 * h)]
    slot = np.concatenate([*(p[::2] | p[1::2] << 4 for p in planes), np.zeros(2, np.uint8)])
    join(slot, (MatrixPlanes(0, codes.size, codes.size, 2),))
    assert slot[:-2].view(np.int8).tolist() == codes.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_chunks_may_arrive_in_several_threads(seed):
    rng, slots = random.Random(seed), FakeSlots(4, 512, plane_joiner=PlaneJoiner([NESTING]))
    experts = [expert(10 * seed + i) for i in range(4)]
    jobs = []
    for slot, (data, _, _) in enumerate(experts):
        slots.clear(slot)
        cuts = sorted({0, data.size, *(rng.randrange(data.size) for _ in range(5))})
        jobs += [(slot, data, a, b) for a, b in pairwise(cuts)]
    rng.shuffle(jobs)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not jobs:
                    return
                slot, data, a, b = jobs.pop()
            time.sleep(rng.random() * 1e-3)
            slots.write(slot, BOTH, data[a:b], a)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for slot, (_, codes, scale) in enumerate(experts):
        assert_joined(slots, slot, codes, scale)


def test_a_copy_and_its_remainder_are_joined():
    slots = FakeSlots(2, 512, plane_joiner=PlaneJoiner([NESTING]))
    data, codes, scale = expert(3)
    slots.clear(1)
    slots.fill(1, data[:AT], 0)
    slots.write(1, SECOND_HALF, data[AT:], 0)
    assert_joined(slots, 1, codes, scale)
    slots.move(1, 0)
    assert_joined(slots, 0, codes, scale)
    assert (slots.bytes(1) == POISON).all()


def test_bytes_of_an_abandoned_read_do_not_count():
    slots = HostSlots(1, 512, plane_joiner=PlaneJoiner([NESTING]))
    data, codes, scale = expert(4)
    slots.clear(0)
    slots.write(0, BOTH, data[:100], 0)
    slots.clear(0)
    slots.write(0, BOTH, data[60:], 60)
    slots.write(0, BOTH, data[:60], 0)
    assert_joined(slots, 0, codes, scale)
