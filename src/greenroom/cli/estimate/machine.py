"""Machine profiles: their path, their measurement, and the choice of a processor."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, overload

from greenroom.cli.terminal.files import check_target, write_file
from greenroom.cli.terminal.progress import Progress, quiet

if TYPE_CHECKING:
    from greenroom.core.machine import Machine, Processor


def default_profile() -> Path:
    """Return the path of this machine's profile, in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "greenroom" / "machine.json"


@overload
def profile(source: str) -> Machine: ...
@overload
def profile(source: None) -> None: ...
def profile(source: str | None) -> Machine | None:
    """Load a machine profile from a file; `auto` is this machine's; None returns None.

    ProfileError if the file is missing or damaged.
    """
    from greenroom.core.machine import Machine

    if source is None:
        return None
    return Machine.load(default_profile() if source == "auto" else source)


def measure(
    path: Path | None, quick: bool, progress: Progress, output: Path | None = None
) -> Machine:
    """Measure this machine, save its profile, and return it.

    path:   folder or file whose disk is measured (default: the folder of downloaded models)
    quick:  whether to measure less exactly, in under 30 seconds
    output: file of the profile (default: the one that `auto` loads)

    UsageError for an unusable path, OutputError if the profile cannot be written.
    """
    target = output or default_profile()
    if output is None:
        target.parent.mkdir(parents=True, exist_ok=True)
    check_target(target)

    from greenroom.hf.measure.dry_run import with_dry_run
    from greenroom.runtime.measure import doctor
    from greenroom.runtime.measure.doctor import (
        QUICK,
        THOROUGH,
        measure_machine,
        model_files,
        models_folder,
    )

    def say(text: str) -> None:
        progress.say(f"measuring {text}")

    machine = measure_machine(path, QUICK if quick else THOROUGH, say, doctor.gpu_engines())
    say("a small model")
    quiet()
    # On the disk that was measured, but never in a model's folder.
    usable = path is not None and path.is_dir() and not model_files(path)
    machine = with_dry_run(machine, path if usable and path is not None else models_folder())
    progress.clear()
    write_file(target, json.dumps(machine.as_json(), indent=1) + "\n")
    return machine


def machine_of(source: str, progress: Progress) -> tuple[Machine, bool]:
    """Load a machine profile; return it, and whether it describes this machine.

    `source` is a file or `auto`; with `auto` this machine is measured first if it has no profile.
    """
    from greenroom.core.machine import machine_name
    from greenroom.runtime.measure.bandwidth import host_facts

    if source == "auto" and not default_profile().exists():
        progress.clear()
        print("this machine has no profile yet: measuring it quickly", file=sys.stderr)
        return measure(None, True, progress), True
    machine = profile(source)
    return machine, machine_name(machine.host) == machine_name(host_facts())


def processor_for(machine: Machine, name: str | None) -> Processor:
    """Return the processor of a machine with this name, or a default one for None.

    The default is the first GPU, or the first processor if there is no GPU. UnknownName if there
    is no processor of that name.
    """
    if name is not None:
        return machine.processor(name)
    return next((p for p in machine.processors if on_a_gpu(p)), machine.processors[0])


def on_a_gpu(processor: Processor) -> bool:
    """Check whether a processor is a GPU: whether its memory is the device's."""
    return processor.memory == "device"


def memory_of(machine: Machine, gpu: bool) -> int:
    """Return the size in bytes of a machine's memory, or of its GPU's; 0 if not measured."""
    if gpu:
        return int(machine.measured.get("device", {}).get("memory_bytes", 0))
    return int(machine.host.get("memory_bytes", 0))
