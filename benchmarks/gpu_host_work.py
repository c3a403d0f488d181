"""Host work of a decoded token's MoE layers on the GPU tier, in microseconds a layer.

    python benchmarks/gpu_host_work.py
    python benchmarks/gpu_host_work.py --kernels
    python benchmarks/gpu_host_work.py --co-compute --copy-us 800
    python benchmarks/gpu_host_work.py --cache 25% 50% 100% --profile

A CPU takes the GPU's place, and nothing is launched: a launch of kernels is replaced by the little
that the host sees of it. The time is taken inside the layers' experts, without what replaces
launches. It says how long a GPU waits for Python. A real launch takes a few microseconds
more, and a GPU's queue hides what is done before it is empty. With --co-compute other threads move
experts meanwhile, and Python computes in one thread at a time.

    hits      layers whose experts are all in slots
    deferred  the scheduler's part of such a layer, after later layers' launches
    misses    layers that wait for an expert
    behind    the rest of such a layer, if the next layer's piece was launched with its copies: this
              launch is counted as the next layer's
    to copy   of these, from the report of missing experts to the launch of the first copy: so long
              the device waits for the host, which does the rest while bytes are on their way
    rest      a layer's share of the decoder's other host work: attention, norms, router, where
              these are no graph
    graph     a layer's share of a token that is one graph, all of the decoder's host work
    launches  a layer; a graph of kernels is one

A token is one graph, or in pieces: one graph a layer. With --kernels, attention, norms and routers
are launched kernel by kernel, as in models without graphs.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import os
import pstats
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # kernels are Python functions, which can be replaced

# isort: off
import greenroom  # noqa: F401, before torch, for the threads of OpenMP
import torch
from numba import njit
from torch import nn

# isort: on
from common import commit, machine, table
from worker import Passes

from greenroom.core.config.scheduler import SchedulerConfig
from greenroom.core.home_devices import DevicePlacement
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.attach.graph_pass import GraphPass
from greenroom.hf.attach.token_attention import TokenAttention
from greenroom.hf.measure.random_model import Shape, small_model
from greenroom.hf.memory import devices
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.memory.slots import slots_for
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime import forward
from greenroom.runtime.cuda.engine import Engine, Mark
from greenroom.runtime.cuda.piece_graph import PieceGraph
from greenroom.runtime.cuda.token_graph import active_graph
from greenroom.runtime.kernels.report import TokenReport
from greenroom.runtime.kernels.triton import look_up, one_token, programs, token_attention
from greenroom.runtime.kernels.triton.copies import ListedCopies
from greenroom.runtime.kernels.triton.token_launches import TokenLaunches
from greenroom.runtime.slots.tier import ABSENT

now = time.perf_counter
SHAPE = Shape(hidden=64, inner=32, layers=8, experts=64, top_k=8)
COLUMNS = ("slots", "hit ratio", "hits us", "deferred us", "misses us", "behind us", "to copy us",
           "rest us", "graph us", "launches", "layers hit", "layers missed", "graphs",
           "in pieces")  # fmt: skip


class Launches:
    """What replaces Triton's kernels: a count, and zeros as the sum over experts.

    noted: look-ups that are noted, as functions that do them; None: all are done
    """

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        self.noted: list[Callable[[], None]] | None = None

    def install(self) -> None:
        nothing = Launch(self, lambda *_, **constants: None)
        programs.project = one_token.project_one = nothing  # type: ignore[assignment]
        programs.combine = Launch(self, lambda *arguments, **_: arguments[3].zero_())  # type: ignore
        look_up.look_up = Launch(self, self._look_up)  # type: ignore[assignment]
        token_attention.attend = token_attention.append = nothing  # type: ignore[assignment]
        token_attention.merge = Launch(self, lambda *arguments, **_: arguments[1].zero_())  # type: ignore
        TokenAttention._is_near = True

    def _look_up(self, *arguments: Any, AGAIN: bool, **_: Any) -> None:
        write = write_report(arguments, AGAIN)
        if self.noted is None:
            write()
        else:
            self.noted.append(write)

    def note(self, work: Callable[[], None]) -> list[Callable[[], None]]:
        """Return the look-ups of `work`, which is all that the host sees of it."""
        self.noted = []
        try:
            work()
            return self.noted
        finally:
            self.noted = None


def write_report(arguments: Any, again: bool) -> Callable[[], None]:
    """Return what does for the host what a launch of `look_up` does.

    It is little code, as a launch is: else what the host does next would not be in the processor's
    caches.
    """
    index, offsets, _, _, _, report, number, changes = (
        each.numpy().reshape(-1) for each in arguments[:8]
    )
    first = arguments[8]
    return partial(_write_report, index, offsets, report, number, changes, first, again)


@njit
def _write_report(
    index: Any, offsets: Any, report: Any, number: Any, changes: Any, first: int, again: bool
) -> None:
    number[0] += 1
    if again:
        for n in range(0, changes.size, 2):
            if changes[n] >= 0:
                offsets[changes[n]] = changes[n + 1]
    for k in range(index.size):
        found = offsets[first + index[k]] > ABSENT
        report[k] = (number[0] << 32) | (index[k] << 1) | found


class Launch:
    """What replaces one kernel or graph; its time is not counted as the host's."""

    def __init__(self, launches: Launches, act: Any) -> None:
        self._launches, self._act = launches, act

    def __getitem__(self, grid: Any) -> Launch:
        return self

    def __call__(self, *arguments: Any, **constants: Any) -> None:
        begin = now()
        launches = self._launches
        before, count = launches.seconds, launches.count + 1
        self._act(*arguments, **constants)
        launches.count = count  # without launches in a graph
        launches.seconds = before + now() - begin


