from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from greenroom.core.queue import TransferQueue, Urgency


def drain(queue: TransferQueue) -> list[tuple[int, int]]:
    started = []
    while (chunk := queue.start()) is not None:
        started.append((chunk[0].piece, chunk[1]))
    return started


def test_demand_goes_before_prefetch_and_in_order():
    queue = TransferQueue()
    queue.add(1, 0, 2, Urgency.PREFETCH)
    queue.add(2, 1, 1)
    queue.add(3, 2, 2)
    assert drain(queue) == [(2, 0), (3, 0), (3, 1), (1, 0), (1, 1)]


def test_an_upgrade_keeps_the_chunks_already_moved():
    queue = TransferQueue()
    queue.add(1, 0, 3, Urgency.PREFETCH)
    queue.add(2, 1, 1, Urgency.PREFETCH)
    assert queue.start()[1] == 0
    queue.land(1)
    queue.add(3, 2, 1)
    entry = queue.add(1, 0, 3, Urgency.DEMAND)
    assert (entry.landed, entry.urgency) == (1, Urgency.DEMAND)
    assert drain(queue) == [(3, 0), (1, 1), (1, 2), (2, 0)]


def test_dropping_what_moves_waits_for_its_chunk():
    queue = TransferQueue()
    queue.add(1, 0, 3)
    queue.start()
    assert queue.drop(1) is False
    assert queue.start() is None
    assert not queue.land(1).complete
    queue.forget(1)
    assert 1 not in queue


class QueueMachine(RuleBasedStateMachine):
    """Random use against a plain model: what was asked, started and landed."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = TransferQueue()
        self.asked: dict[int, int] = {}
        self.demanded: set[int] = set()
        self.moving: list[tuple[int, int]] = []
        self.landed: dict[int, set[int]] = {}
        self.dropped: set[int] = set()

    @rule(piece=st.integers(0, 5), chunks=st.integers(1, 4), urgency=st.sampled_from(Urgency))
    def add(self, piece, chunks, urgency):
        if piece in self.dropped:
            return
        self.queue.add(piece, piece, self.asked.get(piece, chunks), urgency)
        self.asked.setdefault(piece, chunks)
        self.landed.setdefault(piece, set())
        if urgency is Urgency.DEMAND:
            self.demanded.add(piece)

    @rule()
    def start(self):
        waiting = {
            p
            for p, n in self.asked.items()
            if p not in self.dropped
            and len(self.landed[p]) + sum(m[0] == p for m in self.moving) < n
        }
        started = self.queue.start()
        if not waiting:
            assert started is None
            return
        entry, chunk = started
        assert entry.piece in waiting
        assert (entry.piece in self.demanded) == bool(waiting & self.demanded)
        assert (entry.piece, chunk) not in self.moving
        assert chunk not in self.landed[entry.piece]
        self.moving.append((entry.piece, chunk))

    @precondition(lambda self: self.moving)
    @rule(data=st.data())
    def land(self, data):
        piece, chunk = self.moving.pop(data.draw(st.integers(0, len(self.moving) - 1)))
        self.landed[piece].add(chunk)
        entry = self.queue.land(piece)
        assert entry.complete == (len(self.landed[piece]) == self.asked[piece])
        if entry.complete or (piece in self.dropped and not entry.moving):
            self.queue.forget(piece)
            self._over(piece)

    @precondition(lambda self: set(self.asked) - self.dropped)
    @rule(data=st.data())
    def drop(self, data):
        piece = data.draw(st.sampled_from(sorted(set(self.asked) - self.dropped)))
        if self.queue.drop(piece):
            assert all(m[0] != piece for m in self.moving)
            self._over(piece)
        else:
            self.dropped.add(piece)

    def _over(self, piece):
        del self.asked[piece]
        self.landed.pop(piece)
        self.dropped.discard(piece)
        self.demanded.discard(piece)

    @invariant()
    def one_entry_a_piece(self):
        assert set(self.queue.entries) == set(self.asked)
        for piece, entry in self.queue.entries.items():
            assert entry.moving == sum(m[0] == piece for m in self.moving)


QueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestQueueMachine = QueueMachine.TestCase
