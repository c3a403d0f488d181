"""Captures of graphs: streams, pools of memory, failures, Ctrl-C; runs without a GPU."""

from __future__ import annotations

import gc
import logging
import signal
import sys
from typing import Any

import pytest
import torch

from greenroom.errors import DeviceError
from greenroom.runtime.cuda import captures
from tests.runtime.cuda.torch_cuda import CURRENT, Graph, PoolStream, new_engine


@pytest.mark.parametrize("priority", [0, -1])
def test_a_graph_is_captured_where_no_other_thread_launches_work(gpu, streams, priority):
    copies = [PoolStream() for _ in range(32)]  # of any engine in the process
    CURRENT[:] = [PoolStream(priority=priority)]
    for _ in range(100):
        gpu.capture(lambda: None)
    assert len(Graph.captured) == 100
    assert not any(each in copies or each == CURRENT[0] for each in Graph.captured)


def test_an_engine_captures_on_the_stream_of_one_that_is_gone(streams):
    """Torch before 2.13 keeps memory for cuBLAS for each stream: 32 MiB a load."""
    first, second = new_engine(), new_engine()
    for each in (first, second, first):
        each.capture(lambda: None)
    one, other, again = Graph.captured
    assert one == again != other  # two engines' graphs may run at a time
    del first, each
    gc.collect()
    third = new_engine()
    third.capture(lambda: None)
    assert Graph.captured[-1] == one
    CURRENT[:] = [one]  # which a user cannot make current, but another library may
    third.capture(lambda: None)
    assert Graph.captured[-1] not in (one, other)


def test_two_engines_choose_streams_one_after_the_other(gpu, streams, monkeypatch):
    """Both would take the same one."""
    choose = captures.GraphCaptures._other_stream

    def choosing(*arguments: Any) -> Any:
        assert captures.capture_lock.locked()
        return choose(*arguments)

    monkeypatch.setattr(captures.GraphCaptures, "_other_stream", choosing)
    assert gpu.capture(print) != print


def test_no_pool_stays_when_graphs_are_dropped(gpu, streams):
    gpu.capture(lambda: None)
    gpu.drop_graphs()
    gpu.capture(lambda: None)
    assert Graph.pools == [None, None]
    assert gpu._first_graph is not None


def test_all_graphs_share_the_memory_of_the_first_which_is_kept(gpu, streams):
    """A pool for each takes 2 MiB; torch refuses the pool of graphs that are gone."""
    for _ in range(3):
        gpu.capture(lambda: None)
    first = Graph.pools[1]
    assert Graph.pools == [None, first, first]
    assert gpu._first_graph is first
    assert all(each == Graph.captured[0] for each in Graph.captured)  # as sharing needs


def test_a_capture_begins_outside_of_inference_mode(gpu, streams):
    """Torch's generator of random numbers gets tensors then, to which later graphs write."""
    modes = list[bool]()
    with torch.inference_mode():
        gpu.capture(lambda: modes.append(torch.is_inference_mode_enabled()))
    assert modes == [True]
    assert len(Graph.captured) == 1


def test_random_numbers_may_be_drawn_during_a_capture_and_after_one_that_failed(
    gpu, streams, monkeypatch
):
    """Torch before 2.13 refuses those of the generator's state that is captured."""
    generator = torch.cuda.default_generators[1]
    state = generator.state
    assert gpu.capture(generator.draw) != generator.draw  # no error, so this is a graph
    begin = Graph.capture_begin

    def refuse(*_: Any) -> None:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def begin_and_refuse(graph: Graph, **options: Any) -> None:
        begin(graph, **options)
        refuse()

    for name, failing in (("capture_end", refuse), ("capture_begin", begin_and_refuse)):
        with monkeypatch.context() as patch:
            patch.setattr(Graph, name, failing)
            assert gpu.capture(print) == print
        generator.draw()
    assert generator.state is state  # the user's, with its seed


def test_graphs_that_fail_spoil_no_later_ones_until_there_are_several(gpu, streams, caplog):
    def refuse() -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    with caplog.at_level(logging.WARNING):
        works = [gpu.capture(each) for each in (print, refuse, print, print)]
    assert works[1] == refuse
    assert print not in works
    (record,) = caplog.records
    assert "kernel by kernel: CUDA error: operation not permitted" in record.message
    first, failed_with, new, shared = Graph.pools
    assert (first, new) == (None, None)  # torch takes the pool of a failed graph for one in use
    assert shared is not failed_with
    works = [gpu.capture(refuse) for _ in range(2 * captures.MOST_FAILURES)]
    assert len(caplog.records) == captures.MOST_FAILURES
    assert gpu.capture(print) == print


def test_pieces_are_graphs_with_memory_of_their_own(gpu, streams, monkeypatch):
    """What one piece leaves for the next outlives other graphs that run between them."""
    handles = iter(range(9))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    gpu.capture(lambda: None)
    ran: list[int] = []

    def work(cut: Any) -> None:
        for n in range(3):
            ran.append(n)
            cut()

    pieces = gpu.capture_in_pieces(work)
    assert len(pieces) == 4
    assert ran == [0, 1, 2]
    gpu.capture(lambda: None)
    shared = gpu._first_graph
    assert Graph.pools == [None, 0, 0, 0, 0, shared]
    assert all(each == Graph.captured[0] for each in Graph.captured)
    assert len({id(piece.__self__) for piece in pieces}) == 4
    assert len(gpu.capture_in_pieces(lambda cut: None)) == 1
    assert Graph.pools[-1] == 1


