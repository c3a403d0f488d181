"""Run tests with the oldest and the newest releases of what the package depends on.

    python release/try_versions.py oldest|newest [--python 3.11] [TEST ...]

`oldest` installs the lower bounds that pyproject.toml declares, `newest` the newest releases that
it admits. Both have the extras, and the test tools in their newest releases. The tests run on the
sources of this repository, with its compiled kernels.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
UV = str(Path(sys.executable).with_name("uv"))
RESOLUTION = {"oldest": "lowest-direct", "newest": "highest"}
EXTRAS = ("gguf", "pictures", "serve", "study")
TESTS = ("tests/core", "tests/hf", "tests/runtime", "tests/server", "tests/test_private_names.py")
LEFT_OUT = (
    "slow", "bench_smoke", "process", "interpreted", "portable", "browser", "ray", "offline_gpu",
)  # fmt: skip
SHOWN = ("torch", "transformers", "numba", "numpy", "safetensors", "huggingface-hub", "fastapi")


def run(*command: str) -> None:
    print("$", " ".join(command), flush=True)
    subprocess.run(command, cwd=ROOT, check=True)


def install(place: Path, which: str, python: str) -> None:
    """Make an environment with these releases, and setuptools, which torch 2.9 compiles with."""
    links = [part for each in os.environ.get("PIP_FIND_LINKS", "").split() for part in ("-f", each)]
    pip = [UV, "pip", "install", "--quiet", "--python", str(place), *links]
    extras = [part for extra in EXTRAS for part in ("--extra", extra)]
    run(UV, "venv", "--quiet", "--clear", "--seed", "--python", python, str(place))
    run(*pip, "--resolution", RESOLUTION[which], "-r", "pyproject.toml", *extras)
    frozen = place / "installed.txt"  # which the tools may not replace
    frozen.write_text("\n".join(listed(place)))
    run(*pip, "--constraint", str(frozen), "-r", "pyproject.toml", "--extra", "dev")


def listed(place: Path) -> list[str]:
    """List the releases in an environment, as `name==version`."""
    command = [UV, "pip", "list", "--python", str(place), "--format", "freeze"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", choices=RESOLUTION)
    parser.add_argument("tests", nargs="*", default=TESTS)
    parser.add_argument("--python", default="3.11", metavar="X.Y")
    args = parser.parse_args()
    place = ROOT / "build/versions" / args.which
    install(place, args.which, args.python)
    print(*(each for each in listed(place) if each.split("==")[0] in SHOWN), flush=True)
    marked = " and ".join(f"not {marker}" for marker in LEFT_OUT)
    os.environ |= {"PYTHONPATH": "src", "NUMBA_CACHE_DIR": str(place / "compiled")}
    # compressed-tensors compiles with torch's inductor: minutes on a busy machine.
    options = ("-m", marked, "-n", "2", "--timeout", "600")
    run(str(place / "bin/python"), "-m", "pytest", *options, *args.tests)


if __name__ == "__main__":
    main()
