from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from greenroom.core.events import StartChunk
from greenroom.core.transfers.queue import TransferQueue, Urgency


def drain(queue: TransferQueue) -> list[tuple[int, int]]:
    """Every chunk that starts, where each lands at once."""
    started = []
    while transfers := list(queue.start()):
        for transfer in transfers:
            started.append((transfer.piece, transfer.chunk))
            queue.land(transfer.link, transfer.lane)
    return started


def test_demand_goes_before_prefetch_and_in_order():
    queue = TransferQueue([1])
    queue.add(1, 0, 2, Urgency.PREFETCH)
    queue.add(2, 1, 1)
    queue.add(3, 2, 2)
    assert drain(queue) == [(2, 0), (3, 0), (3, 1), (1, 0), (1, 1)]
    assert not queue.entries


@pytest.mark.parametrize("lanes", [[1], [1, 1]])
def test_held_prefetches_start_no_reads_from_disk_and_demands_do(lanes):
    queue = TransferQueue(lanes)
    queue.add(1, 0, 2, Urgency.PREFETCH)
    assert len(list(queue.start())) == 1
    queue.holds_prefetches = True
    queue.land(0, 0)
    queue.add(2, 1, 1)
    started = drain(queue)
    assert [each for each in started if each[0] == 2 and each[1] == 0]
    assert (1, 1) not in started
    assert not queue.open_for(Urgency.PREFETCH)
    assert queue.open_for(Urgency.DEMAND)
    queue.holds_prefetches = False
    assert queue.open_for(Urgency.PREFETCH)
    assert (1, 1) in drain(queue)
    assert not queue.entries


def test_an_upgrade_keeps_the_chunks_already_moved():
    queue = TransferQueue([1])
    queue.add(1, 0, 3, Urgency.PREFETCH)
    queue.add(2, 1, 1, Urgency.PREFETCH)
    (first,) = queue.start()
    assert first.chunk == 0
    queue.land(0, first.lane)
    queue.add(3, 2, 1)
    entry = queue.add(1, 0, 3, Urgency.DEMAND)
    assert (entry.landed, entry.urgency, entry.upgraded) == (1, Urgency.DEMAND, True)
    assert drain(queue) == [(3, 0), (1, 1), (1, 2), (2, 0)]


def test_a_demand_waits_for_one_chunk_a_lane():
    queue = TransferQueue([2])
    queue.add(1, 0, 9, Urgency.PREFETCH)
    first, second = queue.start()
    queue.add(2, 1, 2)
    assert list(queue.start()) == []
    queue.land(0, second.lane)
    assert [t.piece for t in queue.start()] == [2]
    queue.land(0, first.lane)
    assert [t.piece for t in queue.start()] == [2]


def test_a_drop_waits_for_the_moving_chunk():
    queue = TransferQueue([1])
    queue.add(1, 0, 3)
    (transfer,) = queue.start()
    assert queue.drop(1) is False
    assert list(queue.start()) == []
    entry = queue.land(0, transfer.lane)
    assert entry.finished
    assert not entry.arrived
    assert 1 not in queue.entries


def test_a_chain_passes_chunks_on_and_a_demand_gets_a_staging_slot():
    """Two staging slots, one lane each: prefetches may take one, since a lane needs the other."""
    queue = TransferQueue([1, 1], staging_slots=2)
    queue.add(1, 0, 3, Urgency.PREFETCH)
    (first,) = queue.start()
    assert (first.link, first.chunk) == (0, 0)
    queue.land(0, first.lane)
    (onward,) = queue.start()  # the first chunk goes on; its staging slot is still taken
    assert (onward.link, onward.chunk, onward.staging_slot) == (1, 0, first.staging_slot)
    assert not queue.open_for(Urgency.PREFETCH)
    queue.add(2, 1, 1)
    (demand,) = queue.start()
    assert (demand.piece, demand.link) == (2, 0)
    assert demand.staging_slot != first.staging_slot
    queue.land(1, onward.lane)
    queue.land(0, demand.lane)
    (last,) = queue.start()  # and until the demand has left its staging slot, the prefetch waits
    assert (last.piece, last.link) == (2, 1)
    queue.land(1, last.lane)
    assert [(t.piece, t.link) for t in queue.start()] == [(1, 0)]


