"""Check what is in a wheel and an sdist: `python release/check_files.py DIST`.

The wheel has all files of the package, its types, the demo model and the compiled kernels, and
nothing else. The sdist has the files of the repository. Both have one version.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARIES = "greenroom/runtime/kernels/native/lib"
NEEDED = ("greenroom/py.typed", "greenroom/models/demo/config.json")


def tracked(*folders: str) -> set[str]:
    """Return the files of the repository below these folders, by default all."""
    command = ["git", "-C", str(ROOT), "ls-files", *folders]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


def expected_files(package: set[str], demo: set[str]) -> set[str]:
    """Return the names in a wheel of files of the repository."""
    return {name.removeprefix("src/") for name in package} | {f"greenroom/{name}" for name in demo}


def wheel_problems(names: set[str], expected: set[str]) -> list[str]:
    """List what is missing in a wheel, and what should not be there."""
    libraries = {name for name in names if name.startswith(LIBRARIES) and name.endswith(".so")}
    info = {name for name in names if name.partition("/")[0].endswith(".dist-info")}
    missing = {*expected, *NEEDED} - names
    problems = [f"missing: {name}" for name in sorted(missing)]
    problems += [
        f"not of the package: {name}" for name in sorted(names - expected - libraries - info)
    ]
    if not libraries:
        problems.append(f"no compiled kernels in {LIBRARIES}")
    if not any(name.endswith("licenses/LICENSE") for name in info):
        problems.append("missing: the license")
    return problems


def sdist_problems(names: set[str], expected: set[str]) -> list[str]:
    """List what is missing in an sdist, and built files in it."""
    problems = [f"missing: {name}" for name in sorted({*expected, "PKG-INFO"} - names)]
    return problems + [f"a built file: {name}" for name in sorted(names) if name.endswith(".so")]


def main(folder: Path) -> None:
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        raise SystemExit(f"{folder} has {len(wheels)} wheels and {len(sdists)} sdists: one of each")
    package, demo = tracked("src/greenroom"), tracked("models/demo")
    with zipfile.ZipFile(wheels[0]) as archive:
        wheel = {name for name in archive.namelist() if not name.endswith("/")}
    with tarfile.open(sdists[0]) as archive:
        sdist = {name.partition("/")[2] for name in archive.getnames()}
    sources = {name for name in tracked() if not name.startswith(".ci/")}
    problems = [
        *(
            f"{wheels[0].name}: {each}"
            for each in wheel_problems(wheel, expected_files(package, demo))
        ),
        *(f"{sdists[0].name}: {each}" for each in sdist_problems(sdist, sources)),
    ]
    versions = wheels[0].name.split("-")[1], sdists[0].name.removesuffix(".tar.gz").split("-")[1]
    if versions[0] != versions[1]:
        problems.append(f"the wheel's version is {versions[0]}, the sdist's {versions[1]}")
    if problems:
        raise SystemExit("\n".join(problems))
    print(f"{wheels[0].name}: {len(wheel)} files; {sdists[0].name}: {len(sdist)} files")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
