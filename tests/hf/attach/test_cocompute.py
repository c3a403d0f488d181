"""Misses computed by the host's processor beside a device: the fake one, and the CPU for a GPU."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import greenroom
from greenroom.config import LoadConfig
from greenroom.core.config.scheduler import SchedulerConfig
from greenroom.core.cost import Costs, Link, Work
from greenroom.core.events import HOST, Resized, Routed
from greenroom.core.options.rules.rates import Rates
from greenroom.core.transfers.tiers import HostTier
from greenroom.errors import UnknownName
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.load.report import startup_line
from greenroom.hf.memory import devices as places
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.policies import policy
from greenroom.runtime.cuda.co_compute import HostShare
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.driver.device_steps import DeviceSteps
from greenroom.runtime.kernels.cpu import CpuStep
from greenroom.runtime.kernels.eager import EagerStep
from greenroom.sim.clock import TraceStep
from tests.hf.memory.test_device import ids
from tests.models import cached_tiny, reference
from tests.recorded_graphs import RecordedGraphs
from tests.sim.small import simulate

CoCompute = pytest.importorskip("greenroom.core.options.rules.cocompute").CoCompute

OPTIONS = {"max_new_tokens": 6, "do_sample": False}
BOTH = SchedulerConfig(co_compute="auto")
QUICK, SLOW = 1e-6, 1e3  # seconds of an expert on the host, where it takes 1 ms to be moved


def rates(nbytes: int, host: float, devices: int = 1) -> Rates:
    """Sure of what it knows, so that what is decided does not depend on the time of day."""
    links = Link(nbytes / 1e-3), Link(nbytes / 1e-3)
    costs = Costs(links, Work.constant(0.0), Work.constant(0.0), host=Work.constant(host))
    return Rates(costs, nbytes, devices, learn=False)


@contextmanager
def both(name: str, host: float | None = None, **parts: Any) -> Iterator[Any]:
    """A tiny model in bfloat16 on the fake device, whose host computes too; with `host` seconds an
    expert, whatever it takes."""
    skeleton = ModelSkeleton.of(cached_tiny(name, dtype="bfloat16"))
    model: Any = skeleton.load()
    parts = {"fake": True, "capacity": 4, "host_capacity": 24, **parts}
    model.greenroom = made = Greenroom(model, ModelSetup(skeleton.catalog, config=BOTH, **parts))
    option = made.driver.scheduler.option(CoCompute)
    if host is not None and option is not None:
        devices = len(made.setup.devices)
        option.rates = rates(skeleton.catalog.slot_bytes, host, devices)
    try:
        yield model
    finally:
        model.greenroom.detach()


@pytest.mark.parametrize("kernels", ["eager", "native"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_the_bits_are_the_same_wherever_an_expert_is_computed(name, kernels):
    """On the fake device both have the same kernels."""
    answers = []
    for host, kept, devices in ((SLOW, 24, 1), (QUICK, 24, 1), (QUICK, 5, 1), (QUICK, 24, 2)):
        parts = {"kernels": kernels, "host_capacity": kept, "devices": tuple(range(devices))}
        with both(name, host, **parts) as model, torch.inference_mode():
            tokens = model.generate(ids(1, 7), **OPTIONS)
            answers.append((tokens, model(tokens).logits))
            found = model.greenroom.stats().co_compute
            assert (found["on_host"] > 0) is (host == QUICK)
            assert (found["host_s"] > 0) is (host == QUICK)
            stats = model.greenroom.stats()
            misses = stats.expert_requests - stats.expert_hits
            assert found["moved"] + found["on_host"] == misses
            assert found["on_host_share"] == found["on_host"] / misses
    for tokens, logits in answers[1:]:
        assert torch.equal(tokens, answers[0][0])
        assert torch.equal(logits, answers[0][1])
    if kernels == "eager":
        theirs = reference(cached_tiny(name, dtype="bfloat16")).generate(ids(1, 7), **OPTIONS)
        assert torch.equal(answers[0][0], theirs)


def test_what_is_measured_decides_where_nothing_is_said():
    with both("qwen3_moe") as model:
        rates = model.greenroom.driver.scheduler.option(CoCompute).rates
        nbytes = model.greenroom.setup.catalog.slot_bytes
        assert 0 < rates.processor(HOST, [1], nbytes) < 1
        assert 0 < rates.link(1, nbytes) < 1
        model.generate(ids(1, 7), **OPTIONS)
        assert rates.processor(0, [1], nbytes) > 0


@pytest.mark.parametrize(
    "kernels", ["eager", pytest.param("triton", marks=pytest.mark.interpreted)]
)
def test_outputs_of_the_host_join_those_of_a_gpu_s_kernels(kernels, monkeypatch):
    """The CPU in a GPU's place; Triton's interpreter rounds otherwise than the CPU's kernel."""
    if kernels == "triton":
        pytest.importorskip("triton")
    monkeypatch.setattr(places, "engine_for", lambda parts, number=0: Engine())
    parts = {"fake": False, "cuda": True, "kernels": kernels}
    for name in ("qwen3_moe", "gpt_oss"):
        with torch.inference_mode():
            theirs = reference(cached_tiny(name, dtype="bfloat16"))(ids(1, 3)).logits
        with both(name, QUICK, **parts) as model, torch.inference_mode():
            for _ in range(2):
                got = model(ids(1, 3)).logits
            assert model.greenroom.stats().co_compute["on_host"] > 0
        if kernels == "eager":
            assert torch.equal(got, theirs)
        else:
            assert (got.float() - theirs.float()).abs().max() < 0.1 * theirs.abs().max()


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_compiled_kernels_compute_a_token_s_experts_on_the_host(name, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(places, "engine_for", lambda parts, number=0: Engine())
    compute, computed = CpuStep.compute_from, list[int]()

    def counting(step: CpuStep, experts: Any, *more: Any) -> None:
        computed.append(len(experts))
        compute(step, experts, *more)

    monkeypatch.setattr(CpuStep, "compute_from", counting)
    theirs = reference(cached_tiny(name, dtype="bfloat16"))
    with (
        both(name, QUICK, fake=False, cuda=True, kernels="triton") as model,
        torch.inference_mode(),
    ):
        model.greenroom.bindings._graph._refused = True
        caches = [each(ids(1, 5), use_cache=True).past_key_values for each in (model, theirs)]
        computed.clear()
        for token in ids(4, 1):
            got, expected = (
                each(token[None], past_key_values=cache, use_cache=True).logits.float()
                for each, cache in zip((model, theirs), caches, strict=True)
            )
            assert (got - expected).abs().max() < 0.1 * expected.abs().max()
    assert sum(computed) > 0


@pytest.mark.timeout(300)
@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_the_host_takes_misses_of_tokens_in_pieces(name, monkeypatch):
    """All of them, some of them or none: the bits are the same where both have one kernel.

    The device's thread computes them, or that of the host, as the scheduler's events say.
    """
    pytest.importorskip("triton")
    from greenroom.runtime.cuda.piece_graph import PieceGraph
    from greenroom.runtime.kernels.triton.kernel import Launch, TritonStep
    from greenroom.runtime.kernels.triton.triton_kernel import TritonKernel

    start, lock = Launch.start, threading.Lock()

    def one_at_a_time(launch: Launch, *first: Any) -> None:
        with lock:  # the interpreter has one grid for all threads
            start(launch, *first)

    monkeypatch.setattr(Launch, "start", one_at_a_time)
    monkeypatch.setattr(TritonStep, "host_kernel", lambda step, layer: TritonKernel())
    engine = RecordedGraphs(monkeypatch)
    monkeypatch.setattr(places, "engine_for", lambda parts, number=0: engine)
    served, answers, replay = list[int](), list[Any](), PieceGraph.replay

    def counting(self: PieceGraph, decode: Any) -> Any:
        served.append(len(on_host))
        return replay(self, decode)

    monkeypatch.setattr(PieceGraph, "replay", counting)
    load, at_once = DeviceSteps.load, list[bool]()

    def loading(self: DeviceSteps, *arguments: Any) -> bool:
        at_once.append(not events and load(self, *arguments))
        return at_once[-1]

    monkeypatch.setattr(DeviceSteps, "load", loading)
    ways = [(SLOW, False), (0.9e-3, False), (QUICK, False)]
    if name == "qwen3_moe":  # the interpreter is slow
        ways.append((0.9e-3, True))
    for host, events in ways:
        at_once.clear()
        with (
            both(name, host, fake=False, cuda=True, kernels="triton") as model,
            torch.inference_mode(),
        ):
            out = model(ids(1, 5), use_cache=True)
            model.greenroom.reset_stats()
            logits, on_host = [], [0]
            for token in ids(4, 1):
                out = model(token[None], past_key_values=out.past_key_values, use_cache=True)
                logits.append(out.logits.float())
                on_host.append(model.greenroom.stats().co_compute["on_host"])
            first = served[0]  # is compared, so its bits must be equal
            assert served == [*range(first, 5)]
            assert on_host[first] == on_host[first - 1]
            assert (on_host[first] < on_host[-1]) == (host != SLOW)
            served.clear()
            answers.append(torch.cat(logits))
            assert any(at_once) != events
            assert not model.greenroom.bindings._graph._refused
    assert all(torch.equal(other, answers[0]) for other in answers[1:])


def test_counts_are_those_of_the_simulator():
    """The same scheduler, told the same speeds, leaves the same misses to the host."""
    steps: list[TraceStep] = []
    with both("qwen3_moe", 0.9e-3, kernels="eager") as model:
        driver = model.greenroom.driver
        tell, nbytes = driver._handle, model.greenroom.setup.catalog.slot_bytes
        # Promotions depend on times.
        driver.scheduler.on(Resized(driver.scheduler.capacity, ahead=0))

        def recorded(event):
            if isinstance(event, Routed):
                steps.append(
                    TraceStep(
                        event.step, event.layer, event.experts.copy(), event.rows,
                        prefill=event.prefill,
                    )
                )  # fmt: skip
            tell(event)

        driver._handle = recorded
        model.generate(ids(1, 7), max_new_tokens=12, do_sample=False)
        counts, pieces = replace(driver.scheduler.counts), driver.scheduler.pieces
        tier = model.greenroom._host_tier.requests, model.greenroom._host_tier.hits
        lanes = driver.scheduler.transfers.queue.lanes
    known = [CoCompute(rates(nbytes, 0.9e-3))]
    links = tuple(Link(nbytes / 1e-3, lanes=n) for n in lanes)
    costs = Costs(links, Work.constant(0.0), Work.constant(0.0), host=Work.constant(0.9e-3))
    for _ in range(2):  # whatever the simulated clock shows
        kept = HostTier(pieces, 24, policy("lru"))
        result = simulate(steps, pieces, 4, policy("lru"), costs=costs, host=kept, options=known)
        assert (counts.requests, counts.misses) == (result.requests, result.misses)
        assert (counts.on_host, tier) == (result.on_host, (kept.requests, kept.hits))
        costs = replace(costs, dense=Work.constant(0.7))
    assert 0 < counts.on_host < counts.misses


def test_an_error_on_the_host_ends_that_answer_alone(monkeypatch):
    with both("qwen3_moe", QUICK, kernels="eager") as model:
        wanted = model.generate(ids(1, 4), **OPTIONS)
        compute, failures = HostShare.compute, [ValueError("no such instruction")]

        def failing(*args):
            if failures:
                raise failures.pop()
            return compute(*args)

        monkeypatch.setattr(HostShare, "compute", failing)
        with pytest.raises(ValueError, match="no such instruction"):
            model.generate(ids(1, 4), **OPTIONS)
        assert torch.equal(model.generate(ids(1, 4), **OPTIONS), wanted)
        with model.greenroom.driver.lock:  # a promotion may still be on its way
            on_the_way = model.greenroom.driver.scheduler.transfers.entries
            assert model.greenroom._host_tier.leases <= on_the_way.keys()


def test_an_error_on_the_device_waits_for_the_host(monkeypatch):
    with both("qwen3_moe", 0.9e-3, kernels="eager") as model:
        wanted = model.generate(ids(1, 4), **OPTIONS)
        compute_group, failures = EagerStep.compute_group, [ValueError("no such instruction")]

        def failing(step, experts, slots):
            if failures:
                raise failures.pop()
            compute_group(step, experts, slots)

        monkeypatch.setattr(EagerStep, "compute_group", failing)
        with pytest.raises(ValueError, match="no such instruction"):
            model.generate(ids(1, 4), **OPTIONS)
        assert torch.equal(model.generate(ids(1, 4), **OPTIONS), wanted)


def test_a_timeline_shows_what_the_host_computes():
    with both("qwen3_moe", QUICK, kernels="eager") as model:
        model.greenroom.timeline()
        model.generate(ids(1, 4), **OPTIONS)
        assert any(
            event[1] == "compute on the host" for event in model.greenroom.timeline(False)._events
        )


def test_loaded_by_name():
    folder = str(cached_tiny("qwen3_moe", dtype="bfloat16", tokenizer=True))
    options = {"cache": "25%", "device": "fake", "host_memory": "4GiB", "prefetch": "off"}
    found = []
    for co_compute in ("off", "auto"):
        model, _ = greenroom.load(folder, co_compute=co_compute, **options)
        try:
            found.append(model.generate(ids(1, 5), **OPTIONS))
            line = startup_line(
                "tiny", model, LoadConfig(co_compute=co_compute, **options), verbose=True
            )
            both = co_compute == "auto"
            assert ("experts in host memory, computed there where that is sooner, " in line) is both
            assert ("--co-compute auto" in line) is both
            assert (model.greenroom.stats().co_compute is None) is (co_compute == "off")
        finally:
            model.greenroom.detach()
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"fake": False, "host_capacity": 0}, "the CPU computes everything"),
        ({"host_capacity": 0}, "no room for experts"),
    ],
)
def test_where_there_is_nothing_to_choose_that_is_said(parts, why, caplog):
    with caplog.at_level(logging.WARNING), both("qwen3_moe", **parts) as model:
        assert f"--co-compute auto has no effect: {why}" in caplog.text or why in caplog.text
        assert caplog.text.count("--co-compute") == 1
        assert model.greenroom.stats().co_compute is None


def test_names():
    assert LoadConfig().co_compute == "off"
    with pytest.raises(UnknownName, match="unknown co_compute 'on'"):
        LoadConfig(co_compute="on")
