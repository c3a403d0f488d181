"""The patches, and copies of the package to which one of them is applied."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
PACKAGE = "src/greenroom"


def patches(suite: str) -> dict[str, Path]:
    """Return the patches of a suite by name: of `fuzz`, `faults`, `memory` or `schedules`."""
    return {path.stem: path for path in sorted((FOLDER / suite).glob("*.patch"))}


def check_applies(patch: Path, folder: Path) -> None:
    """Raise CalledProcessError unless a patch applies to the sources; `folder` is empty."""
    for name in changed(patch):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    subprocess.run(["git", "apply", "--check", str(patch)], cwd=folder, check=True)


def changed(patch: Path) -> list[str]:
    """Return the files that a patch changes."""
    return re.findall(r"^\+\+\+ b/(.+)$", patch.read_text(), re.MULTILINE)


def make_copy(folder: Path, patch: Path | None) -> Path:
    """Copy the package to a folder, apply a patch, and return the path of sources.

    All files but the changed ones are links to the originals.
    """
    shutil.copytree(
        ROOT / PACKAGE, folder / PACKAGE, copy_function=os.symlink,
        ignore=shutil.ignore_patterns("__pycache__"),
    )  # fmt: skip
    if patch is not None:
        for name in changed(patch):
            (folder / name).unlink()
            shutil.copy(ROOT / name, folder / name)
        subprocess.run(["git", "apply", str(patch)], cwd=folder, check=True)
    return folder / "src"


def report_missed(names: Iterable[str], is_found: Callable[[str], bool]) -> int:
    """Try defects by name, print those that are not found, and return the exit code."""
    missed = [name for name in names if not is_found(name)]
    print(f"missed: {', '.join(missed) or 'none'}")
    return 1 if missed else 0
