"""Approximated misses: what a run computes is what its decisions say, and no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import greenroom
from greenroom.config import LoadConfig
from greenroom.core.config.base import Approximation
from greenroom.core.events import ComputeGroup, Routed
from greenroom.core.pieces import Copies
from greenroom.core.plan import EXACT, LOW, SKIP
from greenroom.errors import BudgetError, UsageError
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.checkpoint.pack.catalog import CopiesCatalog
from greenroom.hf.load.load import load_with
from greenroom.hf.load.report import startup_line
from greenroom.hf.memory.approximate import copies_of
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.policies import policy
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.encodings import ENCODINGS
from greenroom.sim.clock import TraceStep
from tests.hf.check.test_parity import ids
from tests.hf.checkpoint.pack.test_copies import KINDS, whole_of, with_copies
from tests.hf.conftest import one_line
from tests.hf.pack.rig import source
from tests.sim.small import simulate
from tests.thresholds import config_of

precision = pytest.importorskip("greenroom.core.options.rules.precision").precision

pytestmark = pytest.mark.usefixtures("no_threads_left")
OPTIONS: dict[str, Any] = {
    "max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True,
}  # fmt: skip


def attached(folder, at: Approximation, secondary_slots: int = 5, capacity: int = 7, **parts: Any):
    """A model whose misses are served by these thresholds, and a list of its decisions."""
    skeleton = ModelSkeleton.of(folder)
    copies = None
    if at.low:
        assert isinstance(skeleton.catalog, CopiesCatalog)
        copies = Copies(*skeleton.catalog.copy_bytes(), secondary_slots)
    model: Any = skeleton.load()
    model.greenroom = Greenroom(
        model, ModelSetup(skeleton.catalog, capacity, config=config_of(at), copies=copies, **parts)
    )
    return model


def observe_decisions(model: Any) -> tuple[list[dict[int, tuple[int, int]]], list[TraceStep]]:
    """Record each step's decisions (expert -> part, source of weights) and its requests."""
    driver = model.greenroom.driver
    scheduler, handle, decisions, requests = driver.scheduler, driver._handle, [], []
    next_order = driver._next_action

    def record_event(event):
        if isinstance(event, Routed):
            decisions.append({})
            requests.append(
                TraceStep(
                    event.step, event.layer, event.experts.copy(), prefill=event.prefill,
                    tail_weights=event.tail_weights, weights=event.weights, rows=event.rows,
                )
            )  # fmt: skip
        handle(event)

    def ordered():
        order = next_order()
        if isinstance(order, ComputeGroup):
            in_slot = {scheduler.placement.slot(e): e for e in scheduler.step.substitutes}
            for e, slot in zip(order.experts.tolist(), order.slots.tolist(), strict=True):
                whose = in_slot.get(slot, e) if order.part == EXACT else e
                decisions[-1][e] = order.part, whose
        return order

    driver._handle, driver._next_action = record_event, ordered
    return decisions, requests


def expanded_copies(folder) -> list[dict[str, torch.Tensor]]:
    """The copies' matrices of each layer, expanded without slots and kernels."""
    catalog = ModelSkeleton.of(folder).catalog
    matrices = []
    for layer, begin in enumerate(catalog.offsets[:-1]):
        layout = catalog.layers_with_copies[layer].low_copy.layout
        each: dict[str, list[torch.Tensor]] = {}
        for expert in range(begin, catalog.offsets[layer + 1]):
            (extent,) = catalog.extents(catalog.experts + expert)
            with open(catalog.files[0], "rb") as file:
                file.seek(extent.offset)
                raw = torch.frombuffer(bytearray(file.read(extent.length)), dtype=torch.uint8)
            for spec in [s for s in layout.tensors if "." not in s.name]:
                weight = layout.weight(spec.name)
                parts = [
                    raw[p.offset : p.offset + p.nbytes].view(getattr(torch, p.dtype)).view(p.shape)
                    for p in weight.parts
                ]
                w = ENCODINGS[weight.encoding].decode(parts, weight.shape, torch.bfloat16)
                each.setdefault(spec.name, []).append(w)
        matrices.append({name: torch.stack(ws) for name, ws in each.items()})
    return matrices


def replayed(folder, decisions, prompt, at: Approximation) -> Any:
    """transformers' own eager, with each step's weights as they were decided."""
    original, offsets = whole_of(folder), ModelSkeleton.of(folder).catalog.offsets
    lows = expanded_copies(folder) if at.low else []
    steps = iter(decisions)
    for number, name in enumerate(ModelSkeleton.of(folder).catalog.layers):
        module = original.get_submodule(name)
        exact = {n: p.data.clone() for n, p in module.named_parameters()}

        def forward(*args, module=module, number=number, exact=exact, call=module.forward, **kw):
            for e, (part, whose) in next(steps).items():
                for key, parameter in module.named_parameters():
                    mine, other = e - offsets[number], whose - offsets[number]
                    if part == LOW:
                        parameter.data[mine] = lows[number][key][mine]
                    elif part == SKIP:
                        parameter.data[mine] = 0
                    else:
                        parameter.data[mine] = exact[key][other]
            return call(*args, **kw)

        module.forward = forward
    return original.generate(prompt, **OPTIONS)


