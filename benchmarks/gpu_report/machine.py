"""The machine that is measured, and the clock of its device."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "transformers", "numpy", "numba", "safetensors", "accelerate")
WARM, LIMIT_S, MOST = 3, 0.3, 30  # calls before any is timed; seconds and calls that are timed


def missing() -> str:
    """The reason why this machine cannot be measured; empty if it can."""
    if not torch.cuda.is_available():
        return "no CUDA device answers: use a machine with a GPU, or --smoke for a dry run on a CPU"
    try:
        import greenroom.hf  # noqa: F401
    except Exception as error:  # one line, of Greenroom's own
        return str(error)
    return ""


def device(smoke: bool) -> torch.device:
    """The device of all computation."""
    return torch.device("cpu") if smoke else torch.device("cuda", 0)


def described(smoke: bool) -> dict[str, Any]:
    """A description of the machine and its software, for the report."""
    description: dict[str, Any] = {
        "python": platform.python_version(), "cores": os.cpu_count(), "smoke": smoke,
        "commit": commit(), "cuda": torch.version.cuda, "packages": {},
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }  # fmt: skip
    for name in PACKAGES:
        try:
            description["packages"][name] = version(name)
        except PackageNotFoundError:
            description["packages"][name] = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        description |= {
            "gpu": properties.name, "gpu_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": list(torch.cuda.get_device_capability(0)),
        }  # fmt: skip
    return description


def commit() -> str:
    """The measured commit, with a + if the working tree differs from it."""
    command = ["git", "describe", "--always", "--dirty=+"]
    folder = Path(__file__).parent
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def synchronize(at: torch.device) -> None:
    """Wait for the device."""
    if at.type == "cuda":
        torch.cuda.synchronize(at)


def wall_seconds(work: Callable[[], object], at: torch.device) -> float:
    """Median seconds of a call and of what it orders, by the host's clock."""
    times, begin = [], time.perf_counter()
    for number in range(WARM + MOST):
        synchronize(at)
        start = time.perf_counter()
        work()
        synchronize(at)
        times.append(time.perf_counter() - start)
        if number >= 1 and time.perf_counter() - begin > LIMIT_S:
            break
    return statistics.median(times[min(WARM, len(times) - 1) :])


def device_seconds(work: Callable[[], object], at: torch.device) -> tuple[float, str]:
    """(median seconds that the device takes for a call, how they were measured).

    "graph": a CUDA graph of the call is replayed, so launches cost no time; "events": events around
    the call, if no graph can hold it; "host": the host's clock, on a CPU.
    """
    if at.type != "cuda":
        return wall_seconds(work, at), "host"
    graph = captured(work)
    if graph is None:
        return event_seconds(work), "events"
    return event_seconds(graph.replay), "graph"


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
    """A CUDA graph of a call; None if a graph cannot hold the call."""
    home, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(home)
    with torch.cuda.stream(side):  # whatever is compiled or loaded at the first call
        for _ in range(WARM):
            work()
    home.wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError as error:
        torch.cuda.set_stream(home)  # the block was left on the stream of the capture
        print(f"no graph: {str(error).splitlines()[0]}", flush=True)
        torch.cuda.synchronize()
        return None
    return graph


def event_seconds(work: Callable[[], object]) -> float:
    """Median seconds between events around a call."""
    for _ in range(WARM):
        work()
    torch.cuda.synchronize()
    times, begin = [], time.perf_counter()
    while len(times) < MOST and (not times or time.perf_counter() - begin < LIMIT_S):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
