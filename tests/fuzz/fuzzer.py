"""The fuzzer of one format: a pool of inputs that grows by those that reach new code."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tests.fuzz import coverage
from tests.fuzz.check import fault, limits
from tests.fuzz.checkpoints import CHECKPOINTS
from tests.fuzz.formats import OWN, Format
from tests.fuzz.kept import CORPUS, write
from tests.fuzz.mutate import Mutator
from tests.fuzz.served import SERVED

FORMATS: dict[str, Format] = OWN | CHECKPOINTS | SERVED
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # files need no disk
LARGEST = 4 << 20  # bytes of an input
MORE = 4096  # bytes that an input in the pool may have more than the largest valid file
RAW_SHARE = 0.15  # of inputs whose bytes are changed anywhere, where a format has pieces
SERIES = 500  # inputs between two looks at the memory of the process


def share(name: str) -> float:
    """Return a format's share of the time of all formats."""
    return FORMATS[name].weight / sum(each.weight for each in FORMATS.values())


def begin(name: str) -> None:
    """Read a valid file, which must succeed; what reading imports and compiles is there then."""
    with TemporaryDirectory(prefix="fuzz-", dir=MEMORY) as folder:
        FORMATS[name].read(FORMATS[name].make()[0], Path(folder))


class Fuzzer:
    """Reads a format's valid files, then changed ones without end.

    pool:     folder of inputs of earlier runs that reached new code, and of those of this run
    failures: folder for inputs that are read wrongly
    each:     called with every input before it is read
    guided:   whether inputs that reach new code are changed further
    number, failed: of inputs so far
    """

    def __init__(
        self,
        name: str,
        first: int = 0,
        pool: Path | None = None,
        failures: Path = CORPUS,
        each: Callable[[str, bytes], object] = lambda name, data: None,
        guided: bool = True,
    ) -> None:
        begin(name)
        self.name, self._form, self._each, self._guided = name, FORMATS[name], each, guided
        self._folder, self._failures = pool and pool / name, failures / name
        self._random = Random(f"{name} {first}")
        self._mutator = Mutator(self._random, coverage.constants(name))
        self._seeds = self._form.make()
        self._longest = max(map(len, self._seeds)) + MORE
        self._pool = list[bytes]()
        self._first = self._begin()
        self._seen = set[str]()
        self._hits = bytes(coverage.MOST)
        self.number = self.failed = 0

    def run(self, seconds: float, most: int = 1 << 62, stop: bool = False) -> None:
        """Read inputs for so many seconds, at most so many; `stop` after the first failure.

        The seconds are those of the processor, on a busy machine too, or ten times as many by the
        clock, for readers that wait for another process.
        """
        coverage.HITS[:] = self._hits
        until, late = time.process_time() + seconds, time.monotonic() + 10 * seconds
        last = self.number + most

        def goes_on() -> bool:
            in_time = time.process_time() < until and time.monotonic() < late
            return in_time and self.number < last and not (stop and self.failed)

        with TemporaryDirectory(prefix="fuzz-", dir=MEMORY) as folder:
            while goes_on():
                with limits():
                    for _ in range(SERIES):
                        self._try(next(self._first, None) or self.next(), Path(folder))
                        if not goes_on():
                            break
        self._hits = bytes(coverage.HITS)

    @property
    def known(self) -> int:
        """Count the inputs that are not made by chance: valid files, and the pool."""
        folder = self._folder
        pool = len([*folder.iterdir()]) if folder is not None and folder.is_dir() else 0
        return len(self._seeds) + pool

    @property
    def reached(self) -> int:
        """Count the statements of the format's readers that inputs have reached."""
        coverage.HITS[:] = self._hits
        return coverage.reached(self.name)

    def next(self) -> bytes:
        """Make one changed input."""
        return self._changed()[:LARGEST]

    def _changed(self) -> bytes:
        random = self._random
        # Valid files get further than most of the pool, of which newer ones are tried more often.
        pool = self._pool if self._pool and random.random() < 0.5 else self._seeds
        data = pool[-1 - int(len(pool) * random.random() ** 2)]
        other = random.choice(self._seeds)
        form = self._form
        if form.split is None or form.join is None or random.random() < RAW_SHARE:
            return self._mutator.edit_bytes(data, other)
        try:
            texts, others = form.split(data)
            number = random.randrange(len(texts) + len(others))
            if number < len(texts) or (texts and random.random() < 0.5):
                number %= len(texts)
                donors = form.split(other)[0]
                donor = donors[number] if number < len(donors) else texts[number]
                texts[number] = self._mutator.edit_json(texts[number], donor)
            else:
                at = number - len(texts)
                others[at] = self._mutator.edit_bytes(others[at], random.choice(others))
            return form.join((texts, others))
        except Exception:  # it was changed before: no JSON any more, or no such pieces
            return self._mutator.edit_bytes(data, other)

    def _begin(self) -> Iterator[bytes]:
        """The valid files, then the pool of earlier runs, in which small ones come first."""
        yield from self._seeds
        if self._folder is not None and self._folder.is_dir():
            paths = sorted(
                self._folder.iterdir(), key=lambda path: (path.stat().st_size, path.name)
            )
            for path in paths:
                data = path.read_bytes()
                path.unlink()  # it is written again if it still reaches new code
                yield data

    def _try(self, data: bytes, folder: Path) -> None:
        self._each(self.name, data)
        before = coverage.reached()
        found = fault(self._form.read, data, folder)
        self.number += 1
        if found is not None:
            self._report(data, found)
        elif self._guided and coverage.reached() > before and len(data) <= self._longest:
            self._pool.append(data)
            if self._folder is not None and data not in self._seeds:
                write(self._folder, data)

    def _report(self, data: bytes, found: str) -> None:
        """Keep an input that is read wrongly, unless another one failed at the same line."""
        self.failed += 1
        last = "\n".join(found.splitlines()[-4:-1])
        if last not in self._seen:
            self._seen.add(last)
            path = write(self._failures, data)
            print(f"\n{path} ({self.name}, input {self.number - 1}):\n{found}", flush=True)