class Graphs(Engine):
    """A device that launches a captured sequence of kernels at once."""

    makes_graphs = True

    def __init__(self, launches: Launches, copy_s: float) -> None:
        self._launches, self._copy_s = launches, copy_s

    @contextlib.contextmanager
    def copying(self, after: Mark) -> Iterator[None]:
        yield
        time.sleep(self._copy_s)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        look_ups = self._launches.note(work)
        return Launch(self._launches, partial(run_all, look_ups))

    def capture_in_pieces(
        self, work: Callable[[Callable[[], None]], None]
    ) -> list[Callable[[], None]]:
        """Return graphs, of which the first computes the routers' choices of all layers."""
        note = partial(self._launches.note, partial(work, lambda: None))
        captured = note()

        def begin() -> None:
            note()
            captured[0]()

        pieces = [begin, *captured[1:], partial(run_all, ())]
        return [Launch(self._launches, piece) for piece in pieces]


def run_all(work: Iterable[Callable[[], None]]) -> None:
    for each in work:
        each()


def between(begin: tuple[float, float], end: tuple[float, float]) -> float:
    """Return the host's seconds between two moments: (seconds of stubs so far, time)."""
    return end[1] - begin[1] - (end[0] - begin[0])


class Clock:
    """Seconds of each layer's experts, or of its piece, by whether it missed any.

    deferred: those of steps before, that are served while the device computes
    behind:   those of layers behind the launch of the next one's piece
    rest:     those of a token outside of experts or pieces
    tokens:   those of whole tokens that are one graph
    pieces:   the number of tokens in pieces
    """

    def __init__(self, decoder: nn.Module, greenroom_: Greenroom, launches: Launches) -> None:
        self.seconds: dict[bool, list[float]] = defaultdict(list)
        self.pieces, self._since = 0, (0.0, 0.0)  # stubs and time at a layer's begin
        self.deferred, self.tokens, self.on = list[float](), list[float](), False
        self.rest, self._experts, self._is_graph = list[float](), 0.0, False
        self.to_copy, self._reported, self._misses = list[float](), 0.0, 0
        self.behind = list[float]()
        self._next: list[tuple[float, float]] = []  # before and behind the next piece's launch
        self._launch = 0.0  # of the present layer's piece, if it was launched in the layer before
        read_report, capture = TokenLaunches.read_report, ListedCopies.capture
        compute, replay = decoder.forward, GraphPass._replay
        driver, inner = greenroom_.driver, forward._forward
        settle, serve_layer, replay_pieces, launch_next = (
            driver.deferred.settle, PieceGraph._serve_layer, PieceGraph.replay,
            PieceGraph._launch_next,
        )  # fmt: skip

        def begin_layer() -> tuple[float, float]:
            return launches.seconds, now()

        def end_layer(begin: tuple[float, float]) -> None:
            last = end = launches.seconds, now()
            launch, self._launch = self._launch, 0.0
            if self._next:
                (last, launched), self._next = self._next, []
                self._launch, behind = between(last, launched), between(launched, end)
                self._experts += behind
                if self.on:
                    self.behind.append(behind)
            seconds = launch + between(begin, last)
            before, self._misses = self._misses, int(driver.miss_counts.sum())
            self._experts += seconds
            if self.on:
                self.seconds[self._misses > before].append(seconds)
            launches.seconds += now() - end[1]  # of this, which is nobody's work

        def timed_layer(graph: PieceGraph, *arguments: Any) -> None:
            serve_layer(graph, *arguments)
            end_layer(self._since)
            self._since = begin_layer()

        def timed_next(graph: PieceGraph) -> None:
            self._next.append(begin_layer())
            launch_next(graph)
            self._next.append(begin_layer())

        def timed_pieces(graph: PieceGraph, *arguments: Any) -> Any:
            self.pieces, self._since = self.pieces + self.on, begin_layer()
            return replay_pieces(graph, *arguments)

        def timed_settle() -> None:
            if not (waiting := len(driver.deferred._steps)):
                return
            begin = now()
            settle()
            seconds = now() - begin
            launches.seconds += seconds  # no part of the layer that waits for it
            if self.on:
                self.deferred += [seconds / waiting] * waiting

        driver.deferred.settle = timed_settle  # type: ignore[method-assign]

        def timed_report(launches: TokenLaunches) -> TokenReport:
            report = read_report(launches)
            self._reported = now()
            return report

        def captured(copies: ListedCopies) -> None:
            capture(copies)
            start = copies.start

            def timed_copies() -> None:
                if self.on:
                    self.to_copy.append(now() - self._reported)
                start()

            copies.start = timed_copies

        TokenLaunches.read_report = timed_report  # type: ignore[method-assign]
        ListedCopies.capture = captured  # type: ignore[method-assign]

        def timed(*arguments: Any) -> Any:
            if active_graph() is not None:  # in the place of a launch
                return inner(*arguments)
            begin = begin_layer()
            result = inner(*arguments)
            end_layer(begin)
            return result

        def noted(graph_pass: GraphPass, *arguments: Any) -> Any:
            result = replay(graph_pass, *arguments)
            self._is_graph = result is not None
            return result

        def timed_token(*arguments: Any, **keywords: Any) -> Any:
            self._is_graph, self._experts = False, 0.0
            stubs, begin = launches.seconds, now()
            result = compute(*arguments, **keywords)
            seconds = now() - begin - (launches.seconds - stubs)
            if self.on and self._is_graph:
                self.tokens.append(seconds)
            elif self.on:
                self.rest.append(seconds - self._experts)
            return result

        def remove() -> None:
            forward._forward, GraphPass._replay = inner, replay  # type: ignore[method-assign]
            TokenLaunches.read_report = read_report  # type: ignore[method-assign]
            ListedCopies.capture = capture  # type: ignore[method-assign]
            PieceGraph._serve_layer = serve_layer  # type: ignore[method-assign]
            PieceGraph.replay = replay_pieces  # type: ignore[method-assign]
            PieceGraph._launch_next = launch_next  # type: ignore[method-assign]
            vars(decoder).pop("forward", None)

        forward._forward, self.remove = timed, remove
        GraphPass._replay = noted  # type: ignore[method-assign]
        PieceGraph._serve_layer = timed_layer  # type: ignore[method-assign]
        PieceGraph.replay = timed_pieces  # type: ignore[method-assign]
        PieceGraph._launch_next = timed_next  # type: ignore[method-assign]
        decoder.forward = timed_token


