"""The HTML report that `greenroom simulate` writes, from a study and its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from greenroom.config import SimulateConfig
from greenroom.core.cache.scope import name_of
from greenroom.sim.curves import curve_capacities, opt_curve
from greenroom.sim.page.recording import recording
from greenroom.sim.page.report import highlighted, report
from greenroom.sim.study import Cell, Row, Study

LAST = 120  # tokens or passes that the map of experts plays
Go = Callable[[Study, list[Cell]], list[Row]]


def page(
    source: Path,
    config: SimulateConfig,
    study: Study,
    cells: list[Cell],
    rows: list[Row],
    go: Go,
    command: str,
) -> str:
    """Make the HTML report of a simulation study, and return the page.

    Its curves show miss ratios without prefetching, which depend on no machine. They have more
    points than the study; `go` simulates the missing cells (policy and capacity).

    source:  file of the trace
    cells:   the simulated policies and capacities
    rows:    the results of `cells`
    command: the command line, which the report shows
    """
    trace, counted = study.trace, replace(study, costs=None, speculates=False)
    title, experts = str(trace.meta.get("model", source.name)), int(trace.offsets[-1])
    least = 1 if study.scope == "shared" else trace.layers
    points = list(curve_capacities([cell.capacity for cell in cells], experts, least))
    names = list(dict.fromkeys(cell.policy_name for cell in cells))
    needed = [Cell(name, n, config.pin) for name in names for n in points]
    results: dict[Cell, Row] = dict(zip(cells, rows, strict=True))
    lacking = [cell for cell in dict.fromkeys(needed) if cell not in results]
    results |= dict(zip(lacking, go(counted, lacking), strict=True))

    def curve(name: str) -> list[tuple[int, float]]:
        return [(n, results[Cell(name, n, config.pin)]["miss_ratio"]) for n in points]

    settings: dict[str, Any] = {
        "order": study.order,
        "scope": name_of(study.scope),
        "pin": config.pin,
    }
    settings |= {"seed": study.seed} if study.seed else {}
    settings |= {"reset": "per request"} if study.reset else {}
    return report(
        title=title,
        facts=[
            ("trace", str(source)),
            ("tokens", f"{trace.tokens:,}"),
            ("requests", f"{trace.requests:,}"),
            ("layers", f"{trace.layers:,}"),
            ("experts", f"{experts:,}"),
            ("top-k", f"{trace.top_k}"),
            *((key, str(trace.meta[key])) for key in ("provenance", "note") if key in trace.meta),
            *([("machine", config.machine)] if config.machine else []),
        ],
        settings=settings,
        command=command,
        experts=experts,
        tokens=trace.tokens,
        curves={results[Cell(n, points[0], config.pin)]["policy"]: curve(n) for n in names},
        floor=floor(study, points),
        recording=recording(counted, cells[highlighted(rows)], title, last=LAST),
        rows=rows,
    )


def floor(study: Study, points: list[int]) -> list[tuple[int, float]]:
    """Return the least possible miss ratio by cache capacity, that of OPT (Belady's policy).

    No experts are pinned. The capacities are `points` and about 200 others.
    """
    curve = opt_curve(study.requests, study.trace.offsets, scope=study.scope, reset=study.reset)
    step = max(1, curve.capacities.size // 200)
    shown = np.isin(curve.capacities, points)
    shown[::step] = True
    ratios = curve.misses[shown] / max(1, curve.requests)
    return list(zip(curve.capacities[shown].tolist(), ratios.tolist(), strict=True))
