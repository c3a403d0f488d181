"""The parts of the live screen beside the map: speed, memory, links, prefetching, and the text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.style import Style

from greenroom.cli.screen.frame import ANSWER, PROMPT, ModelFacts, RequestState
from greenroom.cli.screen.history import History
from greenroom.cli.screen.lines import (
    DOTS,
    Line,
    columns,
    fit,
    flow,
    heading,
    join_blocks,
    length,
    line_of,
    safe,
    spread,
    wrap,
)
from greenroom.cli.screen.palette import BOLD, DIM, MEMORY, PLAIN, RATIO, SPEED, TTFT, WAITS, Look
from greenroom.config import show_bytes
from greenroom.sim.table import show_time

TILE_GAP = 2
PARTS = (  # of memory, each with a short name
    ("expert slots", "slots"), ("dense parts", "dense"), ("keys and values", "KV"),
    ("buffers", "buffers"), ("the rest", "rest"),
)  # fmt: skip
FILLS = "█▓▒░·"  # of the parts of memory, where they have no colours
GUARD_LINES = 2  # the most of a verdict
TEXT_CHARACTERS = 20_000  # the most that is wrapped: far more than a screen holds


def title_line(facts: ModelFacts, history: History, width: int) -> Line:
    """Return the first line: the model, and the phase of the request."""
    sizes = sorted({*facts.layers})
    experts = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    shape = f"{len(facts.layers)} layers × {experts} experts"
    left = line_of((facts.title, BOLD), ("  " + DOTS.join((shape, f"policy {facts.policy}")), DIM))
    return spread(left, _request_line(history.last.requests), width)


def _request_line(requests: Sequence[RequestState]) -> Line:
    """Return the phase of the first request, and how many others there are."""
    if not requests:
        return []
    first = requests[0]
    if first.phase == ANSWER:
        text = f"{first.new:,} of {first.most:,} tokens"
    elif first.phase == PROMPT:
        text = f"reading a prompt of {first.prompt:,} tokens"
    else:
        text = "waiting"
    others = f", {len(requests) - 1} more" if len(requests) > 1 else ""
    return line_of(text, (f"{others} · {show_age(first.age)}", DIM))


def show_age(seconds: float) -> str:
    """Format seconds without decimals, or as minutes and seconds."""
    minutes, left = divmod(int(seconds), 60)
    return f"{minutes}:{left:02d} min" if minutes else f"{left} s"


def tiles(history: History, width: int, height: int) -> list[Line]:
    """Return speed, time to the first token, hit ratio and stalls, each above its chart."""
    last = history.last
    speed, ratio, waits = (history.series[name][-1][1] for name in ("speed", "ratio", "waits"))
    ttft = show_time(last.ttfts[-1]) if last.ttfts else "–"
    each = max(1, (width - 3 * TILE_GAP) // 4)
    widths = [each, each, each, max(1, width - 3 * (each + TILE_GAP))]
    rows = height - 1
    charts = [
        _over_time(history, "speed", each, rows, None),
        _last_values(last.ttfts, each, rows),
        _over_time(history, "ratio", each, rows, 1.0),
        _over_time(history, "waits", widths[3], rows, 1.0),
    ]
    heads = [
        ("Speed", f"{speed or 0:.1f}", "tokens/s"),
        ("TTFT", ttft, ""),
        ("Hits", "–" if ratio is None else f"{ratio:.0%}", "of requests"),
        ("Stalls", "–" if waits is None else f"{waits:.0%}", "of the time"),
    ]
    blocks = []
    for (name, value, unit), chart, style, wide in zip(
        heads, charts, (SPEED, TTFT, RATIO, WAITS), widths, strict=True
    ):
        head = line_of((name, DIM), " ", (value, style + BOLD))
        if unit and length(head) + 1 + len(unit) <= wide:
            head += line_of((f" {unit}", DIM))
        blocks.append(([fit(head, wide), *(line_of((row, style)) for row in chart)], wide))
    return join_blocks(blocks, " " * TILE_GAP)


def _over_time(
    history: History, name: str, width: int, height: int, top: float | None
) -> list[str]:
    """Return a chart of a series: the mean of the values in each cell's time, the last at right."""
    sums, counts = [0.0] * width, [0] * width
    span = history.span
    for at, value in history.series[name]:
        cell = width - 1 - int((history.now - at) / span * width)
        if value is not None and cell >= 0:
            sums[cell] += value
            counts[cell] += 1
    averages = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
    values = _without_gaps(averages)
    most = max((value for value in values if value is not None), default=0.0)
    return columns(values, top or most or 1.0, height)


def _without_gaps(values: list[float | None]) -> list[float | None]:
    """Return values in which cells between two known ones have the earlier one's."""
    first = next((i for i, value in enumerate(values) if value is not None), len(values))
    last = max((i for i, value in enumerate(values) if value is not None), default=-1)
    out = [*values]
    for place in range(first, last):
        out[place] = out[place] if out[place] is not None else out[place - 1]
    return out


