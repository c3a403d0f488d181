"""Measure the passes of one model on the device, with or without an expert cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import machine
import numpy as np
import torch
from kernel_layers import engine_of
from playing import Request
from shapes import Shape

from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.memory import devices as places
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.policies import choose
from greenroom.runtime import forward
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.token_graph import TokenGraph
from greenroom.runtime.kernels.triton.copies import ListedCopies
from greenroom.runtime.kernels.triton.token_launches import TokenLaunches

PROFILED, TOP = 5, 25  # tokens, and the operations that are named
TRACE = "trace.json.gz"


class Bench:
    """A model from a checkpoint; `attached` gives it a cache of experts."""

    def __init__(self, folder: Path, shape: Shape, device: torch.device, smoke: bool) -> None:
        self.folder, self.shape, self.device, self.smoke = folder, shape, device, smoke
        if smoke:
            places.engine_for = lambda parts, number=0: Engine()
        skeleton = ModelSkeleton.of(folder)
        self.catalog = skeleton.catalog
        self.names: tuple[str, ...] = tuple(skeleton.catalog.layers)
        self.model: Any = skeleton.load(device)

    @contextmanager
    def attached(self, share: float, **options: Any) -> Iterator[Greenroom]:
        """A cache of this share of the experts, with all of them in host memory."""
        experts = self.catalog.experts
        capacity = max(1, int(experts * share))
        parts = ModelSetup(
            self.catalog, capacity, policy=choose("auto", capacity, experts).name, cuda=True,
            kernels="eager" if self.smoke else "auto", host_capacity=experts, host_policy="lru",
            direct="off", **options,
        )  # fmt: skip
        greenroom = self.model.greenroom = Greenroom(self.model, parts)
        try:
            greenroom.compile()
            for layer in range(len(self.names)):  # from disk, once
                greenroom.driver.step(layer, np.arange(self.shape.experts), lambda *_: None)
            yield greenroom
        finally:
            greenroom.detach()

    def player(self, request: Request) -> Callable[[int], float]:
        """A function that plays a pass of a request and gives its seconds; pass 0 begins it."""
        placed, keys = replace(request, ids=request.ids.to(self.device)), None

        @torch.inference_mode()
        def play(number: int) -> float:
            """Seconds of a pass, until the host has its next token."""
            nonlocal keys
            tokens = placed.tokens(number)
            machine.synchronize(self.device)
            start = time.perf_counter()
            out = self.model(
                tokens, past_key_values=keys if number else None, use_cache=True, logits_to_keep=1
            )
            out.logits.argmax().item()
            keys = out.past_key_values
            return time.perf_counter() - start

        return play

    def passes(self, request: Request, warm: int = 0) -> list[float]:
        """Seconds of each pass of a request, after its first `warm` passes were played once."""
        play = self.player(request)
        for number in range(warm):
            play(number)
        return [play(number) for number in range(len(request.passes))]


@contextmanager
def clocked(greenroom: Greenroom) -> Iterator[dict[str, float]]:
    """Seconds that the host spends in each part of the experts forward."""
    spent = dict.fromkeys(("ids", "launches"), 0.0)

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args)
            finally:
                spent[name] += time.perf_counter() - start

        return wrapped

    with ExitStack() as undo:

        def clock(place: Any, name: str, part: str) -> None:
            before = getattr(place, name)
            undo.callback(setattr, place, name, before)
            setattr(place, name, timed(part, before))

        clock(forward, "to_host", "ids")
        clock(TokenLaunches, "read_report", "ids")
        clock(TokenGraph, "read_reports", "ids")
        clock(TokenGraph, "replay", "launches")
        for name in ("begin", "compute_group", "combine"):
            setattr(greenroom.kernel, name, timed("launches", getattr(greenroom.kernel, name)))
            undo.callback(delattr, greenroom.kernel, name)
        for name in (
            "start",
            "start_piece",
            "launch_piece",
            "start_again",
            "compute_loaded",
            "result",
        ):
            clock(TokenLaunches, name, "launches")
        yield spent


def plain_copy(device: torch.device, nbytes: int) -> float:
    """Bytes a second of one copy from pinned memory, as large as it may be."""
    source, target = copied_memory(device, nbytes)
    return copy_rate(device, nbytes, lambda: target.copy_(source, non_blocking=True))


def kernel_copy(device: torch.device, nbytes: int, copies: int) -> float:
    """Bytes a second of equal copies from pinned memory by the tier's kernel."""
    source, target = copied_memory(device, nbytes)
    listed, size = ListedCopies(engine_of(device), copies), nbytes // copies // 8
    rows = [[m.data_ptr() + 8 * size * n for m in (source, target)] + [size] for n in range(copies)]
    listed.numbers[:] = [copies, *(number for row in rows for number in row)]
    rate = copy_rate(device, nbytes, listed.start)
    assert torch.equal(target.cpu(), source), "the kernel has copied other bytes"
    return rate


def copied_memory(device: torch.device, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pinned memory with numbers, and zeros on the device: [nbytes] uint8 each."""
    source = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    source.view(torch.int64).copy_(torch.arange(nbytes // 8))
    return source, torch.zeros(nbytes, dtype=torch.uint8, device=device)


def copy_rate(device: torch.device, nbytes: int, copy: Callable[[], object]) -> float:
    """Bytes a second of a copy, in the middle of six."""
    times = []
    for _ in range(7):
        machine.synchronize(device)
        start = time.perf_counter()
        copy()
        machine.synchronize(device)
        times.append(time.perf_counter() - start)
    return nbytes / statistics.median(times[1:])


def tier_copy(bench: Bench, greenroom: Greenroom) -> float:
    """Bytes a second of experts copied from host memory, by the driver's own transfers."""
    driver, start = greenroom.driver, time.perf_counter()
    before = driver.meter.links[1].nbytes
    for layer in range(len(bench.names)):
        driver.step(layer, np.arange(bench.shape.experts), lambda *_: None)
    machine.synchronize(bench.device)
    return (driver.meter.links[1].nbytes - before) / (time.perf_counter() - start)


def profiled(bench: Bench, request: Request, warm: int, out: Path) -> dict[str, Any]:
    """Profile a few tokens after `warm` passes, and write the profiler's trace to a file.

    Return the longest operations on the host and on the device.
    """
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if bench.device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    play = bench.player(request)
    for number in range(warm):
        play(number)
    with torch.profiler.profile(activities=kinds) as profiler:
        times = [play(warm + number) for number in range(PROFILED)]
    profiler.export_chrome_trace(str(out / TRACE))
    averages = profiler.key_averages()
    return {
        "tokens": PROFILED, "token_ms": statistics.median(times) * 1e3, "file": TRACE,
        "host": _top(averages, "self_cpu_time_total"),
        "device": _top(averages, "self_device_time_total"),
    }  # fmt: skip


def _top(averages: Any, field: str) -> list[list[Any]]:
    """[operation, microseconds a token, calls a token] of the longest operations."""
    longest = sorted(averages, key=lambda each: -getattr(each, field))[:TOP]
    return [
        [each.key[:120], round(getattr(each, field) / PROFILED, 2), each.count / PROFILED]
        for each in longest
        if getattr(each, field) > 0
    ]
