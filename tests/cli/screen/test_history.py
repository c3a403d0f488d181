"""Rates and shares of the live screen, by hand."""

from __future__ import annotations

import pytest

from greenroom.cli.screen.history import GAP_S, History, LinkRate
from greenroom.hf.attach.snapshot import LinkState
from tests.cli.screen.rig import frame

SIZES = [4, 4]


def history_of(*times: float, **counters: list[object]) -> History:
    history = History()
    for number, at in enumerate(times):
        changes = {name: values[number] for name, values in counters.items() if name != "tokens"}
        tokens = counters.get("tokens", [0] * len(times))[number]
        history.add(frame(SIZES, at, tokens, **changes))  # type: ignore[arg-type]
    return history


def test_speed_is_of_the_last_two_seconds() -> None:
    history = history_of(0, 1, 2, 3, tokens=[0, 10, 12, 20])
    assert history.speed() == 5.0
    assert list(history.series["speed"]) == [(0, None), (1, 10), (2, 6), (3, 5)]


def test_the_hit_ratio_is_of_the_last_five_seconds() -> None:
    history = history_of(0, 2, 4, 6, hits=[[0, 0], [9, 0], [9, 9], [10, 10]],
                         misses=[[0, 0], [1, 0], [1, 5], [10, 5]])  # fmt: skip
    assert history.ratio() == pytest.approx(20 / 35)  # since second 0: none is older than 5
    assert history_of(0, 1).ratio() is None


def test_stalls_are_a_share_of_the_time() -> None:
    history = history_of(0, 1, 2, stalls=[[0, 0], [0.25, 0.25], [0.5, 0.5]])
    assert history.waits() == 0.5
    assert history_of(0, 1, stalls=[[0, 0], [3, 3]]).waits() == 1
    assert history_of(0).waits() is None


def test_layers_and_links() -> None:
    links = [[LinkState(0, 0.0, 0, 0, 0)], [LinkState(3000, 0.5, 1, 2, 3)]]
    history = history_of(10, 12, hits=[[1, 2], [3, 5]], misses=[[0, 0], [1, 4]],
                         stalls=[[0.5, 0], [1.0, 0]], links=links)  # fmt: skip
    totals = history.layers()
    assert (totals.hits, totals.misses, totals.stalls) == ([2, 3], [1, 4], [0.5, 0])
    assert history.links() == [LinkRate(1500, 0.25)]
    assert history_of(0, links=links[:1]).links() == [LinkRate(0, 0)]


def test_rates_begin_anew_after_a_time_without_a_screen() -> None:
    history = history_of(0, 1, 2 + GAP_S, 3 + GAP_S, tokens=[0, 10, 1000, 1004])
    assert history.speed() == 4.0
    assert [at for at, _ in history.series["speed"]] == [0, 1, 1, 2]


@pytest.mark.parametrize(("seconds", "span"), [(1, 15), (16, 30), (61, 120), (999, 120)])
def test_charts_show_more_after_a_while(seconds: float, span: float) -> None:
    history = History()
    history.now = seconds
    assert history.span == span
