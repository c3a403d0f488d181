"""Folder of segment files, which several processes may share: index, look-up, eviction.

Segments form trees: a segment's children continue it. The index has the segments of one model, by
parent. Files appear by a rename and are never changed, so processes need no lock: a file that
another process has evicted is a miss. The modification time is the time of the last use.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from greenroom.errors import UsageError
from greenroom.hf.kv.stored import Bytes
from greenroom.server.engine.prefixes import Ids, common_prefix
from greenroom.server.engine.prompts.segment import (
    NAME,
    DamagedSegment,
    Segment,
    read_data,
    read_segment,
    write_segment,
)

MOST_FILES = 4096  # the index of a million tokens takes 12 MB
STALE_S = 3600.0  # age at which a draft is abandoned: its process died
NEWER_NS = 1000  # a segment counts as used this much later than its children

log = logging.getLogger(__name__)


class Match(NamedTuple):
    """Consecutive segments of the prompt cache, and how many of their tokens a prompt shares."""

    segments: tuple[Segment, ...] = ()
    tokens: int = 0


class _File(NamedTuple):
    """A file of the folder, in the order of eviction: least recently used, then latest part."""

    mtime_ns: int
    before: int
    nbytes: int
    name: str


class PromptFolder:
    """Segment files in a folder, with an index of those of one model.

    Any thread may call `find`; one thread calls the other methods.

    path:    the folder; it is made if missing
    limit:   most bytes of all files, which are at most MOST_FILES
    key:     digest of the model and of all else that the bits depend on
    tokens:  number of tokens in a complete segment
    windows: most tokens of each layer's window state
    """

    def __init__(
        self, path: Path, limit: int, key: str, tokens: int, windows: Sequence[int]
    ) -> None:
        """Open a folder of segment files; UsageError if it cannot be made or listed."""
        self.path, self.limit, self.key, self.tokens = path, limit, key, tokens
        self.windows = tuple(windows)
        self.files = self.nbytes = self.evicted = self.damaged = 0
        self.scan_time = 0.0  # of the monotonic clock
        self._lock = threading.Lock()
        self._segments: dict[str, Segment] = {}  # by file name
        self._children: dict[str, list[Segment]] = {}  # by the parent's name digest
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.scan()
        except OSError as error:
            raise UsageError(f"--prompt-cache {path}: {error.strerror}") from error

    def __len__(self) -> int:
        return len(self._segments)

    def __contains__(self, segment: Segment) -> bool:
        return segment.file_name in self._segments

    # ---- look-up

    def find(self, ids: Ids, most: int, grid: int = 1, root: str = "") -> Match:
        """Find the segments with the longest common prefix with some token ids.

        most: most tokens of the prefix
        grid: the prefix has a multiple of this many tokens
        root: the parent of the first segment, as `root_of` a variant of the model
        """
        with self._lock:
            best, todo = Match(), [Match()]
            while todo:
                chain, at = todo.pop()
                further = ids[at:most]
                parent = chain[-1].name_digest if chain else root
                for each in self._children.get(parent, ()) if further.size else ():
                    if each.first_id != further[0] or each.begin != at:
                        continue
                    shared = common_prefix(each.ids, further)
                    segments = (*chain, each)
                    if (tokens := self._usable(each, shared, grid)) > best.tokens:
                        best = Match(segments, tokens)
                    if shared == each.ids.size == self.tokens:
                        todo.append(Match(segments, each.end))
        return Match(tuple(each for each in best.segments if each.begin < best.tokens), best.tokens)

    def _usable(self, segment: Segment, shared: int, grid: int) -> int:
        """Return how many tokens of a prompt can be reused that shares some with a segment.

        Window states can be reused only at the end of the sequence that they belong to.
        """
        tokens = (segment.begin + shared) // grid * grid
        if not any(self.windows):
            return tokens
        is_end = tokens == segment.end and segment.has_window_states(self.windows)
        return tokens if is_end else 0

    # ---- the folder's files

    def scan(self) -> None:
        """Update the index: files may have been added or removed by other processes."""
        self.scan_time = time.monotonic()
        present = self._files()
        names = {each.name for each in present}
        for name in [name for name in self._segments if name not in names]:
            self._forget(name)
        for name in names:
            match = NAME.fullmatch(name)
            if match is None or match[4] or match[1] != self.key[:16] or name in self._segments:
                continue
            with suppress(OSError):
                self._add_file(name)

    def _add_file(self, name: str) -> None:
        try:
            segment = read_segment(self.path / name)
        except DamagedSegment as error:
            self._discard(name, error)
            return
        if segment.key == self.key and len(segment.blocks) == 2 * len(self.windows):
            self._add(segment)

    def _add(self, segment: Segment) -> None:
        with self._lock:
            self._segments[segment.file_name] = segment
            self._children.setdefault(segment.parent, []).append(segment)

    def _forget(self, name: str) -> None:
        with self._lock:
            if (segment := self._segments.pop(name, None)) is not None:
                siblings = self._children[segment.parent]
                siblings.remove(segment)
                if not siblings:
                    del self._children[segment.parent]

    def _discard(self, name: str, error: DamagedSegment) -> None:
        """Remove a damaged file, with a line in the log."""
        self.damaged += 1
        log.warning("%s is not used and removed: %s", self.path / name, error)
        self._remove(name)

    def _remove(self, name: str) -> None:
        self._forget(name)
        with suppress(OSError):
            os.unlink(self.path / name)

    def _files(self) -> list[_File]:
        """List all segment files and drafts, of any model; remove abandoned drafts."""
        files = []
        for entry in os.scandir(self.path):
            if (match := NAME.fullmatch(entry.name)) is None:
                continue
            try:
                stat = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # another process has removed it
            if match[4] and stat.st_mtime < time.time() - STALE_S:
                self._remove(entry.name)
            else:
                files.append(_File(stat.st_mtime_ns, -int(match[2]), stat.st_size, entry.name))
        self.files, self.nbytes = len(files), sum(each.nbytes for each in files)
        return files

    def read(self, segment: Segment, into: Bytes, wait: Callable[[], None]) -> Bytes | None:
        """Read a segment's keys and values into a buffer; None if they are gone or damaged.

        `wait` is called before each chunk of 4 MiB.
        """
        name = segment.file_name
        try:
            return read_data(self.path / name, segment, into, wait)
        except DamagedSegment as error:
            self._discard(name, error)
        except FileNotFoundError:
            self._forget(name)
            self.scan()  # others are likely gone too
        except OSError as error:  # too many open files, perhaps: the file may be good
            log.warning("%s is not used: it cannot be read: %s", self.path / name, error.strerror)
            self._forget(name)
        return None

    def write(self, segment: Segment, data: Bytes, chain: Sequence[Segment]) -> bool:
        """Write a segment file after the segments `chain`, and evict others for it.

        Returns False if there is no room without evicting the chain. OutputError or OSError if the
        file cannot be written.
        """
        if not self._make_room(segment.file_bytes, {each.file_name for each in chain}):
            return False
        write_segment(self.path, segment, data)
        self._add(segment)
        for each in self.prefixes_of(segment):
            self._remove(each.file_name)
        self._files()
        return True

    def prefixes_of(self, segment: Segment) -> list[Segment]:
        """Return the incomplete segments whose tokens another segment begins with."""
        return [
            each
            for each in self._children.get(segment.parent, ())
            if each is not segment
            and each.ids.size < min(segment.ids.size, self.tokens)
            and common_prefix(each.ids, segment.ids) == each.ids.size
        ]

    def extends(self, segment: Segment) -> bool:
        """Tell whether another segment has all tokens of this one, and more."""
        return any(
            each.ids.size > segment.ids.size
            and common_prefix(each.ids, segment.ids) == segment.ids.size
            for each in self._children.get(segment.parent, ())
        )

    def _make_room(self, nbytes: int, pinned: set[str]) -> bool:
        files = sorted(self._files())
        total, count = sum(each.nbytes for each in files), len(files)
        for each in files:
            if total + nbytes <= self.limit and count < MOST_FILES:
                return True
            if each.name in pinned:
                return False
            if not each.name.startswith("."):  # a draft is another process's
                self._remove(each.name)
                self.evicted += 1
                total, count = total - each.nbytes, count - 1
        return total + nbytes <= self.limit

    def touch(self, chain: Sequence[Segment]) -> None:
        """Mark segments as the most recently used; the first of them counts as the newest."""
        now = time.time_ns()
        for i, each in enumerate(reversed(chain)):
            with suppress(OSError):
                times = now + i * NEWER_NS
                os.utime(self.path / each.file_name, ns=(times, times))
