"""Direct reads into staging buffers of different memory: rate and CPU time of a chunk.

    python benchmarks/staging.py bench-data/moe1.7b-zipf1.0

Threads read random chunks of 4 MiB past the page cache, each into its own buffer. Kinds of memory
take turns; every turn has new buffers, since physical pages differ from one buffer to the next.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import time
from pathlib import Path

from common import commit, machine, table

from greenroom.runtime.measure.bandwidth import drop_page_cache, run_threads
from greenroom.runtime.memory.system import LARGE_PAGE
from greenroom.runtime.store.disk import BLOCK, CHUNK_BYTES, Staging

PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def shared(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes))


def private(nbytes: int) -> memoryview:
    space = mmap.mmap(-1, nbytes, flags=PRIVATE)
    space.madvise(mmap.MADV_NOHUGEPAGE)
    return memoryview(space)


KINDS = {
    "shared, pages of 4 KiB": shared,
    "private, pages of 4 KiB": private,
    "staging buffer (private, pages of 2 MiB)": lambda nbytes: Staging(nbytes).view,
}


def read(files: list[Path], kind: str, threads: int, chunks: int) -> tuple[float, float]:
    """Read `chunks` chunks with each thread: (bytes a second, CPU seconds a chunk)."""
    size = min(CHUNK_BYTES, min(path.stat().st_size for path in files) // BLOCK * BLOCK)
    buffers = [KINDS[kind](max(size, LARGE_PAGE)) for _ in range(threads)]
    drop_page_cache(files)
    handles = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in files]

    def work(buffer: memoryview) -> None:
        for _ in range(chunks):
            number = random.randrange(len(files))
            places = (files[number].stat().st_size - size) // BLOCK + 1
            os.preadv(handles[number], [buffer[:size]], random.randrange(places) * BLOCK)

    begin = time.process_time()
    try:
        seconds = run_threads([lambda b=b: work(b) for b in buffers])  # type: ignore[misc]
    finally:
        for handle in handles:
            os.close(handle)
    count = threads * chunks
    return count * size / seconds, (time.process_time() - begin) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="a folder with safetensors files")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=60, help="of each thread in a turn")
    parser.add_argument("--turns", type=int, default=8)
    args = parser.parse_args()
    print(f"commit {commit()}; {machine()}\n")
    files = sorted(args.checkpoint.glob("*.safetensors"))
    results: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for _ in range(args.turns):
        for kind in KINDS:
            results[kind].append(read(files, kind, args.threads, args.chunks))
    rows = []
    for kind, turns in results.items():
        rates, seconds = ([turn[i] for turn in turns] for i in (0, 1))
        rows.append((
            kind, f"{min(rates) / 1e9:.2f} to {max(rates) / 1e9:.2f}",
            f"{min(seconds) * 1e3:.2f} to {max(seconds) * 1e3:.2f}",
        ))  # fmt: skip
    print(table(("memory of the buffer", "GB/s", "CPU time of a chunk, ms"), rows))


if __name__ == "__main__":
    main()
