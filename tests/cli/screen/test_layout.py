"""The live screen's arrangement: a frame by hand, and every size of a terminal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.cli.screen.layout import TEXT_COLUMN_WIDTH, View, draw
from greenroom.cli.screen.lines import length
from greenroom.cli.screen.palette import Look
from greenroom.hf.attach.snapshot import LinkState
from tests.cli.screen.rig import facts, frame, random_view, texts

PLAIN = Look(shades=False, colour=False)
LOOKS = [Look(), PLAIN, Look(shades=False, colour=False, unicode=False)]
FRAME = """\
tiny  2 layers × 4 experts · policy lru                   10 of 100 tokens · 1 s
Speed 10.0          TTFT 250 ms         Hits 75%            Stalls 50%
                 █                                       ▆                     ▄
Experts  5 of 8 in memory, in 5 slots (62%)                    misses     stalls
0 ●  ·  ○  ○                                                 40% █▋   500ms ████
1 ○  ○  ·  ↓                                                  0%
  ○ in memory  ↓ being read  + read ahead  · on disk  ● just used

Memory  2 GiB of 4 GiB
██████████▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓··········────────────────────────────────────────
█ slots 512 MiB  ▓ dense 1 GiB  ▒ KV 0 B  ░ buffers 0 B  · rest 512 MiB

disk → host  1 MiB/s  25% busy, 2 moving  queue: 1 needed now, 4 ahead

Prefetching  next-gate on  accuracy –  0 begun  guard: no verdict yet
─ Text ─────────────────────────────────────────────────────────────────────────
Once upon a time there was a fox."""


def view() -> View:
    found = View(facts([4, 4]), text=[("Once upon a time there was a fox.", False)])
    found.history.add(frame([4, 4]))
    states = np.array([3, 0, 3, 3, 3, 3, 0, 1])
    found.history.add(frame(
        [4, 4], 1.0, 10, hits=[3, 3], misses=[2, 0], stalls=[0.5, 0.0], states=states,
        used=np.arange(8) == 0, present=5, capacity=5,
        links=[LinkState(1 << 20, 0.25, 1, 4, 2)],
    ))  # fmt: skip
    return found


def test_a_frame_of_24_lines() -> None:
    lines = texts(draw(view(), 80, 24, PLAIN))
    while not lines[-1]:
        lines.pop()
    assert lines == FRAME.splitlines()


def test_the_text_is_beside_the_numbers_where_there_is_room() -> None:
    lines = texts(draw(view(), TEXT_COLUMN_WIDTH, 30, PLAIN))
    assert lines[4].split(" │ ") == [lines[4].split(" │ ")[0], "Text"]
    assert lines[5].endswith(" │ Once upon a time there was a fox.")
    assert " │ " not in "".join(texts(draw(view(), TEXT_COLUMN_WIDTH - 1, 30, PLAIN)))


def test_the_map_comes_first_where_room_is_short() -> None:
    lines = texts(draw(random_view([8] * 20, 9), 80, 16, PLAIN))
    assert lines[3].startswith("Experts")
    assert lines[7].lstrip().startswith("▁▄█ share in memory")
    assert lines[8].startswith("Memory")
    assert lines[-4].startswith("─ Text")


@pytest.fixture(scope="module")
def views() -> list[View]:
    found = [random_view([128] * 94, 3), random_view([8] * 16, 90), random_view([3, 1, 5], 1)]
    found[0].text = [("Hm. " * 90, True), ("A漢字\n\nverylongword" * 20, False)]
    return found


@given(st.integers(0, 2), st.integers(1, 220), st.integers(1, 70), st.sampled_from(LOOKS))
def test_every_size_is_filled_exactly(
    views: list[View], which: int, width: int, height: int, look: Look
) -> None:
    lines = draw(views[which], width, height, look)
    assert [length(line) for line in lines] == [width] * height