CASES = [
    (("int8", "int4"), Approximation(low=0.9)),
    (("same", "int4"), Approximation(low=0.9, skip=0.3)),
    (("same", "int8"), Approximation(low=0.5, substitute=0.4)),
    (("fp8", "int4"), Approximation(low=0.9)),
    (("int8", "int4"), Approximation(low=0.9, promote=True)),
    (("same", "int4"), Approximation(low=0.9, promote=True)),
]


@pytest.mark.parametrize(
    ("of", "at", "fake"), [(*case, i % 2 == 0) for i, case in enumerate(CASES)], ids=str
)
def test_a_run_computes_the_decided_weights(of, at, fake):
    folder, prompt = with_copies(*of), ids(1, 5)
    model = attached(folder, at, kernels="eager", fake=fake)
    try:
        decisions, _ = observe_decisions(model)
        mine = model.generate(prompt, **OPTIONS)
        stats = model.greenroom.stats().approximated
    finally:
        model.greenroom.detach()
    parts = [part for step in decisions for part, _ in step.values()]
    assert parts.count(LOW) == stats["low"] > 0
    assert parts.count(SKIP) == stats["skipped"]
    assert bool(stats["skipped"]) == bool(at.skip)
    others = sum(
        e != whose for step in decisions for e, (part, whose) in step.items() if part == EXACT
    )
    assert others == stats["substituted"]
    theirs = replayed(folder, decisions, prompt, at)
    assert torch.equal(mine.sequences, theirs.sequences)
    assert all(map(torch.equal, mine.logits, theirs.logits))


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("host_capacity", [3, 24])
@pytest.mark.parametrize(
    ("of", "at"),
    [
        (("same", "int4"), Approximation(low=0.9, skip=0.3)),
        (("same", "int8"), Approximation(low=0.5, substitute=0.4)),
        (("fp8", "int4"), Approximation(low=0.9, promote=True)),
        (("same", "int4"), Approximation(skip=0.3, substitute=0.9)),
    ],
    ids=str,
)
def test_copies_pass_through_host_memory(of, at, host_capacity, cuda, monkeypatch):
    """What the fake device, and the CPU in a GPU's place, compute is what was decided."""
    monkeypatch.setattr("greenroom.hf.memory.devices.engine_for", lambda setup, n: Engine())
    folder, prompt = source() if of is None else with_copies(*of), ids(1, 5)
    device = {"cuda": True} if cuda else {"fake": True}
    model = attached(folder, at, kernels="eager", host_capacity=host_capacity, **device)
    try:
        decisions, _ = observe_decisions(model)
        mine = model.generate(prompt, **OPTIONS)
        stats, scheduler = model.greenroom.stats(), model.greenroom.driver.scheduler
    finally:
        model.greenroom.detach()
    parts = [part for step in decisions for part, _ in step.values()]
    assert parts.count(LOW) == stats.approximated["low"]
    assert (parts.count(LOW) > 0) == bool(at.low)
    assert parts.count(SKIP) == stats.approximated["skipped"]
    assert stats.host["requests"] > 0
    assert scheduler.transfers.host.leases <= scheduler.transfers.entries.keys()
    disk, bus = (link["bytes"] for link in stats.links)
    assert disk <= bus
    theirs = replayed(folder, decisions, prompt, at)
    assert torch.equal(mine.sequences, theirs.sequences)
    assert all(map(torch.equal, mine.logits, theirs.logits))


def test_skipping_and_substituting_need_no_copies():
    """A plain checkpoint, whatever it is stored in."""
    at = Approximation(skip=0.3, substitute=0.9)
    model = attached(source(), at, kernels="eager")
    try:
        decisions, _ = observe_decisions(model)
        model.generate(ids(1, 5), **OPTIONS)
        stats = model.greenroom.stats().approximated
    finally:
        model.greenroom.detach()
    assert stats["skipped"] > 0
    assert stats["substituted"] > 0
    assert stats["low"] == 0
    shares = stats["skipped_share"] + stats["substituted_share"]
    assert stats["inexact_share"] == pytest.approx(shares)
    assert len(decisions) > 0