def measure(folder: Path, cache: str, args: argparse.Namespace, launches: Launches) -> list[str]:
    tokens, placement = args.tokens, args.placement
    skeleton = ModelSkeleton.of(folder)
    layers = len(skeleton.catalog.layers)
    model: Any = skeleton.load()
    model.get_input_embeddings().weight.data *= 64  # tokens, not attention, decide the routing
    slots, experts = slots_for(cache, skeleton.catalog), skeleton.catalog.experts
    policy = "lru" if slots == experts else "next-use"  # as `load` chooses
    config = SchedulerConfig(co_compute="auto" if args.co_compute else "off")
    setup = ModelSetup(
        skeleton.catalog, slots, policy, cuda=True, kernels="triton",
        host_capacity=skeleton.catalog.experts, prefetch=args.prefetch, config=config,
        devices=(0,) if placement is None else (0, 1), placement=DevicePlacement(placement or ""),
    )  # fmt: skip
    model.greenroom = Greenroom(model, setup)
    if args.kernels and model.greenroom.bindings._graph is not None:
        model.greenroom.bindings._graph._refused = True
    clock, passes = Clock(model.base_model, model.greenroom, launches), Passes(model)
    profiler = cProfile.Profile(now)
    try:
        with torch.inference_mode():
            passes.prefill(8)
            passes.decode(tokens)  # most experts are in host memory then
            model.greenroom.reset_stats()
            launches.count, clock.on = 0, True
            if args.profile:
                profiler.enable()
            passes.decode(tokens)
            profiler.disable()
        hits, misses = clock.seconds[False], clock.seconds[True]
        rest, whole = ([each / layers for each in own] for own in (clock.rest, clock.tokens))
        ratio = model.greenroom.stats().hit_ratio
    finally:
        clock.remove()
        model.greenroom.detach()
    if args.profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)

    def middle(seconds: list[float]) -> str:
        return f"{statistics.median(seconds) * 1e6:.0f}" if seconds else "-"

    each = launches.count / max(1, len(hits) + len(misses) + len(whole) * layers)
    return [
        f"{setup.capacity}", f"{ratio:.1%}",
        *map(middle, (hits, clock.deferred, misses, clock.behind, clock.to_copy, rest, whole)),
        f"{each:.1f}", f"{len(hits)}", f"{len(misses)}", f"{len(whole)}", f"{clock.pieces}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", nargs="+", default=["50%", "90%", "100%"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=SHAPE.layers, help="of the model")
    parser.add_argument("--prefetch", default="off")
    parser.add_argument(
        "--placement", choices=("experts", "layers"), help="of experts on two GPUs (default: one)"
    )
    parser.add_argument(
        "--copy-us", type=float, default=200, help="how long a lane's copy takes (%(default)s)"
    )
    parser.add_argument("--kernels", action="store_true", help="no token is a graph")
    parser.add_argument("--co-compute", action="store_true", help="--co-compute auto")
    parser.add_argument("--profile", action="store_true", help="also profiles of as many tokens")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = replace(SHAPE, layers=args.layers)
    launches = Launches()
    launches.install()
    devices.engine_for = lambda setup, number: Graphs(launches, args.copy_us / 1e6)
    print(f"commit {commit()}; {machine()}\n")
    with tempfile.TemporaryDirectory() as scratch, small_model(Path(scratch), shape) as folder:
        rows = [measure(folder, cache, args, launches) for cache in args.cache]
    print(table(COLUMNS, rows))


if __name__ == "__main__":
    main()
