"""Download the wheels that a GPU machine without a network lacks, in the constraints' versions.

    python3 -m pip list --format=freeze > have.txt                          # on the GPU machine
    python benchmarks/gpu_report/wheels.py --have have.txt --out wheels     # here, with a network
    python3 -m pip install --no-index --no-deps --target site wheels/*.whl  # there
    PYTHONPATH=site make gpu-report PYTHON=python3                          # there

Torch, its requirements, Triton and NumPy are assumed to be installed there, in versions that fit.
Run it in an environment of `make setup`: the requirements of packages are read from it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PREINSTALLED = ("torch", "triton", "numpy")
TESTS = ("pytest", "pytest-timeout", "pytest-xdist")
PYTHON = "3.12"
PLATFORMS = (
    "manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_24_x86_64",
    "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64",
)  # fmt: skip

Needs = dict[str, SpecifierSet]


def needed(roots: Iterable[Requirement], python: str = PYTHON) -> Needs:
    """Every package that these need, by its name, with what is asked of its version."""
    needs_by_name: Needs = {}
    waiting = list(roots)
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        first = name not in needs_by_name
        needs_by_name[name] = needs_by_name.get(name, SpecifierSet()) & one.specifier
        if first:
            waiting += [each for each in map(Requirement, requires(name) or ()) if of(each, python)]
    return needs_by_name


def of(one: Requirement, python: str) -> bool:
    """Does a requirement apply on the GPU machine, without extras?"""
    markers = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    return one.marker is None or one.marker.evaluate(markers)


def requirements(python: str = PYTHON) -> Needs:
    """Requirements of Greenroom and its tests, without torch, Triton, NumPy and their own."""
    project = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert listed is not None
    roots = [Requirement(each) for each in re.findall(r'"(.+?)"', listed[1])]
    every = needed([*roots, *map(Requirement, TESTS)], python)
    brought = needed([Requirement("torch")], python).keys() | set(PREINSTALLED)
    return {name: specifier for name, specifier in every.items() if name not in brought}


def lacking(needs: Needs, have: str) -> list[str]:
    """Packages that `pip list --format=freeze` lacks, or has in a version that does not fit."""
    installed = dict(line.split("==", 1) for line in have.split() if "==" in line)
    versions = {canonicalize_name(name): version for name, version in installed.items()}
    return sorted(
        name
        for name, specifier in needs.items()
        if name not in versions or not specifier.contains(versions[name], prereleases=True)
    )


def pinned(names: Iterable[str]) -> list[str]:
    """`name==version` of each package in constraints.txt; SystemExit if one is missing."""
    lines = (ROOT / "constraints.txt").read_text().split()
    versions_by_name = {canonicalize_name(line.split("==")[0]): line for line in lines}
    if missing := [name for name in names if name not in versions_by_name]:
        raise SystemExit(f"constraints.txt pins no version of {', '.join(missing)}")
    return [versions_by_name[name] for name in names]


def command(names: Sequence[str], out: Path, python: str) -> list[str]:
    """pip's command that downloads exactly these."""
    pip_command: list[Any] = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    pip_command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for platform in PLATFORMS:
        pip_command += ["--platform", platform]
    return [*map(str, pip_command), "--dest", str(out), *names]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the wheels")
    parser.add_argument("--have", type=Path, help="what the machine has: pip list --format=freeze")
    parser.add_argument("--python", default=PYTHON, help=f"its Python (default: {PYTHON})")
    args = parser.parse_args(arguments)
    names = lacking(requirements(args.python), args.have.read_text() if args.have else "")
    if not names:
        print("the machine has everything")
        return
    subprocess.run(command(pinned(names), args.out, args.python), check=True)
    sizes = {path.name: path.stat().st_size for path in sorted(args.out.glob("*.whl"))}
    for name, size in sizes.items():
        print(f"{size / 2**20:8.1f} MiB  {name}")
    print(f"{sum(sizes.values()) / 2**20:8.1f} MiB in {len(sizes)} wheels")


if __name__ == "__main__":
    main()
