"""Worker of the prompt cache on disk: a thread that reads and writes keys and values.

Reads go first, each chunk after demands for experts and before their prefetches. A write waits
until no request is computed, but for two seconds at most: its few milliseconds of a processor would
be missed. Both use one buffer of one segment. The writer reads the live KV cache of a finished
request, whose tokens never change, so nothing is copied beforehand. If that memory is needed for
requests, what is not written yet is dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from greenroom.errors import OutputError
from greenroom.hf.kv.stored import StoredBlock, copy_in, copy_out, tensors_of, token_range
from greenroom.runtime.store.disk_turns import DiskTurns
from greenroom.server.engine.prefixes import Ids, PrefixEntry
from greenroom.server.engine.prompts.folder import Match, PromptFolder
from greenroom.server.engine.prompts.segment import Segment, checksum, root_of

RESCAN_S = 5.0  # between two looks at what other processes have written
LEAST_TOKENS = 64  # of a sequence that is written
MOST_DELAY_S = 2.0  # of a write, while requests are computed
POLL_S = 0.02  # between two looks at whether requests are computed

log = logging.getLogger(__name__)


@dataclass(slots=True)
class PromptCounts:
    """Counters of the prompt cache on disk, since the start of the server.

    hits, misses: look-ups that found more of a prompt than memory has, and the others
    tokens:       tokens whose keys and values were read
    dropped:      finished requests that were not written, or not completely, for want of memory,
                  disk or time
    """

    hits: int = 0
    misses: int = 0
    tokens: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    dropped: int = 0


@dataclass(slots=True, eq=False)
class PromptLoad:
    """Keys and values of a prompt that are being read from disk.

    cache:   the KV cache that they are read into, with room for `match.tokens` tokens
    tensors: its keys and values, of each layer in turn
    tokens:  the number of tokens whose keys and values are complete
    done:    nothing is read any more
    """

    match: Match
    cache: Any
    tensors: list[Tensor]
    tokens: int = 0
    done: bool = False
    cancelled: bool = False

    def release(self) -> Any:
        """Return the KV cache, and forget it."""
        cache, self.cache, self.tensors = self.cache, None, []
        return cache


@dataclass(slots=True, eq=False)
class PromptSave:
    """Keys and values of a finished request that wait to be written.

    ids, tensors: the tokens to write, and the keys and values of each layer in turn
    due:          the time at which it is written also while requests are computed
    """

    entry: PrefixEntry | None
    ids: Ids
    tensors: list[Tensor]
    cancelled: bool = False
    due: float = field(default_factory=lambda: time.monotonic() + MOST_DELAY_S)

    def release(self) -> None:
        """Forget the KV cache of the request, so that its memory can be freed."""
        self.entry, self.tensors = None, []


SCAN = "scan"
Job = PromptLoad | PromptSave | str


class PromptStore:
    """Second tier of the prefix cache: keys and values in files, which survive a restart.

    The engine's thread calls the public methods. `wake` is called when a load is done.

    only_exact: store only tokens that were computed in the same chunks as if the request were alone
    is_busy:    function that tells whether requests are computed now
    """

    def __init__(
        self,
        folder: PromptFolder,
        turns: DiskTurns,
        buffer_bytes: int,
        wake: Callable[[], None],
        only_exact: bool = False,
    ) -> None:
        self.folder, self.counts = folder, PromptCounts()
        self.is_busy: Callable[[], bool] = lambda: False
        self._turns, self._wake, self._only_exact = turns, wake, only_exact
        self._buffer = np.empty(buffer_bytes, np.uint8)
        self._has_warned = False
        self._changed = threading.Condition()
        self._loads: deque[PromptLoad] = deque()
        self._saves: deque[PromptSave] = deque()
        self._scans = False  # a scan is due
        self._job: Job | None = None  # under way
        self._end_by: float | None = None
        self._thread = threading.Thread(target=self._run, name="greenroom-prompts", daemon=True)
        self._thread.start()

    # ---- the engine's thread

    def find(self, ids: Ids, least: int, grid: int, variant: int = 0) -> Match:
        """Find the longest prefix of a prompt on disk that has at least `least` tokens.

        It was computed by the same `variant` of the model. The prompt's last token is left out, and
        the prefix has a multiple of `grid` tokens. The result has no tokens if there is none.
        """
        if time.monotonic() - self.folder.scan_time > RESCAN_S:
            with self._changed:
                self._scans = True
                self._changed.notify_all()
        match = self.folder.find(ids, ids.size - 1, grid, root_of(variant))
        if match.tokens >= least:
            self.counts.hits += 1
            return match
        self.counts.misses += 1
        return Match()

    def load(self, match: Match, cache: Any, tensors: list[Tensor]) -> PromptLoad:
        """Begin to read keys and values into the tensors of a KV cache."""
        load = PromptLoad(match, cache, tensors)
        with self._changed:
            self._loads.append(load)
            self._changed.notify_all()
        return load

    def save(self, entry: PrefixEntry) -> None:
        """Write the keys and values of a finished request, later."""
        windows = self.folder.windows
        tensors = tensors_of(entry.cache, windows)
        tokens = entry.exact if self._only_exact else entry.ids.size
        if any(windows) and tokens < entry.ids.size:
            return  # window states are those of all tokens
        if tokens >= LEAST_TOKENS and tensors:
            with self._changed:
                self._saves.append(PromptSave(entry, entry.ids[:tokens], tensors))
                self._changed.notify_all()

    def drop_save(self, entry: PrefixEntry) -> None:
        """Do not write an entry any more, because another request continues it."""
        for each in self._pending():
            if each.entry is entry:
                self._cancel(each)

    def limit_pending(self, nbytes: int, cached: Container[PrefixEntry]) -> None:
        """Drop unwritten requests, the oldest first, until they take at most `nbytes`.

        Those in `cached`, the prefix cache in memory, are not counted.
        """
        pending = [
            (each, entry.nbytes)
            for each in self._pending()  # the thread may release one meanwhile
            if (entry := each.entry) is not None and entry not in cached
        ]
        excess = sum(size for _, size in pending) - max(0, nbytes)
        for each, size in pending:
            if excess > 0:
                self._cancel(each)
                self._wait_for_end(each)
                self.counts.dropped += 1
                excess -= size

    def _pending(self) -> list[PromptSave]:
        with self._changed:
            current = [self._job] if isinstance(self._job, PromptSave) else []
            return [*current, *self._saves]

    def _cancel(self, save: PromptSave) -> None:
        """Cancel a save; if it is under way, it ends with its present segment, at most."""
        with self._changed:
            save.cancelled = True
            if save in self._saves:
                self._saves.remove(save)
                save.release()

    def _wait_for_end(self, job: Job) -> None:
        """Wait until a cancelled job uses no memory any more."""
        with self._changed:
            while self._job is job:
                self._changed.wait()

    def cancel_load(self, load: PromptLoad) -> None:
        """End a load that nobody waits for, with its present segment at the latest."""
        with self._changed:
            load.cancelled = True
            if load in self._loads:
                self._loads.remove(load)
        self._wait_for_end(load)
        load.release()

    def stats(self) -> dict[str, int]:
        """Return JSON-ready statistics of the prompt cache on disk."""
        folder = self.folder
        return {
            **asdict(self.counts),
            "files": folder.files,
            "bytes": folder.nbytes,
            "limit_bytes": folder.limit,
            "evicted": folder.evicted,
            "damaged": folder.damaged,
            "pending": len(self._pending()),
        }

    def close(self, grace_s: float) -> None:
        """Write what waits, for at most `grace_s` seconds, and end the thread."""
        with self._changed:
            self._end_by = time.monotonic() + grace_s
            self._changed.notify_all()
        self._thread.join()

    # ---- the worker's thread

    def _run(self) -> None:
        with torch.inference_mode():
            while self._run_job():
                pass

    def _run_job(self) -> bool:
        """Wait for a job and do it; return False when the thread must end."""
        if (job := self._next()) is None:
            return False
        try:
            if isinstance(job, PromptLoad):
                self._load(job)
            elif isinstance(job, PromptSave):
                self._save(job)
            else:
                self.folder.scan()
        except (OutputError, OSError) as error:
            self._warn(f"prompts are not stored in {self.folder.path}: {error}")
        except Exception:
            log.exception("the prompt cache failed")
        with self._changed:
            self._job = None
            if isinstance(job, PromptSave):
                job.release()
            self._changed.notify_all()
        if isinstance(job, PromptLoad):
            job.done = True
            self._wake()
        return True

    def _next(self) -> Job | None:
        """Wait for the next job: a load, a scan, or a save; None when the thread must end."""
        with self._changed:
            while True:
                delay: float | None = None
                over = self._end_by is not None and time.monotonic() >= self._end_by
                if self._loads:
                    self._job = self._loads.popleft()
                elif self._end_by is not None and (over or not self._saves):
                    self.counts.dropped += len(self._saves)
                    self._saves.clear()
                    return None
                elif self._scans:
                    self._scans, self._job = False, SCAN
                elif self._saves and (self._end_by is not None or self._is_due(self._saves[0])):
                    self._job = self._saves.popleft()
                elif self._saves:
                    delay = POLL_S
                if self._job is not None:
                    return self._job
                self._changed.wait(delay)

    def _is_due(self, save: PromptSave) -> bool:
        return not self.is_busy() or time.monotonic() >= save.due

    def _load(self, load: PromptLoad) -> None:
        segments, tokens = load.match
        windows, last = self.folder.windows, segments[-1]
        with self._turns.before_prefetches():
            for each in segments:
                data = None
                if not load.cancelled:
                    with suppress(OSError):  # the folder is gone
                        data = self.folder.read(each, self._buffer, self._turns.wait)
                if data is None:
                    break
                copy_in(data, each.blocks, load.tensors, windows, each.begin, each is last)
                load.tokens = min(each.end, tokens)
                self.counts.bytes_read += data.size
        if any(windows) and load.tokens < tokens:
            load.tokens = 0
        self.counts.tokens += load.tokens
        self.folder.touch([each for each in segments if each.begin < load.tokens])

    def _save(self, save: PromptSave) -> None:
        folder, count, chain = self.folder, save.ids.size, list[Segment]()
        entry = save.entry
        assert entry is not None
        for each in entry.saved:
            if each not in folder or each.end > count or each.ids.size < folder.tokens:
                break
            chain.append(each)
        for begin in range(len(chain) * folder.tokens, count, folder.tokens):
            is_late = self._end_by is not None and time.monotonic() >= self._end_by
            if save.cancelled:
                break
            if is_late or not self._write(save, entry.variant, begin, chain):
                self.counts.dropped += 1
                break
        entry.saved = tuple(each for each in chain if each.ids.size == folder.tokens)
        folder.touch(chain)

    def _write(self, save: PromptSave, variant: int, begin: int, chain: list[Segment]) -> bool:
        """Write one segment after those in `chain`, unless it is there; add it to the chain.

        Returns False if there is no room for the segment.
        """
        folder, ids, tensors = self.folder, save.ids, save.tensors
        end = min(begin + folder.tokens, ids.size)
        parts = token_range(tensors, folder.windows, begin, end, end == ids.size)
        blocks = tuple(map(StoredBlock.of, parts))
        if sum(block.nbytes for block in blocks) > self._buffer.size:
            return False
        data = copy_out(parts, self._buffer)
        parent = chain[-1].name_digest if chain else root_of(variant)
        own_ids = ids[begin:end].astype(np.int32)
        segment = Segment(folder.key, parent, begin, own_ids, blocks, checksum(data))
        if segment not in folder and (any(folder.windows) or not folder.extends(segment)):
            self._turns.wait()
            if not folder.write(segment, data, chain):
                return False
            self.counts.bytes_written += segment.file_bytes
        chain.append(segment)
        return True

    def _warn(self, text: str) -> None:
        """Log a warning, once: a full disk would give one for every answer."""
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s; answers are not affected", text)
