"""Kernels read nothing beyond a row's end, whatever its width and the processor (widths.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import pytest

ROOT = Path(__file__).parents[3]
HOST = llvm.get_host_cpu_features()
# Names of processors and the features that are taken from this one.
SETS = {
    "this processor": ("", ()),
    "rows side by side": ("icelake-server", ()),
    "AVX-512 without VNNI": ("skylake-avx512", ("avx512vnni", "avx512bf16", "avxvnni")),
    "AVX2": ("haswell", ("avx512", "avxvnni")),
}


def widths(*args: str, name: str = "", without: tuple[str, ...] = ()) -> None:
    """Run the cases in a process of their own; it fails where one is wrong or kills it."""
    env = dict(os.environ)
    if name:
        flags = {f: on and not f.startswith(without or ("none",)) for f, on in HOST.items()}
        env["NUMBA_CPU_NAME"] = name
        env["NUMBA_CPU_FEATURES"] = ",".join(f"{'-+'[on]}{f}" for f, on in sorted(flags.items()))
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.runtime.kernels.widths", *args]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.strip().endswith(" 0 wrong")


@pytest.mark.process
def test_kernels_read_nothing_beyond_rows_near_whole_vectors() -> None:
    widths()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("which", SETS)
def test_kernels_read_nothing_beyond_rows_of_every_width(which: str) -> None:
    name, without = SETS[which]
    if name and not HOST.get("avx512vnni" if name == "icelake-server" else "avx2"):
        pytest.skip("not a processor that has these instructions")
    widths("--all", name=name, without=without)
