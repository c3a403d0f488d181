"""Copies of a step's experts from host memory, launched by the step's own thread.

They go to a stream of their own, in the order in which the scheduler starts them, and for the
scheduler a chunk lands when its copy is launched: no thread waits for it, since groups that read
the expert wait on the device. So a prompt, which copies hundreds of experts, needs neither the
lanes' threads nor Python's lock for each chunk.

Nothing in such a step reads the device's table of slots, which names experts whose copies are under
way. So a token that a device looks up there has its copies by the lanes, or on its own stream
(`host_loads.py`).

The scheduler decides as if links were fast. At most `WINDOW` copies are under way, so the times
that it measures are those of the link.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from greenroom.core.events import StartChunk
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.errors import DeviceError, StoreError
from greenroom.interrupts import hold_interrupts
from greenroom.runtime.cuda.engine import Mark, device_errors
from greenroom.runtime.cuda.host import HostMemory
from greenroom.runtime.cuda.slot_table import SlotTable
from greenroom.runtime.cuda.slots import DeviceSlots
from greenroom.runtime.driver.copier import Failure, Store, read_error

WINDOW = 16  # copies under way, of up to 4 MiB: a millisecond of a fast link
BATCH_BYTES = 64 << 20  # that are launched before the next group of experts
LAST_LINK = 1  # from host memory

Deliver = Callable[[StartChunk, int, Failure | None], None]


class OrderedCopies:
    """Copies from host memory to slots, launched by a step's thread.

    The thread has the lock of steps.

    thread: of the step under way; 0: no step, or none that takes copies
    """

    def __init__(
        self,
        store: Store,
        slots: Any,
        host_memory: HostMemory | None,
        table: SlotTable | None,
        scheduler: Scheduler,
    ) -> None:
        """Copy chunks of `store`; without host memory or a table of slots, none is taken.

        None is taken of nested experts either: their planes are joined when the last chunk has
        arrived, by whoever moves it, and here chunks count as arrived when they are launched.
        """
        self._store, self._is_moving = store, scheduler.view.is_moving
        self._waiting = dict[int, StartChunk]()  # by lane
        self.thread = 0
        self._ends = True  # it takes no more
        self._arrived = dict[int, tuple[int, Mark]]()  # by slot, in this step: number, its mark
        self._under_way = deque[Mark]()
        self._launched = self._joined = 0  # copies of this step; of them, behind the computation
        self._behind: Mark = None  # the last mark that the stream of copies has waited for
        self._begun: StartChunk | None = None  # the last chunk whose copy has begun
        self._seconds = 0.0  # that the thread has waited for copies
        self._parts = None
        if host_memory is not None and table is not None:
            assert isinstance(slots, DeviceSlots)
            if not slots.joins_planes:
                self._parts = slots, host_memory, table
                self._stream = table.engine.new_stream()

    def begin(self) -> None:
        """Begin a step of the calling thread, which has launched all that its copies follow."""
        if self._parts is not None:
            self.thread, self._ends = threading.get_ident(), False  # first: so that `end` ends it
            self._parts[2].begin_step()

    def take(self, action: StartChunk) -> bool:
        """Take a chunk whose copy this thread can launch; `launch` does."""
        if self._can_launch(action):
            self._waiting[action.lane] = action
            return True
        if self._arrived.pop(action.slot, None) is not None:  # it follows a copy to the slot
            table = self._used[2]
            table.engine.order(self._stream, table.stream)
            table.mark(action.slot)
        return False

    def _can_launch(self, action: StartChunk) -> bool:
        if self._ends or threading.get_ident() != self.thread or action.link != LAST_LINK:
            return False
        if action.host_slot < 0 or action.slot < 0 or action.copy_slot >= 0:
            return False
        chunk = self._store.chunks(action.piece)[action.chunk]
        return not any(copy.form for copy in chunk.extent.copies)  # which the host arranges

    @property
    def _used(self) -> tuple[DeviceSlots, HostMemory, SlotTable]:
        assert self._parts is not None
        return self._parts

    def launch(self, deliver: Deliver) -> None:
        """Launch a batch of the copies that were taken.

        Each is delivered when it is launched, which lets others begin. The driver's lock is held.
        """
        nbytes = 0
        with hold_interrupts(), self._used[2].engine.on_stream(self._stream):
            while self._waiting and nbytes < BATCH_BYTES:
                nbytes += self._launch(next(iter(self._waiting.values())), deliver)

    @property
    def launches(self) -> bool:
        """Tell whether chunks were taken that `launch` has yet to launch."""
        return bool(self._waiting)

    def _launch(self, action: StartChunk, deliver: Deliver) -> int:
        """Launch a chunk's copy and deliver it; return its bytes."""
        slots, host_memory, table = self._used
        engine, nbytes, error = table.engine, 0, None
        try:
            if action is self._begun:  # an exception left it: its bytes may be counted already
                raise read_error(action.piece, ": its copy was interrupted")
            if len(self._under_way) >= WINDOW:
                begin = time.perf_counter()
                engine.wait(self._under_way.popleft())
                self._seconds += time.perf_counter() - begin
            chunk = self._store.chunks(action.piece)[action.chunk]
            copies, data, start = host_memory.chunk_source(action, chunk)
            if (mark := slots.mark_of(action.slot)) is not self._behind:
                engine.wait_on(self._stream, mark)
                self._behind = mark
            self._begun = action
            with device_errors():
                slots.launch_write(action.slot, copies, data, start)
            nbytes, mark = chunk.length, engine.mark()
            self._under_way.append(mark)
            self._launched += 1
            self._arrived[action.slot] = self._launched, mark
            host_memory.mark_read((action.host_slot,), mark)
        except (DeviceError, StoreError) as failure:
            error = failure
            with contextlib.suppress(DeviceError), device_errors():  # of a device that is lost
                engine.wait(engine.mark())  # some of its copies may be on their way
        deliver(action, nbytes, error)
        if self._waiting.get(action.lane) is action:  # no other chunk has the lane
            del self._waiting[action.lane]
        return nbytes

    def join(self, slots: Iterable[int]) -> None:
        """Have the calling thread's stream wait for the copies to these slots."""
        if not self._arrived:
            return
        number, mark = max(
            (self._arrived[slot] for slot in slots if slot in self._arrived),
            key=lambda arrived: arrived[0],
            default=(0, None),
        )
        if number > self._joined:
            engine = self._used[2].engine
            engine.wait_on(engine.current_stream(), mark)
            self._joined = number

    def settle(self) -> None:
        """Have all later work wait for the launched copies, and write the table of slots."""
        if self.thread:
            table = self._used[2]
            if self._launched:  # also if the step's own stream has joined them
                table.engine.order(self._stream, table.stream)
            self._launched = self._joined = 0
            self._arrived.clear()
            table.end_step()

    def end(self, deliver: Deliver | None) -> None:
        """End the step, also one that was given up; do nothing without one.

        What was taken and not launched is delivered to `deliver`; None: nobody awaits it.
        """
        if not self.thread:
            return
        self._ends = True
        with hold_interrupts(), self._used[2].engine.on_stream(self._stream):
            while self._waiting:
                action = next(iter(self._waiting.values()))
                if deliver is not None and self._is_moving(action):
                    self._launch(action, deliver)
                else:  # nobody awaits it, as after an interrupt behind its delivery
                    del self._waiting[action.lane]
        self.settle()
        self.thread = 0

    def close(self) -> None:
        """End a step that interrupts have left open, before slots are freed."""
        with contextlib.suppress(DeviceError), device_errors():  # of a device that is lost
            self.end(None)

    def take_seconds(self) -> float:
        """Return how long the step's thread has waited for copies."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
