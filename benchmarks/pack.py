"""Packing against the disk's own speed: seconds, peak memory and sizes, for each kind of experts.

    python benchmarks/pack.py bench-data/moe1.7b-zipf1.0 --out /some/folder/of/the/same/disk

The floor of a kind is what it takes to read the checkpoint and to write as many bytes as the pack
has, both past the page cache, by as many threads, with nothing in between. `greenroom pack` runs as
a process of its own, with a cold page cache; its seconds include start-up (imports, and the index
of the checkpoint), `packing` does not. Peak memory is the process's own.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from common import commit, greenroom_program, machine, model_bytes, note, table
from memlimit import drop_page_cache, run_limited

PIECE = 4 << 20
THREADS = (os.cpu_count() or 1) + 1
KINDS = ("same", "int8", "fp8", "int4")


def floor_s(source: Path, target: Path, nbytes: int) -> float:
    """Seconds to read all weights of a folder and to write `nbytes`."""
    pieces = [
        (path, at)
        for path in sorted(source.glob("*.safetensors"))
        for at in range(0, path.stat().st_size, PIECE)
    ]
    share = nbytes / len(pieces)
    file = target / "floor"
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    readers = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path, _ in pieces}

    def work(numbered: tuple[int, tuple[Path, int]]) -> None:
        number, (path, at) = numbered
        buffer = mmap.mmap(-1, PIECE)
        os.preadv(readers[path], [buffer], at)
        begin, end = (int(share * n) // 4096 * 4096 for n in (number, number + 1))
        os.pwritev(fd, [memoryview(buffer)[: min(end - begin, PIECE)]], begin)

    try:
        start = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(work, enumerate(pieces)))
        os.fdatasync(fd)
        return time.perf_counter() - start
    finally:
        for each in (fd, *readers.values()):
            os.close(each)
        file.unlink()


def checksum_rates() -> str:
    """GB/s of checksums that Python has, on one core."""
    import hashlib

    data = np.random.default_rng(0).integers(0, 256, 4 << 20, np.uint8)
    sizes_found = []
    for name, work in (
        ("crc32", lambda: zlib.crc32(data)),
        ("blake2b", lambda: hashlib.blake2b(data).digest()),
        ("sha256", lambda: hashlib.sha256(data).digest()),
    ):
        best = min(_seconds(work) for _ in range(7))
        sizes_found.append(f"{name} {data.size / best / 1e9:.2f}")
    return "checksums, GB/s on one core: " + ", ".join(sizes_found)


def _seconds(work: object) -> float:
    start = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="a folder on the same disk")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--keep", action="store_true", help="leave the packs there")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"{machine()}; commit {commit()}\n{checksum_rates()}")
    source, rows = model_bytes(args.model), []
    for kind in args.kinds.split(","):
        out = args.out / f"{args.model.name}-{kind}"
        shutil.rmtree(out, ignore_errors=True)
        command = [*greenroom_program(), "pack", str(args.model), "-o", str(out)]
        measured, text, err = run_limited(
            [*command, "--experts", kind, "--json"], 0, [args.model], 600
        )
        if measured.returncode != 0:
            note(f"{kind}: {err.strip()[-300:]}")
            continue
        pack_report = json.loads(text)
        drop_page_cache([args.model])
        least = floor_s(args.model, args.out, pack_report["nbytes"])
        rows.append(
            [
                kind,
                f"{pack_report['nbytes'] / 1e9:.2f}",
                f"{measured.wall_s:.1f}",
                f"{pack_report['seconds']:.1f}",
                f"{least:.1f}",
                f"{pack_report['seconds'] / least:.2f}",
                f"{source / pack_report['seconds'] / 1e9:.2f}",
                f"{measured.cpu_s:.1f}",
                f"{pack_report['peak_rss_bytes'] / 1e6:.0f}",
            ]
        )
        note(f"{kind}: {pack_report['seconds']:.1f} s, floor {least:.1f} s")
        if not args.keep:
            shutil.rmtree(out)
    heads = ["experts", "GB", "all, s", "packing, s", "floor, s", "ratio"]
    heads += ["GB/s read", "CPU, s", "peak MB"]
    print(f"{args.model.name}: {source / 1e9:.2f} GB\n")
    print(table(heads, rows))


if __name__ == "__main__":
    main()
