"""Launches for one token: their order, streams and counts, with stubs in place of kernels."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from greenroom.errors import DeviceError
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.slot_table import SlotTable
from greenroom.runtime.cuda.slots import DeviceSlots
from greenroom.runtime.kernels.report import TokenReport
from greenroom.runtime.kernels.triton import look_up, one_token, programs, token_launches
from greenroom.runtime.kernels.triton.kernel import Launch
from greenroom.runtime.kernels.triton.token_launches import TokenLaunches
from greenroom.runtime.slots.tier import ABSENT
from tests.runtime.kernels.toys import experts, layer_of

NAMES = {id(look_up.look_up): "look-up", id(one_token.project_one): "product",
         id(programs.project): "product", id(programs.combine): "sum"}  # fmt: skip
HIDDEN, INNER, TOP_K = 32, 32, 2


class Streams(Engine):
    """An engine whose threads have streams of their own, and what was launched on them."""

    def __init__(self) -> None:
        self.did: list[tuple[str, Any]] = []
        self._local = threading.local()

    @property
    def on(self) -> list[Any]:
        return self._local.__dict__.setdefault("on", [threading.current_thread().name])

    def current_stream(self) -> Any:
        return self.on[-1]

    @contextlib.contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        self.on.append(stream)
        yield
        self.on.pop()

    def order(self, before: Any, after: Any) -> None:
        self.did.append((f"waits for {before}", after))

    def mark(self) -> Any:
        self.did.append(("mark", self.on[-1]))


class Rig:
    """The launches of a layer of toy experts; `act` is called before each stub of a kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = Streams()
        self.slots = DeviceSlots(self.engine, 4, 64, 4)
        self.table = SlotTable(self.engine, self.slots, [1] * 6)
        layer, _ = layer_of(experts("qwen3_moe", torch.bfloat16, HIDDEN, INNER))
        self.act: Callable[[str], object] = lambda name: None
        types = torch.int64, torch.bfloat16
        self.launches = TokenLaunches(layer, self.table, 0, TOP_K, types)
        rig = self

        def start(launch: Launch, *first: Any) -> None:
            name = NAMES[id(launch.program)]
            rig.act(name)
            rig.engine.did.append((name, rig.engine.on[-1]))
            if name == "look-up":
                report_slots(*first, *launch.arguments, again=launch.constants["AGAIN"])

        monkeypatch.setattr(Launch, "start", start)

    def bring(self, expert: int, slot: int) -> None:
        self.table.begin(expert, slot)
        self.table.land(expert, slot)

    def token(self, *chosen: int) -> TokenReport:
        x, index = torch.zeros(1, HIDDEN, dtype=torch.bfloat16), torch.tensor([chosen])
        self.launches.start(x, index, torch.ones(1, TOP_K, dtype=torch.bfloat16))
        return self.launches.read_report()


