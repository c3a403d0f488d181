"""The parts of the live screen beside the map, by hand."""

from __future__ import annotations

from dataclasses import replace

from greenroom.cli.screen import panels
from greenroom.cli.screen.frame import PROMPT, WAITING, RequestState
from greenroom.cli.screen.history import History
from greenroom.cli.screen.palette import DIM, Look
from greenroom.hf.attach.snapshot import LinkState, MemoryParts, PrefetchState
from tests.cli.screen.rig import GIB, facts, frame, texts

SIZES = [4, 4]


def history(**changes: object) -> History:
    """Two frames, a second apart: 10 tokens, 6 hits, 2 misses, 0.5 s of stalls, 1 MiB read."""
    found = History()
    found.add(frame(SIZES, 0.0))
    links = [LinkState(1 << 20, 0.25, 1, 4, 2)]
    found.add(frame(
        SIZES, 1.0, 10, hits=[3, 3], misses=[2, 0], stalls=[0.5, 0.0], links=links, **changes
    ))  # fmt: skip
    return found


def test_the_title_has_the_model_and_the_phase() -> None:
    found = history()
    assert texts([panels.title_line(facts(SIZES), found, 70)]) == [
        "tiny  2 layers × 4 experts · policy lru         10 of 100 tokens · 1 s"
    ]
    last = found.frames[-1]
    found.frames[-1] = replace(last, requests=(
        RequestState(PROMPT, 1234, 0, 9, 61.0), RequestState(WAITING, 1, 0, 9, 1.0),
    ))  # fmt: skip
    line = texts([panels.title_line(facts([4, 8]), found, 90)])[0]
    assert "2 layers × 4 to 8 experts" in line
    assert line.endswith("reading a prompt of 1,234 tokens, 1 more · 1:01 min")
    found.frames[-1] = replace(last, requests=(RequestState(WAITING, 1, 0, 9, 1.0),))
    assert texts([panels.title_line(facts(SIZES), found, 70)])[0].endswith("waiting · 1 s")
    found.frames[-1] = replace(last, requests=())
    assert texts([panels.title_line(facts(SIZES), found, 70)])[0].endswith("policy lru")


def test_tiles_have_values_and_charts() -> None:
    assert texts(panels.tiles(history(), 94, 2)) == [
        "Speed 10.0 tokens/s     TTFT 250 ms             Hits 75% of requests    Stalls 50% of the"
        " time",
        "                     █                                               ▆"
        "                       ▄",
    ]
    assert texts(panels.tiles(history(), 70, 1)) == [
        "Speed 10.0        TTFT 250 ms       Hits 75%          Stalls 50%"
    ]
    assert len(panels.tiles(history(), 94, 4)) == 4


def test_times_to_the_first_token_have_a_column_each() -> None:
    found = history()
    found.frames[-1] = replace(found.last, ttfts=(0.5, 1.0, 0.25))
    head, chart = texts(panels.tiles(found, 80, 2))
    assert "TTFT 250 ms" in head
    assert "▄█▂" in chart


def test_memory_by_part_of_the_budget() -> None:
    parts = MemoryParts(8 * GIB, 4 * GIB, GIB, 2 * GIB, GIB // 2, 0)
    lines = texts(panels.memory(history(memory=parts), 64, Look()))
    assert lines == [
        "Memory  4 GiB of 8 GiB",
        "█" * 32 + "─" * 32,  # 16 slots, 8 dense, 4 keys and values, 4 of the rest
        "█ slots 2 GiB  █ dense 1 GiB  █ KV 512 MiB  █ buffers 0 B",
        "█ rest 512 MiB",
    ]
    plain = texts(panels.memory(history(memory=parts), 120, Look(False, False)))
    assert plain[1] == "█" * 30 + "▓" * 15 + "▒" * 7 + "·" * 8 + "─" * 60
    assert plain[2] == (
        "█ expert slots 2 GiB  ▓ dense parts 1 GiB  ▒ keys and values 512 MiB  ░ buffers 0 B"
        "  · the rest 512 MiB"
    )


def test_memory_without_a_budget_and_of_a_gpu() -> None:
    parts = MemoryParts(None, None, GIB, GIB, 0, None)
    assert texts(panels.memory(history(memory=parts), 70, Look())) == [
        "Memory  2 GiB in use", "█" * 70,
        "█ expert slots 1 GiB  █ dense parts 1 GiB  █ keys and values 0 B",
    ]  # fmt: skip


def test_links_have_rates_and_queues() -> None:
    assert texts(panels.links(facts(SIZES), history(), 80)) == [
        "disk → host  1 MiB/s  25% busy, 2 moving  queue: 1 needed now, 4 ahead"
    ]
    assert len(panels.links(facts(SIZES), history(), 40)) == 2


def prefetching(state: PrefetchState, width: int = 100, **changes: object) -> list[str]:
    return texts(panels.prefetching(facts(SIZES), history(prefetch=state, **changes), width))


def test_prefetching_has_accuracy_outcomes_and_verdict() -> None:
    none = dict.fromkeys(("prefetches", "useful", "late", "wasted", "dropped", "displaced"), 0)
    counts = none | {"prefetches": 2000, "useful": 1000, "late": 400, "wasted": 90, "dropped": 10}
    assert prefetching(PrefetchState(True, None, None, none)) == [
        "Prefetching  next-gate on  accuracy –  0 begun  guard: no verdict yet"
    ]
    assert prefetching(PrefetchState(False, "off: it costs time " * 9, 0.715, counts), 80) == [
        "Prefetching  next-gate off  accuracy 72%",
        "2,000 begun: 50% in time, 20% late, 5% not used",
        "Guard: off: it costs time off: it costs time off: it costs time off: it costs",
        "time off: it costs time off: it costs time off: it costs time off: it costs time",
    ]
    assert prefetching(PrefetchState(False, None, None, none), capacity=8)[1:] == [
        "every expert has a slot, so nothing is predicted"
    ]
    assert texts(panels.prefetching(facts(SIZES, None), history(), 40)) == ["Prefetching  off"]


def test_the_answer_s_last_lines() -> None:
    text = [("I think.\n", True), ("one two three", False)]
    lines = panels.answer(text, 8, 9)
    assert texts(lines) == ["I think.", "", "one two", "three"]
    assert [line[0].style == DIM for line in lines] == [True, True, False, False]
    assert texts(panels.answer(text, 8, 1)) == ["three"]
    assert panels.answer(text, 8, 0) == []
