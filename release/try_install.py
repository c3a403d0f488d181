"""Install a wheel in fresh environments and use it there: `python release/try_install.py DIST`.

An environment for each Python from 3.11 to 3.14 on this machine, with the package's extras. All
commands run outside of the repository, with empty caches. `--tools` tries pipx and uvx too.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
EXTRAS = "serve,gguf,study,pictures"
TOOLS = Path(sys.executable).parent  # where uv, uvx and pipx are
PORT = 8765
# Each line is tried in each environment.
COMMANDS = (
    ("greenroom", "--version"),
    ("greenroom", "run", "demo", "Once", "--max-new-tokens", "8"),
    ("greenroom", "verify", "demo", "--cache", "25%"),
    ("greenroom", "doctor", "--quick"),
)
TYPED = (
    "import gguf, greenroom, greenroom.study as s, pathlib; f = pathlib.Path(greenroom.__file__);"
    " assert f.with_name('py.typed').is_file() and 'site-packages' in str(f), f; s.table"
)


def clean_environment(folder: Path) -> dict[str, str]:
    """Return this process's environment without Python's and Greenroom's variables."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "GREENROOM_", "VIRTUAL"))
    }
    return {**kept, "XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}


def run(command: Sequence[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a command in a folder and show its last line; return what it prints."""
    begin = time.monotonic()
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    shown = " ".join([Path(command[0]).name, *command[1:]])
    if done.returncode:
        raise SystemExit(f"{shown}: exit code {done.returncode}\n{done.stdout}")
    last = (done.stdout.strip().splitlines() or [""])[-1]
    print(f"  {shown[:100]} ({time.monotonic() - begin:.0f} s)\n    {last[:160]}", flush=True)
    return done.stdout


def find_python(version: str) -> str | None:
    """Return the path of an interpreter on this machine that can make environments, or None."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    installed = sorted(pyenv.glob(f"{version}.*/bin/python"))
    for each in filter(None, [shutil.which(f"python{version}"), *map(str, installed)]):
        check = "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([each, "-c", check], cwd="/", capture_output=True, text=True)
        if done.stdout.strip() == version:
            return each
    return None


def install(python: str, place: Path, wheel: Path, constraint: Path | None) -> None:
    """Make an environment, and install the wheel with its extras in it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = clean_environment(folder)
        environment.pop("XDG_CACHE_HOME")  # downloads stay
        if "PIP_FIND_LINKS" in environment:
            environment["UV_FIND_LINKS"] = environment["PIP_FIND_LINKS"]
        uv, into = str(TOOLS / "uv"), ["--quiet", "--python", str(place)]
        pinned = ["--constraint", str(constraint)] if constraint else []
        run([uv, "venv", "--quiet", "--clear", "--python", python, str(place)], folder, environment)
        package = f"greenroom[{EXTRAS}] @ {wheel.as_uri()}"
        run([uv, "pip", "install", *into, *pinned, package], folder, environment)
        run([uv, "pip", "check", "--python", str(place)], folder, environment)


def use(place: Path, wheel: Path) -> None:
    """Run the commands in an environment, and ask a server for its health."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = clean_environment(folder)
        for command in COMMANDS:
            text = run([str(place / "bin" / command[0]), *command[1:]], folder, environment)
            if command[1:] == ("--version",) and text.split() != ["greenroom", version_of(wheel)]:
                raise SystemExit(f"{wheel.name} says {text.strip()}")
        run([str(place / "bin/python"), "-c", TYPED], folder, environment)
        ask_server(
            [str(place / "bin/greenroom"), "serve", "demo", "--port", str(PORT)],
            folder,
            environment,
        )


def version_of(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def ask_server(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Start a server, let it answer a request, and stop it."""
    log = folder / "server.log"
    body = b'{"model": "demo", "prompt": "Once", "max_tokens": 4}'
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with (
        log.open("w") as out,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT
        ) as server,
    ):
        try:
            for _ in range(240):
                time.sleep(0.5)
                try:
                    with urllib.request.urlopen(request, timeout=60) as answer:
                        print(f"  greenroom serve demo\n    {answer.read().decode()[:160]}")
                        return
                except OSError:
                    if server.poll() is not None:
                        break
            raise SystemExit(f"greenroom serve demo does not answer\n{log.read_text()}")
        finally:
            server.terminate()


def try_tools(wheel: Path, constraint: Path | None) -> None:
    """Run the demo by `uvx` and by `pipx install`, in folders of their own."""
    with tempfile.TemporaryDirectory(dir=wheel.parents[1] / "build") as name:
        folder = Path(name)
        environment = clean_environment(folder)
        environment.pop("XDG_CACHE_HOME")
        environment |= {
            "UV_TOOL_DIR": f"{folder}/uv",
            "PIPX_HOME": f"{folder}/pipx",
            "PIPX_BIN_DIR": f"{folder}/bin",
        }
        if constraint:
            environment |= {"UV_CONSTRAINT": str(constraint), "PIP_CONSTRAINT": str(constraint)}
        if "PIP_FIND_LINKS" in environment:
            environment["UV_FIND_LINKS"] = environment["PIP_FIND_LINKS"]
        demo = ["run", "demo", "Once", "--max-new-tokens", "8"]
        with_python = ["--python", sys.executable]
        run([str(TOOLS / "pipx"), "install", *with_python, str(wheel)], folder, environment)
        run([f"{folder}/bin/greenroom", *demo], folder, environment)
        uvx = [str(TOOLS / "uvx"), *with_python, "--from", str(wheel), "greenroom"]
        run([*uvx, *demo], folder, environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", type=Path)
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="X.Y")
    parser.add_argument("--constraint", type=Path, help="versions of packages, as pip has it")
    parser.add_argument("--envs", type=Path, default=Path("build/install"))
    parser.add_argument("--tools", action="store_true", help="pipx and uvx too")
    parser.add_argument(
        "--remove", action="store_true", help="remove each environment after its use"
    )
    args = parser.parse_args()
    constraint = args.constraint.resolve() if args.constraint else None
    (wheel,) = args.dist.resolve().glob("*.whl")
    tried = []
    for version in args.python:
        if not re.fullmatch(r"3\.\d+", version):
            parser.error(f"--python takes versions such as 3.12, not {version}")
        if (python := find_python(version)) is None:
            print(f"Python {version}: not on this machine (uv python install {version})")
            continue
        print(f"Python {version}: {python}", flush=True)
        place = args.envs.resolve() / version
        install(python, place, wheel, constraint)
        use(place, wheel)
        tried.append(version)
        if args.remove:
            shutil.rmtree(place)
    if not tried:
        raise SystemExit("no Python to try the wheel with")
    if args.tools:
        try_tools(wheel, constraint)
    print(f"{wheel.name}: works with Python {', '.join(tried)}")


if __name__ == "__main__":
    main()
