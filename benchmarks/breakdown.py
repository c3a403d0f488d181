"""Time of a decode pass by kind of module, exclusive of the modules it calls.

Hooks before and after each module keep a stack of timers: a module's time counts as its own less
that of the modules it calls. So `linear` is the projections and the head, `attention` what
attention does besides its projections and norms (rotary, KV cache, scores; all of it where it is
one compiled call), `router` the gate, `experts` the experts' forward, `norm` the norms, `layer`
decoder layers that are compiled as a whole (all of them but the router), and `rest` everything
outside of these: residual sums, masks, Python. On a CPU, calls return when they are done, so no
profiler is needed; the hooks cost about two microseconds a module, reported as `overhead` included
in `rest`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import nn


def kind_of(name: str, module: nn.Module) -> str:
    """The kind, such as "linear", under which a module's exclusive time is counted."""
    last, cls = name.rpartition(".")[2], type(module).__name__.lower()
    if "forward" in vars(module) and last.isdigit():
        return "layer"
    if last == "experts":
        return "experts"
    if last in ("gate", "router") or "router" in cls:
        return "router"
    if isinstance(module, nn.Linear):
        return "linear"
    if "norm" in cls:
        return "norm"
    if "attn" in last or "attention" in cls or "rotary" in cls:
        return "attention"
    return "rest"


def breakdown(model: nn.Module, run: Callable[[], list[float]]) -> dict[str, float]:
    """Milliseconds of a pass by kind of module, while `run` does its passes.

    `total` is the sum of all kinds.
    """
    exclusive: dict[str, float] = defaultdict(float)
    inner: list[float] = [0.0]  # time of the modules called, one a module that is running
    started: list[float] = []
    calls = 0

    def enter(module: nn.Module, args: Any) -> None:
        inner.append(0.0)
        started.append(time.perf_counter())

    def leaver(kind: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal calls
            seconds = time.perf_counter() - started.pop()
            exclusive[kind] += seconds - inner.pop()
            inner[-1] += seconds
            calls += 1

        return leave

    handles, inside = [], ()
    for name, module in model.named_modules():
        kind = kind_of(name, module)
        if inside and name.startswith(inside) and kind != "router":
            continue  # computed by its parent's own forward, which hooks would switch off
        if kind in ("attention", "layer") and "forward" in vars(module):
            inside = (*inside, f"{name}.")
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leaver(kind)))
    try:
        times = run()
    finally:
        for handle in handles:
            handle.remove()
    per_pass = {kind: seconds / len(times) * 1e3 for kind, seconds in exclusive.items()}
    per_pass["rest"] = sum(times) / len(times) * 1e3 - sum(
        value for kind, value in per_pass.items() if kind != "rest"
    )
    per_pass["total"] = sum(times) / len(times) * 1e3
    per_pass["overhead"] = calls / len(times) * 2e-3
    return per_pass