def report_slots(
    index: Any, offsets: Any, tiles: Any, computed: Any, order: Any, report: Any, number: Any,
    changes: Any, *_: Any, again: bool,
) -> None:  # fmt: skip
    """Do what the look-up does for the host."""
    number += 1
    if again:
        for expert, offset in changes.view(-1, 2).tolist():
            if expert >= 0:
                offsets[expert] = offset
    report[:] = (number << 32) | (index[0] << 1) | (offsets[index[0]] > ABSENT)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def in_thread(name: str, work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("name", ["start", "run"])
def test_no_slot_changes_between_a_look_up_and_its_products(rig, name):
    """A mark between them would let a copy overwrite the slot that a product reads."""
    rig.bring(0, 1)
    threads: list[threading.Thread] = []

    def prefetch(name: str) -> None:
        if name == "product" and not threads:
            threads.append(threading.Thread(target=rig.table.begin, args=(5, 1)))
            threads[0].start()
            threads[0].join(0.05)

    rig.act = prefetch
    rig.engine.did.clear()
    token = torch.zeros(1, HIDDEN), torch.tensor([[0, 3]]), torch.ones(1, TOP_K)
    getattr(rig.launches, name)(*token)
    threads[0].join(30)
    assert [each & 1 for each in rig.launches._report.tolist()] == [1, 0]
    done = [name for name, _ in rig.engine.did if "waits" not in name]
    assert done == ["look-up", "product", "product", "sum", "mark"]
    assert rig.table.slot_of(0) == -1


@pytest.mark.parametrize(
    ("chosen", "rows"),
    [((3, 1), {1: 1}), ((1, 3), {0: 1}), ((1, 1), {0: 1, 1: 1}), ((4, 1), {0: 2, 1: 1})],
)
def test_outputs_of_the_host_have_the_rows_of_their_choices(rig, chosen, rows):
    """Also of an expert that is chosen twice; they are there before the sum."""
    rig.bring(3, 0)
    report = rig.token(*chosen)
    experts = sorted({*chosen} - {3})
    assert {*report.missing} == {*experts}
    out, sums = rig.launches._step.out, list[torch.Tensor]()
    out.fill_(7)

    def act(name: str) -> None:
        assert name == "sum"
        assert rig.table.lock._is_owned()
        sums.append(out.clone())

    rig.act = act
    outputs = torch.arange(1.0, 1 + len(experts))[:, None].expand(-1, HIDDEN)
    rig.launches.merge_outputs(outputs, experts, report, lambda sent: sent)
    (summed,) = sums
    expected = torch.full((TOP_K, HIDDEN), 7.0)
    for row, value in rows.items():
        expected[row] = value
    assert torch.equal(summed.float(), expected)


class Selected:
    """What `torch.cuda.device` is: a context that remembers one device, the one before."""

    current = 0

    def __init__(self, device: torch.device) -> None:
        self.before = -1

    def __enter__(self) -> None:
        self.before, Selected.current = Selected.current, 1

    def __exit__(self, *_: Any) -> None:
        Selected.current = self.before


def test_a_thread_has_its_own_device_again_behind_the_launches(monkeypatch):
    """The model's GPU may be another one. A token's capture runs all of them within `in_order`."""
    monkeypatch.setattr(token_launches, "on_device", Selected)
    rig = Rig(monkeypatch)
    token = torch.zeros(1, HIDDEN), torch.tensor([[0, 1]]), torch.ones(1, TOP_K)
    with rig.launches.in_order():
        rig.launches.run(*token)
    assert Selected.current == 0
    for each in (rig.launches.start, rig.launches.start_kernels):
        each(*token)
    rig.launches.start_piece(rig.launches._compute)
    rig.launches.capture_again()
    rig.launches.start_again([])
    rig.launches.result()
    assert Selected.current == 0


def test_launches_in_a_larger_graph_have_one_graph_more(rig, monkeypatch):
    """Its memory and the time of its capture are spent for each layer."""
    captured = []
    monkeypatch.setattr(
        Streams, "capture", lambda engine, work: captured.append(work) or "graph", raising=False
    )
    rig.launches.start_kernels(torch.zeros(1, HIDDEN), torch.tensor([[0, 1]]), torch.ones(1, TOP_K))
    rig.launches.capture_again()
    assert captured == [rig.launches._compute_again]
    assert rig.launches._sequences[1] == "graph"


def test_launches_that_were_interrupted_do_not_spoil_later_ones(rig):
    rig.bring(2, 0)
    rig.token(0, 1)
    for at in ("look-up", "product"):

        def interrupt(name: str, at: str = at) -> None:
            if name == at:
                raise KeyboardInterrupt

        rig.act = interrupt
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                rig.token(0, 1)
        rig.act = lambda name: None
        assert rig.token(2, 3).missing == [3]


def load(rig: Rig, expert: int, slot: int) -> None:
    """Bring an expert as a copy does that is in order with look-ups."""
    with rig.table.lock:
        rig.table.vacate([slot])
        rig.table.insert([expert], [slot])
        rig.launches.start_again([expert])


def found(rig: Rig) -> list[int]:
    """The experts that the device's table has."""
    return [n for n, offset in enumerate(rig.table.offsets.tolist()) if offset > ABSENT]


def test_a_look_up_writes_the_changes_that_are_new(rig):
    rig.bring(0, 1)
    rig.token(0, 1)
    load(rig, 1, 2)
    assert found(rig) == [0, 1]
    assert rig.table.changes == {}
    rig.bring(3, 2)  # in the place of expert 1, by another thread
    rig.token(0, 3)
    assert found(rig) == [0, 3]
    rig.launches.start_again([3])  # changes of a token before are not written again
    assert found(rig) == [0, 3]
    load(rig, 4, 1)
    assert found(rig) == [3, 4]


def test_the_first_graph_writes_no_old_changes(rig):
    rig.token(0, 1)
    load(rig, 1, 2)
    rig.bring(3, 2)
    rig.engine.did.clear()
    rig.token(0, 3)  # the second token: sequences become graphs
    assert rig.engine.did[0] == ("mark", threading.current_thread().name)  # waits for the last one
    assert found(rig) == [3]


def test_a_layer_has_graphs_after_an_interrupt_of_its_first_capture(rig, monkeypatch):
    captured = list[Any]()
    monkeypatch.setattr(rig.engine, "capture", lambda work: captured.append(work) or work)
    rig.token(0, 1)

    def interrupt(event: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rig.engine, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rig.token(0, 1)
    assert not captured
    for _ in range(2):
        rig.token(0, 1)
    assert len(captured) == 2  # both sequences, once


@pytest.mark.parametrize("at", ["look-up", "product"])
def test_changes_survive_an_interrupted_look_up(rig, at):
    rig.bring(0, 1)
    rig.token(0, 1)

    def interrupt(name: str) -> None:
        if name == at:
            raise KeyboardInterrupt

    rig.act = interrupt
    with pytest.raises(KeyboardInterrupt):
        load(rig, 1, 1)
    rig.act = lambda name: None
    assert rig.token(0, 1).missing == [0]
    assert found(rig) == [1]


def test_changes_that_were_handed_over_are_not_written_later(rig, monkeypatch):
    """An interrupt came before their look-up."""
    rig.token(0, 1)

    hand_over = SlotTable.hand_over

    def interrupt(*arguments: Any) -> None:
        assert hand_over(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, rig.table.lock:
        patch.setattr(SlotTable, "hand_over", interrupt)
        rig.table.insert(range(3), range(3))
        with pytest.raises(KeyboardInterrupt):
            rig.launches.start_again([0])
    rig.token(0, 1)
    rig.bring(3, 1)  # in the place of expert 1, which was handed over
    rig.launches.start_again([0])
    assert found(rig) == [0, 2, 3]


def test_a_step_s_second_group_does_not_overwrite_changes_of_the_first(rig):
    """No report says that the device has read them."""
    rig.token(0, 1)
    for expert in range(2):
        rig.bring(expert, expert)
    rig.table.insert([2], [3])  # an exception came in another thread before it was written
    before = rig.launches.changes.tolist()
    for expert in range(2):
        rig.launches.start_again([expert], [expert])
    assert rig.launches.changes.tolist() == before
    assert found(rig) == [0, 1, 2]


def test_more_changes_than_a_look_up_writes_go_before_it(rig):
    rig.token(0, 1)
    with rig.table.lock:
        for expert in range(5):
            rig.table.insert([expert], [expert % 4])
        rig.launches.start_again([4])
    assert found(rig) == [0, 1, 2, 3, 4]


def test_a_stream_waits_for_the_one_on_which_the_table_was_changed(rig):
    """Two threads, each with a stream of its own, ask the same table in turn."""
    rig.token(0, 1)
    main = threading.current_thread().name

    def another() -> None:
        with rig.table.lock:
            rig.table.follow_stream()

    in_thread("another", another)
    rig.bring(1, 2)  # the entry is written on the other thread's stream
    rig.engine.did.clear()
    rig.launches.start_again([1], [2])
    assert rig.engine.did[:2] == [("waits for another", main), ("look-up", main)]
    with pytest.raises(DeviceError, match="has expert 1 in slot 2"):
        rig.launches.start_again([1], [3])
    with pytest.raises(DeviceError, match="has expert 0 in slot -1"):
        rig.launches.start_again([0])


def test_torch_knows_each_stream_that_uses_pinned_memory(rig, monkeypatch):
    """Torch uses freed pinned memory again when streams that copied from it have come so far."""
    copied, copy = [], torch.Tensor.copy_
    pinned = {"report": rig.launches._report, "changes": rig.launches.changes}
    names = {memory.ctypes.data: name for name, memory in pinned.items()}

    def watch(self: torch.Tensor, source: torch.Tensor, *args: Any, **options: Any) -> Any:
        if (name := names.get(source.data_ptr())) is not None:
            copied.append((name, rig.engine.on[-1], options["non_blocking"]))
        return copy(self, source, *args, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", watch)
    for stream in ("one", "one", "two"):
        with rig.engine.on_stream(stream):
            rig.token(0, 1)
    assert copied == [(name, stream, True) for stream in ("one", "two") for name in names.values()]