def test_pieces_that_fail_are_none(gpu, streams, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    ended = []
    monkeypatch.setattr(Graph, "capture_end", lambda graph: ended.append(graph))

    def work(cut: Any) -> None:
        cut()
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    with caplog.at_level(logging.WARNING):
        assert gpu.capture_in_pieces(work) is None
    assert len({*map(id, ended)}) == len(ended) == 2
    assert "kernel by kernel: CUDA error: operation not permitted" in caplog.text
    with pytest.raises(KeyboardInterrupt):
        gpu.capture_in_pieces(lambda cut: (_ for _ in ()).throw(KeyboardInterrupt))
    for _ in range(2 * captures.MOST_FAILURES):
        gpu.capture_in_pieces(work)
    assert len(caplog.records) == captures.MOST_FAILURES


@pytest.mark.parametrize("error", [DeviceError, torch.OutOfMemoryError])
def test_a_graph_that_has_no_memory_is_no_error_and_keeps_none(gpu, streams, monkeypatch, error):
    """Errors of experts' kernels are DeviceErrors within a pass, also where memory is short."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    failed = len(captures._failed_graphs)

    def work(cut: Any = lambda: None) -> None:
        cut()
        raise error("the GPU is out of memory")

    assert gpu.capture(work) == work
    assert gpu.capture_in_pieces(work) is None
    assert len(captures._failed_graphs) == failed  # their captures have ended


def test_a_capture_that_does_not_end_is_kept(gpu, streams, monkeypatch):
    """Torch may take its memory for memory in use."""

    def refuse(graph: Graph, *_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    for name in ("capture_end", "capture_begin"):
        with monkeypatch.context() as patch:
            patch.setattr(Graph, name, refuse)
            failed = len(captures._failed_graphs)
            assert gpu.capture(print) == print
            assert len(captures._failed_graphs) == failed + 1


def test_an_interrupt_between_two_pieces_is_not_taken_for_a_failure(gpu, streams, monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    underway, begin, end = set[int](), Graph.capture_begin, Graph.capture_end

    def begun(graph: Graph, **options: Any) -> None:
        if underway_once:
            raise KeyboardInterrupt
        underway_once.append(1)
        underway.add(id(graph))
        begin(graph, **options)

    def ended(graph: Graph) -> None:
        if id(graph) not in underway:
            raise RuntimeError("Invalid capture.")
        underway.remove(id(graph))
        end(graph)

    underway_once = list[int]()
    monkeypatch.setattr(Graph, "capture_begin", begun)
    monkeypatch.setattr(Graph, "capture_end", ended)
    with pytest.raises(KeyboardInterrupt) as raised:
        gpu.capture_in_pieces(lambda cut: cut())
    assert not underway
    assert gpu._failures == 0
    frames = [each.frame.f_locals.get("graphs") for each in raised.traceback]
    assert [] in frames  # the traceback keeps no piece
    assert not any(frames)


@pytest.mark.parametrize("at", ["capture_begin", "capture_end", "end"])
def test_a_capture_that_an_interrupt_meets_is_ended(at, gpu, streams, monkeypatch, ctrl_c):
    """Else its thread would capture for good. Python raises behind the call that is under way."""
    underway, begin, end = set[int](), Graph.capture_begin, Graph.capture_end

    def begun(graph: Graph, **options: Any) -> None:
        begin(graph, **options)
        underway.add(id(graph))
        if at == "capture_begin":
            signal.raise_signal(signal.SIGINT)

    def ended(graph: Graph) -> None:
        if at == "capture_end":
            signal.raise_signal(signal.SIGINT)
        underway.remove(id(graph))
        end(graph)

    monkeypatch.setattr(Graph, "capture_begin", begun)
    monkeypatch.setattr(Graph, "capture_end", ended)

    def behind_the_work(frame: Any, event: str, argument: Any) -> None:
        if at == frame.f_code.co_name == "end" and event == "call":
            signal.raise_signal(signal.SIGINT)

    sys.settrace(behind_the_work)
    try:
        with pytest.raises(KeyboardInterrupt):
            gpu.capture(lambda: None)
    finally:
        sys.settrace(None)
    assert not underway
    assert gpu._failures == 0


def test_python_collects_no_garbage_within_a_capture(gpu, streams):
    """What it finalises may free memory or wait for the device, which CUDA refuses then."""
    collects, gone = list[bool](), list[int]()

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            gone.append(1)

    def work() -> None:
        collects.append(gc.isenabled())
        gone.clear()  # cycles of earlier captures, which may end between two captures
        Cycle()
        assert len([[] for _ in range(100_000)]) > sum(gc.get_threshold())
        assert not gone

    gpu.capture(work)
    assert collects == [False]
    assert gc.isenabled()
    with pytest.raises(KeyboardInterrupt):
        gpu.capture(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert gc.isenabled()
    gc.disable()
    try:
        gpu.capture(work)
        assert not gc.isenabled()
    finally:
        gc.enable()