@pytest.mark.parametrize(("of", "at"), [*CASES[:2], (None, Approximation(skip=0.9))], ids=str)
def test_compiled_kernels_are_close_to_eager(of, at):
    """All kernels make the same decisions, in one step from an empty cache.

    The last model has biases, which do not count for an expert that is skipped.
    """
    folder = source("gpt_oss") if of is None else with_copies(*of)
    prompt, logits = ids(1, 1), []
    for kernels in ("eager", "native", "rounded"):
        model = attached(folder, at, kernels=kernels)
        try:
            with torch.inference_mode():
                decisions, _ = observe_decisions(model)
                logits.append(model(input_ids=prompt).logits.float())
        finally:
            model.greenroom.detach()
        assert {part for step in decisions for part, _ in step.values()} > {EXACT}
    for other in logits[1:]:
        assert (other - logits[0]).abs().max() < 0.05 * logits[0].abs().max()


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(("of", "at"), CASES[:3], ids=str)
def test_counts_equal_those_of_the_simulator(of, at, devices):
    parts = {"fake": True, "devices": (0, 1)} if devices > 1 else {}
    model = attached(
        with_copies(*of), at, secondary_slots=16, capacity=15, readers=1, policy="lru", **parts
    )
    try:
        _, requests = observe_decisions(model)
        model.generate(ids(1, 5), max_new_tokens=16, do_sample=False)
        scheduler = model.greenroom.driver.scheduler
        mine, pieces = scheduler.counts, scheduler.pieces
    finally:
        model.greenroom.detach()
    theirs = simulate(requests, pieces, 15, policy("lru"), options=[precision(at, pieces)]).counts
    assert mine == theirs
    assert mine.low > 0
    assert (mine.joined > 0) <= (of == ("int8", "int4"))


def test_only_the_bytes_that_a_copy_lacks_are_read():
    folder, at = with_copies("int8", "int4"), Approximation(low=0.9)
    model = attached(folder, at, secondary_slots=16, capacity=15)
    try:
        exact, low, remainder = ModelSkeleton.of(folder).catalog.copy_bytes()
        before = model.greenroom.stats().bytes_read
        model.generate(ids(1, 5), max_new_tokens=24, do_sample=False)
        c, bytes_read = model.greenroom.driver.scheduler.counts, model.greenroom.stats().bytes_read
        approximated = c.low + c.joined
        assert c.joined > 0
        expected = (c.misses - approximated) * exact[0] + c.joined * remainder[0]
        assert bytes_read - before == expected + (c.low - c.low_hits) * low[0]
    finally:
        model.greenroom.detach()


def test_several_sequences_get_the_highest_precision_that_one_needs():
    """A pass over several sequences: an expert's largest tail weight decides."""
    folder = with_copies("same", "int4")
    model = attached(folder, Approximation(low=0.9))
    try:
        _, requests = observe_decisions(model)
        model.generate(ids(3, 4), max_new_tokens=4, do_sample=False, pad_token_id=0)
        for step in requests:
            if not step.prefill:
                assert step.tail_weights.max() == 1.0
                assert step.rows.sum() == 3 * 2
    finally:
        model.greenroom.detach()


@pytest.mark.parametrize("of", KINDS[:2], ids=str)
def test_a_loaded_model_reports_its_approximation(of):
    config = LoadConfig(cache="30%", miss_precision="int4", low_below=0.8, skip_below=0.1)
    model, _ = load_with(str(with_copies(*of)), config, remember=False)
    try:
        line = startup_line("tiny", model, config, verbose=True)
        assert "--miss-precision int4 --low-below 0.8 --skip-below 0.1" in line
        assert "CHANGES THE OUTPUT" in line
        model.generate(ids(1, 5), max_new_tokens=8, do_sample=False)
        approximated = model.greenroom.stats().approximated
        assert approximated["precision"] == "int4"
        assert approximated["secondary_slots"] == model.greenroom.setup.copies.secondary_slots
        assert 0 < approximated["inexact_share"] < 1
        model.greenroom.resize("50%")
        model.generate(ids(1, 5), max_new_tokens=8, do_sample=False)
        with pytest.raises(BudgetError, match=r"for . low-precision copies; give the cache"):
            model.greenroom.resize(model.greenroom.setup.catalog.slot_bytes)
    finally:
        model.greenroom.detach()


def test_a_budget_has_room_for_copies():
    folder = str(with_copies("int8", "int4"))
    model, _ = greenroom.load(folder, memory="100%", miss_precision="int4", low_share="50%")
    try:  # every expert fits: all is exact
        assert model.greenroom.stats().approximated is None
        assert model.greenroom.setup.copies is None
    finally:
        model.greenroom.detach()


def test_copies_have_their_share_of_the_memory():
    catalog = ModelSkeleton.of(with_copies("same", "int4")).catalog
    config = LoadConfig(cache="50%", miss_precision="int4", low_share="25%")
    copies = copies_of(catalog, config.approximation(), 16, 2)
    assert copies.secondary_slots == 16 * catalog.slot_bytes // 4 // copies.low[0]
    assert copies_of(catalog, config.approximation(), 1, 2).secondary_slots == 2


@pytest.mark.parametrize(
    ("of", "options", "message"),
    [
        (None, {}, "and this checkpoint has none: make a pack .*greenroom pack MODEL -o OUT"),
        (("same", "int8"), {}, "this pack has copies in int8: .* --miss-precision int4"),
    ],
)
def test_options_that_cannot_work_are_refused(of, options, message):
    folder = source() if of is None else with_copies(*of)
    with pytest.raises(UsageError, match=message) as error:
        greenroom.load(str(folder), cache="30%", **{"miss_precision": "int4", **options})
    one_line(error)


def test_biases_cannot_be_replaced():
    with pytest.raises(UsageError, match="the experts of this model have biases too"):
        greenroom.load(str(source("gpt_oss")), cache="30%", substitute_below=0.3)
