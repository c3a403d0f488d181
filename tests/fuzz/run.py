"""Mutate valid files of every format for a time, and keep each input that is read wrongly.

    GREENROOM_FUZZ_SECONDS=600 python -m tests.fuzz.run            # all formats
    GREENROOM_FUZZ_SECONDS=60 python -m tests.fuzz.run gguf npz    # some of them

The next one begins where GREENROOM_FUZZ_SEED says (0). Exit code 1 where any input failed: it lies
in tests/data/corpus then, and `make check` fails until it is read well.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tests.fuzz.check import fault
from tests.fuzz.checkpoints import CHECKPOINTS
from tests.fuzz.formats import OWN, Format
from tests.fuzz.mutate import edit_bytes, edit_json

FORMATS = OWN | CHECKPOINTS
CORPUS = Path(__file__).parents[1] / "data" / "corpus"


def begin(name: str) -> None:
    """Read a valid file, which must succeed; what reading imports and compiles is there then."""
    with TemporaryDirectory(prefix="fuzz-") as folder:
        FORMATS[name].read(FORMATS[name].make()[0], Path(folder))


def mutated(name: str, first: int) -> Iterator[bytes]:
    """The valid files of a format, then changed ones without end: the same for the same `first`."""
    form, number = FORMATS[name], first
    seeds = form.make()
    yield from seeds
    while True:
        yield _mutated(Random(f"{name} {number}"), form, seeds)
        number += 1


def _mutated(random: Random, form: Format, seeds: list[bytes]) -> bytes:
    seed = random.choice(seeds)
    if form.split is None or form.join is None or random.random() < 0.3:
        return edit_bytes(random, seed, seeds)
    texts, others = form.split(seed)
    number = random.randrange(len(texts) + len(others))
    if number < len(texts) or (texts and random.random() < 0.5):
        number %= len(texts)
        texts[number] = edit_json(random, texts[number])
    else:
        at = number - len(texts)
        others[at] = edit_bytes(random, others[at], others)
    try:
        return form.join((texts, others))
    except (TypeError, ValueError):  # what was changed says how to join
        return edit_bytes(random, seed, seeds)


def keep(name: str, data: bytes) -> Path | None:
    """Put an input into the corpus; None where --device is cpu: leave out --kv."""
    path = CORPUS / name / hashlib.sha256(data).hexdigest()[:16]
    if path.exists():
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def drop(pending: Path | None) -> None:
    """Take an input out of the corpus that this run has put there."""
    if pending is not None:
        pending.unlink()


def run(name: str, seconds: float, first: int = 0) -> tuple[int, int]:
    """(inputs read, inputs that failed) in so many seconds; valid files come first."""
    inputs, number, failed, seen = mutated(name, first), 0, 0, set[str]()
    begin(name)
    until = time.monotonic() + seconds
    with TemporaryDirectory(prefix="fuzz-") as folder:
        while time.monotonic() < until:
            data = next(inputs)
            pending = keep(name, data)  # a crash of the process leaves it there
            found = fault(FORMATS[name].read, data, Path(folder))
            number += 1
            if found is None:
                drop(pending)
                continue
            failed += 1
            last = "\n".join(found.splitlines()[-4:-1])
            if last in seen:
                drop(pending)  # the same line of code: one input is enough
                continue
            seen.add(last)
            where = f"{name}, input {first + number - 1}"
            print(f"\n{pending or 'in the corpus'} ({where}):\n{found}", flush=True)
    return number, failed


def main(names: list[str]) -> int:
    names = names or list(FORMATS)
    seconds = float(os.environ.get("GREENROOM_FUZZ_SECONDS", "60")) / len(names)
    first = int(os.environ.get("GREENROOM_FUZZ_SEED", "0"))
    os.fsync = lambda descriptor: None  # nobody needs these files after a crash
    logging.disable()
    total = 0
    for name in names:
        number, failed = run(name, seconds, first)
        print(f"{name}: {number} inputs, {failed} failed", flush=True)
        total += failed
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