def _last_values(values: Sequence[float], width: int, height: int) -> list[str]:
    """Return a chart with a column for each value; the last one is at the right."""
    last = values[-width:] if len(values) > 1 else ()
    shown: list[float | None] = [*[None] * (width - len(last)), *last]
    return columns(shown, max((value or 0.0 for value in shown), default=0.0) or 1.0, height)


def memory(history: History, width: int, look: Look) -> list[Line]:
    """Return memory by part against the budget: a heading, a bar, and the parts' sizes."""
    budget, process, dense, slots, keys_values, buffers = history.last.cache.memory
    parts = [slots, dense, keys_values] + ([buffers] if buffers is not None else [])
    names = PARTS[: len(parts)]
    subtotal = sum(parts)
    styles = [*MEMORY[: len(parts)], MEMORY[-1]]
    if process is not None:
        parts.append(max(0, process - subtotal))
        names += PARTS[-1:]
    used = subtotal if process is None else process
    total = max(budget or 0, used, subtotal, 1)
    note = f"{show_bytes(used)} of {show_bytes(budget)}" if budget else f"{show_bytes(used)} in use"
    fills = "█" * len(FILLS) if look.colour else FILLS
    stack: Line = []
    filled = end = 0
    for size, style, fill in zip(parts, styles, fills, strict=False):
        end += size
        cells = round(width * end / total) - filled
        filled += cells
        stack += line_of((fill * cells, style))
    stack += line_of(("─" * max(0, width - filled), DIM))
    keys = [
        [
            line_of((fill, style), f" {name[short]} ", (show_bytes(size), BOLD))
            for name, size, style, fill in zip(names, parts, styles, fills, strict=False)
        ]
        for short in (0, 1)
    ]
    rows = flow(keys[0], width)
    if len(rows) > 1:
        rows = flow(keys[1], width)
    return [fit(line, width) for line in (heading("Memory", note), stack, *rows)]


def links(facts: ModelFacts, history: History, width: int) -> list[Line]:
    """Return a line for each link: its name, rate, and queue."""
    lines: list[Line] = []
    names = [name.replace("->", "→") for name in facts.links]
    wide = max((len(name) for name in names), default=0)
    for name, link, rate in zip(names, history.last.cache.links, history.links(), strict=True):
        items = [
            line_of((f"{name:<{wide}}", BOLD), f"  {show_bytes(rate.nbytes)}/s"),
            line_of((f"{rate.busy:.0%} busy, {link.moving} moving", DIM)),
            line_of((f"queue: {link.demands} needed now, {link.prefetches} ahead", DIM)),
        ]
        lines += flow(items, width)
    return [fit(line, width) for line in lines]


def prefetching(facts: ModelFacts, history: History, width: int) -> list[Line]:
    """Return the predictor's accuracy, what became of its prefetches, and the guard's verdict."""
    now, cache = history.last.cache.prefetch, history.last.cache
    if facts.predictor is None:
        return [fit(heading("Prefetching", "off"), width)]
    counts = now.outcomes
    begun = counts["prefetches"]
    lost = counts["wasted"] + counts["dropped"] + counts["displaced"]
    shares = [
        f"{count / begun:.0%} {name}"
        for name, count in (
            ("in time", counts["useful"]),
            ("late", counts["late"]),
            ("not used", lost),
        )
        if begun
    ]
    items = [
        line_of(("Prefetching", BOLD), (f"  {facts.predictor} {'on' if now.on else 'off'}", DIM)),
        line_of(("accuracy ", DIM), "–" if now.accuracy is None else f"{now.accuracy:.0%}"),
        line_of(f"{begun:,}", (" begun" + (": " + ", ".join(shares) if shares else ""), DIM)),
    ]
    if now.verdict is not None:
        guard = wrap(f"Guard: {now.verdict}", width)[:GUARD_LINES]
    elif cache.capacity >= sum(facts.layers):
        guard = ["every expert has a slot, so nothing is predicted"]
    else:
        guard = []
        items.append(line_of(("guard: no verdict yet", DIM)))
    lines = flow(items, width) + [line_of((row, DIM)) for row in guard]
    return [fit(line, width) for line in lines]


def answer(parts: Sequence[tuple[str, bool]], width: int, height: int) -> list[Line]:
    """Return the last lines of the text; of each part is known whether it is reasoning."""
    lines: list[Line] = []
    for text, reasoning in parts:
        style: Style = DIM if reasoning else PLAIN
        rows = wrap(safe(text[-TEXT_CHARACTERS:]), max(1, width))
        lines += [line_of((row, style)) for row in rows]
    return [fit(line, width) for line in lines[-height:]] if height > 0 else []
