"""Compile the CPU kernels in a second process while the first imports torch and transformers.

The first answer on a machine waits for the compilation and for the imports: 6 seconds each on two
cores. If the weight type or the layout of the matrices was guessed wrong, the first process
compiles the missing kernels itself.

    python -m greenroom.runtime.kernels.precompile bfloat16
"""

from __future__ import annotations

import atexit
import hashlib
import os
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

import greenroom.core
from greenroom.core.compiling.compile_folder import folder
from greenroom.interrupts import end_with_parent

TIMEOUT_S = 120
_child: subprocess.Popen[bytes] | None = None


def compile_all(dtype: str) -> None:
    """Compile the CPU kernels for unencoded matrices of one weight type, such as bfloat16."""
    from greenroom.runtime.kernels.codegen.entries import expert_group
    from greenroom.runtime.kernels.codegen.jit import machine_code

    machine_code(expert_group.compute_group, dtype, False, False)
    for small in (expert_group.combine,):
        machine_code(small, dtype)
    with suppress(OSError):  # a read-only folder keeps no marker
        folder().mkdir(0o700, parents=True, exist_ok=True)
        _marker(dtype).touch()


@cache
def _sources() -> str:
    """Return a digest of all sources of kernels.

    The compile cache's own digests are more precise, but computing them imports Numba.
    """
    package = Path(greenroom.core.__file__).parents[1]
    paths = [*package.glob("core/**/*.py"), *package.glob("runtime/kernels/**/*.py")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths)))
    return digest.hexdigest()[:16]


def _marker(dtype: str) -> Path:
    """Return the path of the file that marks complete compilation for a weight type."""
    python = "".join(map(str, sys.version_info[:2]))
    return folder() / f"ahead-{dtype}-{_sources()}-numba{version('numba')}-py{python}.done"


def start_compiling(dtype: str) -> None:
    """Start a process that compiles the CPU kernels for a weight type, such as bfloat16.

    Nothing happens if the kernels are compiled already, or if the process has been started before,
    or if the machine has one core or the folder of compiled code is not writable.
    """
    global _child
    if _child or (os.cpu_count() or 1) < 2 or _marker(dtype).exists():
        return
    with suppress(OSError):
        folder().mkdir(0o700, parents=True, exist_ok=True)
    if not os.access(folder(), os.W_OK):
        return
    _child = subprocess.Popen(
        [sys.executable, "-m", __name__, dtype],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    atexit.register(_child.kill)


def wait_for_compiling() -> None:
    """Wait until the process that compiles the CPU kernels has ended, at most 120 seconds.

    After that time the process is killed. Returns at once if no process was started.
    """
    global _child
    if _child is not None:
        try:
            _child.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _child.kill()
        atexit.unregister(_child.kill)
        _child = None


if __name__ == "__main__":
    end_with_parent()
    compile_all(sys.argv[1])