def test_too_few_staging_slots_are_refused():
    with pytest.raises(ValueError, match="staging slots"):
        TransferQueue([2, 1], staging_slots=2)


class QueueMachine(RuleBasedStateMachine):
    """Random use against a plain model: what was asked, what is carried, and what has landed."""

    lanes: tuple[int, ...] = (2,)

    def __init__(self) -> None:
        super().__init__()
        self.queue = TransferQueue(self.lanes)
        self.requested: dict[int, int] = {}
        self.demanded: set[int] = set()
        self.moving: list[StartChunk] = []
        self.landed: dict[int, set[int]] = {}
        self.dropped: set[int] = set()

    @rule(piece=st.integers(0, 5), chunks=st.integers(1, 4), urgency=st.sampled_from(Urgency))
    def add(self, piece, chunks, urgency):
        if piece in self.dropped:
            return
        self.queue.add(piece, piece, self.requested.get(piece, chunks), urgency)
        self.requested.setdefault(piece, chunks)
        self.landed.setdefault(piece, set())
        if urgency is Urgency.DEMAND:
            self.demanded.add(piece)

    @rule()
    def start(self):
        for transfer in self.queue.start():
            piece = transfer.piece
            assert piece in set(self.requested) - self.dropped
            assert transfer.lane < self.lanes[transfer.link]
            assert (transfer.link, transfer.lane) not in {(m.link, m.lane) for m in self.moving}
            assert transfer.staging_slot < 0 or transfer.staging_slot not in {
                m.staging_slot for m in self.moving
            }
            assert transfer.chunk not in self.landed[piece]
            waiting = {p for p in self.demanded - self.dropped if self._unstarted(p)}
            if transfer.link == 0 and piece not in self.demanded:
                assert not waiting
            self.moving.append(transfer)

    def _unstarted(self, piece):
        return self.queue.entries[piece].started < self.requested[piece]

    @precondition(lambda self: self.moving)
    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]))
    def land(self, data, ok):
        transfer = self.moving.pop(data.draw(st.integers(0, len(self.moving) - 1)))
        piece = transfer.piece
        entry = self.queue.land(transfer.link, transfer.lane, ok)
        assert entry.piece == piece
        if not ok:
            self.dropped.add(piece)
        elif transfer.link + 1 == len(self.lanes):
            self.landed[piece].add(transfer.chunk)
        complete = len(self.landed[piece]) == self.requested[piece]
        assert entry.arrived == complete
        left = complete or (piece in self.dropped and not self._moves(piece))
        assert entry.finished == left
        if left:
            self._over(piece)

    def _moves(self, piece):
        return any(m.piece == piece for m in self.moving)

    @precondition(lambda self: set(self.requested) - self.dropped)
    @rule(data=st.data())
    def drop(self, data):
        piece = data.draw(st.sampled_from(sorted(set(self.requested) - self.dropped)))
        if self.queue.drop(piece):
            assert not self._moves(piece)
            self._over(piece)
        else:
            self.dropped.add(piece)

    def _over(self, piece):
        del self.requested[piece]
        self.landed.pop(piece)
        self.dropped.discard(piece)
        self.demanded.discard(piece)

    @invariant()
    def one_entry_a_piece(self):
        assert set(self.queue.entries) == set(self.requested)
        for piece, entry in self.queue.entries.items():
            assert entry.moving == sum(m.piece == piece for m in self.moving)

    @invariant()
    def a_demand_that_can_move_does(self):
        """After every moving chunk has landed, a demand always gets a staging slot."""
        if not self.moving and self.demanded - self.dropped:
            assert self.queue.open_for(Urgency.DEMAND) or len(self.lanes) > 1


class ChainMachine(QueueMachine):
    lanes = (2, 1)


QueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
ChainMachine.TestCase.settings = QueueMachine.TestCase.settings
TestQueueMachine = QueueMachine.TestCase
TestChainMachine = ChainMachine.TestCase
