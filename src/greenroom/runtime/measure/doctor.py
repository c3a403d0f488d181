"""Measurement of this machine's memory, disk, kernels and GPU, as a machine profile.

`greenroom doctor` prints the profile; the simulator and the planner read it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants

from greenroom.core.machine import Machine, Processor, Route
from greenroom.errors import UsageError
from greenroom.runtime.cuda.engine import Cuda, Engine
from greenroom.runtime.kernels.native.library import library, missing_reason
from greenroom.runtime.measure import bandwidth
from greenroom.runtime.measure.bandwidth import READ_SIZES, READ_THREADS

LEAST_BYTES = 64 << 20  # a smaller file does not show a disk's bandwidth
SUFFIXES = (".safetensors", ".gguf")


@dataclass(frozen=True, slots=True)
class Effort:
    """Sizes and durations of a machine's measurements: bytes, passes and seconds.

    ram_bytes, ram_passes: bytes of memory that are read, and how often
    file_bytes: size of the test file
    read_s, kernel_s: seconds for each measurement of the disk and of a kernel
    """

    ram_bytes: int
    ram_passes: int
    file_bytes: int
    read_s: float
    kernel_s: float


QUICK = Effort(256 << 20, 5, 256 << 20, read_s=0.2, kernel_s=0.08)
THOROUGH = Effort(512 << 20, 12, 2 << 30, read_s=1.5, kernel_s=0.8)

Report = Callable[[str], None]


def gpu_engines() -> list[Engine]:
    """Return a list with an engine for the first GPU; [] if there is no GPU."""
    return [Cuda(0)] if torch.cuda.is_available() else []


def measure_machine(
    path: Path | None = None,
    effort: Effort = THOROUGH,
    report: Report = lambda _: None,
    devices: Sequence[Engine] = (),
) -> Machine:
    """Measure this machine's memory, disk, CPU kernels and given GPUs, as a machine profile.

    path: a model's folder or file, which is read; or any other folder, in which a test file is
        written, read and deleted (default: the folder of downloaded models)
    report: called with the name of each measurement as it begins

    Raises UsageError for a wrong path or a full disk, OutputError if a file cannot be written."""
    begin = time.perf_counter()
    facts = bandwidth.host_facts() | {"kernels": kernels_here()}
    cores = os.cpu_count() or 1
    with disk_files(path, effort.file_bytes, report) as (files, where):
        direct = bandwidth.reads_directly(files[0])
        reads = {}
        for size in READ_SIZES:
            report(f"disk, reads of {size >> 10} KiB")
            for threads in READ_THREADS:
                reads[size, threads] = bandwidth.disk_bandwidth(
                    files, size, threads, direct, seconds=effort.read_s
                )
    report("memory")
    memory = {
        str(threads): bandwidth.ram_bandwidth(threads, effort.ram_passes, effort.ram_bytes)
        for threads in sorted({1, cores})
    }
    from greenroom.runtime.measure import kernels as measure_kernels

    report("kernels, experts")
    expert = measure_kernels.expert_times(effort.kernel_s)
    report("kernels, dense layers")
    dense = measure_kernels.dense_times(effort.kernel_s)
    measured: dict[str, Any] = {
        "memory": memory,
        "disk": {
            "path": str(where),
            "direct": direct,
            "reads": [
                {"nbytes": size, "threads": threads, "bandwidth": rate}
                for (size, threads), rate in reads.items()
            ],
        },
    }
    machine = Machine(
        (Route("disk", "host", bandwidth.fit_link(reads)),),
        (Processor("cpu", "host", expert, dense),),
        facts,
        measured,
    )
    for engine in devices:
        report(f"the device: {engine.name}")
        from greenroom.runtime.measure.gpu import with_device

        machine = with_device(machine, engine, effort.kernel_s)
    seconds = time.perf_counter() - begin
    return replace(machine, measured={**machine.measured, "seconds": seconds})


def kernels_here() -> str:
    """Return the variant of the compiled kernels that runs here, or why none does."""
    reason = missing_reason()
    return f"eager ({reason})" if reason else library().variant


@contextmanager
def disk_files(path: Path | None, nbytes: int, report: Report) -> Iterator[tuple[list[Path], Path]]:
    """Provide files for disk measurements within this context, and the path to show for them.

    The files are a model's weights, or a test file. Raises UsageError for a wrong path, a model of
    less than 64 MiB or a full disk.
    """
    if path is not None and not path.exists():
        raise UsageError(f"--path {path}: there is no such file or folder")
    files = model_files(path) if path is not None else []
    if files and path is not None:
        total = sum(file.stat().st_size for file in files)
        if total < LEAST_BYTES:
            raise UsageError(
                f"--path {path} has {total >> 20} MiB of weights: at least {LEAST_BYTES >> 20} MiB"
                " are needed to measure the disk; leave out --path to measure with a test file"
            )
        yield files, path
        return
    folder = path or models_folder()
    free = shutil.disk_usage(folder).free
    nbytes = min(nbytes, free // 2)
    if nbytes < LEAST_BYTES:
        raise UsageError(
            f"the disk of {folder} has {free >> 20} MiB of free space: the disk test needs at least"
            f" {2 * LEAST_BYTES >> 20} MiB; name another folder, or a model to read, with --path"
        )
    report(f"disk, writing a test file of {nbytes >> 20} MiB in {folder}")
    with bandwidth.noise_file(folder, nbytes) as file:
        yield [file], folder


def model_files(path: Path) -> list[Path]:
    """Return a model's weight files: the path itself if it is a file, else those in the folder.

    Weight files have the suffix .safetensors or .gguf.
    """
    if path.is_file():
        return [path]
    return sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())


def models_folder() -> Path:
    """Return the folder of downloaded models, or its nearest writable parent folder.

    Returns the working directory if none of these folders is writable.
    """
    folder = Path(constants.HF_HUB_CACHE)
    with contextlib.suppress(StopIteration):
        return next(each for each in (folder, *folder.parents) if os.access(each, os.W_OK))
    return Path.cwd()
