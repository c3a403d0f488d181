"""Build hook: compile the kernels of native/, and put the libraries into the package.

With GREENROOM_KERNELS=off nothing is compiled. Experts are then computed by the eager kernel.
`version` gives the package its version: pyproject.toml names it as the source.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, NoReturn

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SWITCH = "GREENROOM_KERNELS"
VERSION = "GREENROOM_VERSION"
LIBRARIES = "greenroom/runtime/kernels/native/lib"
# C++ that the kernels need and older compilers refuse. GCC 12 and Clang 15 compile it.
PROBE = """
#include <bit>
typedef float Four __attribute__((vector_size(16)));
template <class T> concept Small = sizeof(T) <= 16;
constexpr auto swap = [](Small auto a) { return __builtin_shufflevector(a, a, 1, 0, 3, 2); };
Four use(Four a) { return swap(a); }
static_assert(std::bit_cast<unsigned>(1.0f) == 0x3f800000);
"""


class KernelBuild(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the kernels before a wheel or an editable install is made."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernels, and tag the wheel for this platform and any Python 3."""
        root, folder = Path(self.root), Path(self.root, "src", LIBRARIES)
        switch = os.environ.get(SWITCH, "on")
        if switch not in ("on", "off"):
            fail(f"{SWITCH} is on or off, not {switch!r}")
        if switch == "off":
            shutil.rmtree(folder, ignore_errors=True)
            return
        compile_kernels(root)
        if version != "editable":  # which reads the folder itself
            for library in folder.glob("*.so"):
                build_data["force_include"][str(library)] = f"{LIBRARIES}/{library.name}"
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data.update(tag=f"py3-none-{platform}", pure_python=False)


def version(root: Path = Path(__file__).parent) -> str:
    """Return the version: a release at a tag such as v0.2.0, else a development version.

    After a tag that is 0.2.1.dev5+g0a1b2c3 (5 commits later, and their last). Where git knows no
    tag, it is the newest version of CHANGELOG.md with .dev0. An sdist has its version in PKG-INFO.
    GREENROOM_VERSION replaces all of this, for builds of a tag without its repository.
    """
    if given := os.environ.get(VERSION):
        return given
    if (root / "PKG-INFO").is_file():
        return first_group(r"^Version: (.+)$", (root / "PKG-INFO").read_text())
    planned = first_group(r"^## (\d+\.\d+\.\d+)", (root / "CHANGELOG.md").read_text())
    described = describe(root)
    tag = re.fullmatch(r"v(\d+)\.(\d+)\.(\d+)-(\d+)-(g\w+?)(-dirty)?", described)
    if tag is None:
        commit = re.fullmatch(r"(\w+?)(-dirty)?", described)
        return f"{planned}.dev0" + (f"+g{commit[1]}{'.dirty' * bool(commit[2])}" if commit else "")
    major, minor, patch, later, name, dirty = tag.groups()
    if later == "0" and not dirty:
        return f"{major}.{minor}.{patch}"
    return f"{major}.{minor}.{int(patch) + 1}.dev{later}+{name}{'.dirty' if dirty else ''}"


def first_group(pattern: str, text: str) -> str:
    """Return what a pattern's group matches in a text; the build ends if nothing does."""
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        raise SystemExit(f"greenroom: no line fits {pattern}, from which the version is read")
    return found[1]


def describe(root: Path) -> str:
    """Return git's name of the checkout: tag, distance and commit, or the commit, or nothing.

    A folder without .git of its own may lie within another repository, which is not asked.
    """
    git = ["git", "-C", str(root), "describe", "--tags", "--match", "v[0-9]*.[0-9]*.[0-9]*"]
    for options in ("--long", "--always") if (root / ".git").exists() else ():
        command = [*git, options, "--abbrev=8", "--dirty"]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError:  # git is not installed
            return ""
        if done.returncode == 0:
            return done.stdout.strip()
    return ""


def compile_kernels(root: Path) -> None:
    """Compile the libraries into the package's folder, as `make native` does."""
    build, cmake, ninja = str(root / "build/native"), program("cmake"), program("ninja")
    environment = {**os.environ, "CXX": compiler()}
    configure = ["-S", str(root / "native"), "-B", build, "-G", "Ninja"]
    for step in ([*configure, f"-DCMAKE_MAKE_PROGRAM={ninja}"], ["--build", build]):
        done = subprocess.run([cmake, *step], env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.stderr.write(done.stdout + done.stderr)
            fail("the kernels of native/ do not compile: see the compiler's messages above")


def program(name: str) -> str:
    """Return the path of a build tool of this Python's environment, or of the system."""
    folders = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    path = shutil.which(name, path=folders)
    return path or fail(f"{name} is missing, with which the kernels of native/ are compiled")


def compiler() -> str:
    """Return the command of the first C++ compiler that has all that the kernels need."""
    commands = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for command in commands:
        words = shlex.split(command)
        probe = [*words, "-std=gnu++20", "-fsyntax-only", "-x", "c++", "-"]
        if shutil.which(words[0]):
            done = subprocess.run(probe, input=PROBE, capture_output=True, text=True)
            if done.returncode == 0:
                return command
    return fail(
        f"no C++20 compiler for the kernels of native/ ({', '.join(commands)}): install GCC 12,"
        " Clang 15 or later, as apt install g++ does"
    )


def fail(reason: str) -> NoReturn:
    """End the build with one line, which also names the way without compiled kernels."""
    raise SystemExit(
        f"greenroom: {reason}; or set {SWITCH}=off to install without compiled kernels, which is"
        " slower"
    )
