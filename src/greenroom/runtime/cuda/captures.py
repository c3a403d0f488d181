"""Captures of launched work as CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from greenroom.errors import DeviceError
from greenroom.interrupts import hold_interrupts

log = logging.getLogger(__name__)

# Torch has 32 streams of each priority on a device and gives them out in turn. Copies have streams
# of priority 0; so what other threads copy meanwhile never becomes part of a graph.
_PRIORITY = -1
MOST_FAILURES = 3  # graphs that cannot be captured, until no further one is tried
capture_lock = threading.Lock()  # torch admits one capture in a process
_failed_graphs: list[Any] = []
# Streams of engines that are gone, by device. Torch before 2.13 keeps memory for cuBLAS for each
# stream on which a product was captured, so an engine takes one of these before a new one.
_unused_streams: defaultdict[int | None, list[Any]] = defaultdict(list)


class GraphCaptures:
    """Captures of one GPU's work as graphs, with a stream of their own."""

    device: torch.device
    _capture_stream: Any = None
    _first_graph: Any = None  # kept, because all graphs share its memory for temporary tensors
    _failures = 0  # graphs that could not be captured

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return a function that launches the same work again as one graph, else `work`."""
        # Graphs run one after another, so one pool does; of 2 MiB, which is not in the budget.
        first = self._first_graph
        graphs = self._capture(lambda cut: work(), None if first is None else first.pool())
        if graphs is None:
            self._first_graph = None  # its pool is not used again
            return work
        self._first_graph = first or graphs[0]
        replay: Callable[[], None] = graphs[0].replay
        return replay

    def capture_in_pieces(
        self, work: Callable[[Callable[[], None]], None]
    ) -> list[Callable[[], None]] | None:
        """Return functions that launch the same work again in pieces, each as one graph."""
        # A pool of their own: what one piece leaves for the next outlives other graphs between.
        graphs = self._capture(work, torch.cuda.graph_pool_handle())
        return None if graphs is None else [graph.replay for graph in graphs]

    def drop_graphs(self) -> None:
        self._first_graph = None

    def _capture(self, work: Callable[[Callable[[], None]], None], pool: Any) -> list[Any] | None:
        """Capture graphs whose temporary tensors are in a pool; `work` gets a function that cuts.

        The result is None if they cannot be captured.
        """
        if self._failures == MOST_FAILURES:
            return None
        graphs, underway = list[Any](), list[Any]()

        def begin() -> None:
            graph = torch.cuda.CUDAGraph()
            # Torch 2.9 and 2.10 allocate tensors here to which passes of any inference mode write.
            with _hold_failed_graph(graph), torch.inference_mode(False), self._own_random_state():
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                underway.append(graph)

        def end() -> None:
            if underway:  # none if a capture has failed to begin
                with _hold_failed_graph(graph := underway.pop()):
                    graph.capture_end()
                graphs.append(graph)

        def cut() -> None:
            end()
            begin()

        try:
            with hold_interrupts(), self._capturing():  # or a capture might never end
                try:
                    begin()
                    work(cut)
                finally:
                    end()
        except (RuntimeError, DeviceError) as error:  # experts' kernels raise the second one
            self._failures += 1
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            log.warning("--device cuda: work is launched kernel by kernel: %s", first_line)
            return None
        except BaseException:
            graphs.clear()  # its traceback may hold them for long
            raise
        return graphs

    @contextlib.contextmanager
    def _own_random_state(self) -> Iterator[None]:
        """Return a context where torch's generator has a state of its own, for one capture.

        Torch before 2.13 marks the state as captured and then refuses random numbers to other
        threads, here only while the capture begins; if CUDA ends the capture by itself, the mark
        stays. No graph here has any.
        """
        generator = torch.cuda.default_generators[self.device.index]
        state = generator.graphsafe_get_state()
        generator.graphsafe_set_state(generator.clone_state())
        try:
            yield
        finally:
            generator.graphsafe_set_state(state)

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[None]:
        """Return a context on the stream of captures, alone in the process.

        Unlike `torch.cuda.graph`, it neither waits for the device nor collects garbage. Python's
        collector pauses: what it finalises, such as another model, waits for the device and frees
        memory, which CUDA refuses a thread that captures.
        """
        current = torch.cuda.current_stream(self.device)
        with capture_lock:
            if self._capture_stream in (None, current):  # where no other thread launches work
                self._capture_stream = self._other_stream(current)
            enabled = gc.isenabled()
            try:
                gc.disable()
                with torch.cuda.stream(self._capture_stream):
                    yield
            finally:
                if enabled:
                    gc.enable()

    def _other_stream(self, current: Any) -> Any:
        """Return a stream for captures, other than the current one, which has no other owner.

        The caller holds `capture_lock`.
        """
        unused = _unused_streams[self.device.index]
        stream = next((each for each in unused if each != current), None)
        if stream is None:
            stream = torch.cuda.Stream(self.device, priority=_PRIORITY)
        else:
            unused.remove(stream)
        weakref.finalize(self, unused.append, stream).atexit = False
        return stream


@contextlib.contextmanager
def _hold_failed_graph(graph: Any) -> Iterator[None]:
    """Keep a graph whose capture fails to begin or to end.

    Torch may take the graph and its pool for ones in use.
    """
    try:
        yield
    except RuntimeError:
        _failed_graphs.append(graph)
        raise
