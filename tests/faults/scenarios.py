"""What is done while operations fail: one scenario for each part that reads, writes or waits.

A scenario works below `root`: `root/model` and other inputs, which it only reads, and `root/work`,
which begins as `begin` left it. `run` returns its result, or raises GreenroomError, or Refused for
a command. Its second run in the same folder must have the right result, whatever failed before.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from greenroom.cli import main
from greenroom.core.cost import Link
from greenroom.core.machine import Machine, Processor, Route, Table
from greenroom.errors import GreenroomError
from greenroom.refusals import name_refusals
from greenroom.trace import load as load_trace
from greenroom.trace.journal import journal_path
from tests.hub_server import HubServer, use
from tests.models import cached_tiny
from tests.server.rig import Served, draw

DATA = Path(__file__).parents[1] / "data"
PROMPT = "The green room is where"
FEW = ("--cache", "25%", "--max-new-tokens", 6, "--temperature", 0)
atexit.register(gc.unfreeze)  # some libraries count their instances as Python ends
SIZES = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64}


class Refused(GreenroomError):
    """A command that ended with an error; the message is its line."""


@dataclass(frozen=True)
class Scenario:
    """What is done, and which kinds of faults it is not tried with.

    begin:  fills `root` once; root/work is copied for every run
    run:    what is done while an operation fails
    result: what is compared, from what `run` returned and left
    spared: kinds of faults that it cannot notice
    """

    begin: Callable[[Path], None]
    run: Callable[[Path], Any]
    result: Callable[[Path, Any], Any] = lambda root, value: value
    spared: tuple[str, ...] = ()


def command(*argv: object, logs: bool = False) -> str:
    """Run a command in this process; what it printed. Refused with its line if it fails.

    A traceback is a mistake, unless the command `logs` what happened to a request.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(each) for each in argv])
    if code == 0:
        return out.getvalue()
    shown = [line for line in err.getvalue().splitlines() if line.startswith("greenroom: ")]
    assert len(shown) == 1, f"exit code {code} with these lines:\n{err.getvalue()}"
    assert logs or "Traceback" not in err.getvalue(), err.getvalue()
    raise Refused(shown[0].removeprefix("greenroom: "))


def digests(folder: Path) -> dict[str, str]:
    """Path below the folder -> digest of the file."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# ---- a model from disk


def add_model(root: Path) -> None:
    """Copy a tiny model to root/model."""
    shutil.copytree(
        cached_tiny("qwen3_moe", dtype="bfloat16", tokenizer=True, **SIZES), root / "model"
    )
    (root / "work").mkdir()


def add_gguf(root: Path) -> None:
    (root / "work").mkdir()
    shutil.copyfile(DATA / "gguf" / "Q8_0.gguf", root / "model.gguf")


def add_pack(root: Path) -> None:
    add_model(root)
    command("pack", root / "model", "-o", root / "pack", "--experts", "int8")


def answer(model: Path) -> Any:
    ran = json.loads(command("run", model, PROMPT, "--raw", *FEW, "--json"))
    return ran["token_ids"]


def answer_with_history(root: Path) -> Any:
    """An answer of a run that reads and writes what earlier runs left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "work" / "cache"))
        patch.setenv("GREENROOM_LEARNED", "on")
        return answer(root / "model")


def add_machine(root: Path) -> None:
    """A model, and a machine with a disk of 1 GB/s that computes an expert in a millisecond."""
    add_model(root)
    table = Table((1_000_000,), (1,), ((0.001,),))
    disk, host = Route("disk", "host", Link(1e9, 0.0, 2)), Processor("cpu", "host", table, table)
    profile = Machine((disk,), (host,))
    (root / "machine.json").write_text(json.dumps(profile.as_json()))


def tune(root: Path) -> None:
    """Measure a run's settings, and store the best."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "work" / "cache"))
        patch.setenv("GREENROOM_LEARNED", "on")
        short = ("--rounds", 1, "--tokens", 16, "--seconds", 1, "--kernels", "eager")
        machine = ("--machine", root / "machine.json")
        command("tune", root / "model", "--cache", "25%", *short, *machine)


def verdict(root: Path) -> Any:
    """What `verify` says about a pack: it reads every byte."""
    return command("verify", root / "pack", "--cache", "25%").splitlines()[-1].split(":")[0]


# ---- what is written


def pack(root: Path) -> None:
    out = root / "work" / "pack"
    if not out.exists():
        command("pack", root / "model", "-o", out, "--experts", "int8")


def add_prompts(root: Path) -> None:
    add_model(root)
    lines = [{"prompt": PROMPT, "label": "stage"}, {"prompt": "def f(x):"}]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))


def record(root: Path) -> Any:
    """A recording's arrays; a recording that was broken off is continued."""
    out = root / "work" / "t.trace"
    if not out.exists() or journal_path(out).exists():
        command(
            "trace", "record", root / "model", "--prompts", root / "prompts.jsonl", "-o", out,
            *FEW, "--kernels", "eager", "--weights", "--raw",
        )  # fmt: skip
    trace = load_trace(out)
    assert trace.weights is not None
    return trace.experts.tolist(), trace.weights.tolist(), list(trace.labels)


def add_batch(root: Path) -> None:
    add_model(root)
    lines = [
        {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions",
         "body": {"model": "model", "prompt": f"Once {number}", "max_tokens": 3, "temperature": 0}}
        for number in range(4)
    ]  # fmt: skip
    (root / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def batch(root: Path) -> None:
    command("batch", root / "model", root / "in.jsonl", "-o", root / "work" / "out.jsonl",
            "--cache", "25%", "--context", 64, "--batch-invariant", logs=True)  # fmt: skip


def batch_texts(root: Path, _: Any) -> dict[str, str]:
    out = root / "work" / "out.jsonl"
    found = [json.loads(line) for line in out.read_text().splitlines()]
    found.sort(key=lambda each: each["custom_id"])
    assert [each["custom_id"] for each in found] == ["r0", "r1", "r2", "r3"]
    return {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in found}


def add_hub(root: Path) -> None:
    """Start a hub in a process of its own, which serves the model and ends with this process."""
    add_model(root)
    shutil.copytree(root / "model", root / "hub" / "tiny" / "moe")
    hub = [sys.executable, "-m", "tests.hub_server", root / "hub", "0"]
    unarmed = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    process = subprocess.Popen(
        hub, env=unarmed, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    atexit.register(process.kill)
    assert process.stdout is not None
    (root / "port").write_text(process.stdout.readline().strip().rpartition(":")[2])


def pull(root: Path) -> None:
    """A model from a hub on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        use(patch, HubServer(port=port_of(root)), root / "work" / "hub")
        command("pull", "tiny/moe")


@cache
def port_of(root: Path) -> int:
    return int((root / "port").read_text())


def pulled(root: Path, _: Any) -> dict[str, str]:
    (snapshot,) = (root / "work" / "hub").glob("models--tiny--moe/snapshots/*")
    found = digests(snapshot)
    found.pop("README.md")
    return found


# ---- a server


def serve(root: Path) -> Any:
    """Answers of three requests that run together."""
    with name_refusals():
        served = Served(root / "model", max_batch=3, batch_invariant=True)
    try:
        asked = [served.ask(draw(20, seed), 5) for seed in range(3)]
        ended = [each.end() for each in asked]
        failed = [each.error for each in ended if each.error is not None]
        assert len(failed) <= 1, failed
        if failed:
            raise failed[0]
        return [each.ids for each in asked]
    finally:
        served.close()


def serve_with_prompts(root: Path) -> Any:
    """The answer to a prompt whose beginning an earlier server has stored, twice."""
    options: dict[str, Any] = {"prompt_cache": str(root / "work" / "prompts"), "context": 600}
    found = []
    for _ in range(2):
        with name_refusals():
            served = Served(root / "model", **options)
        try:
            asked = served.ask(draw(400, 1), 5)
            if (error := asked.end().error) is not None:
                raise error
            found.append(asked.ids)
        finally:
            served.close()
    return found


SCENARIOS = {
    "run": Scenario(add_model, lambda root: answer(root / "model")),
    "run-gguf": Scenario(add_gguf, lambda root: answer(root / "model.gguf")),
    "run-pack": Scenario(add_pack, lambda root: answer(root / "pack")),
    "run-learned": Scenario(add_model, answer_with_history),
    "tune": Scenario(add_machine, tune),
    "verify-pack": Scenario(add_pack, verdict),
    "pack": Scenario(  # it names itself after the header that it has just written, and reads again
        add_model, pack, lambda root, _: digests(root / "work" / "pack"), spared=("wrong",)
    ),
    "trace-record": Scenario(add_prompts, record),
    "batch": Scenario(add_batch, batch, batch_texts, spared=("wrong",)),  # JSONL has no checksum
    "pull": Scenario(add_hub, pull, pulled),
    "serve": Scenario(add_model, serve),
    "serve-prompts": Scenario(add_model, serve_with_prompts),
}


@contextlib.contextmanager
def prepared(name: str, root: Path) -> Iterator[Scenario]:
    """The scenario with its inputs below `root`, and a copy of root/work to begin with."""
    scenario = SCENARIOS[name]
    scenario.begin(root)
    shutil.copytree(root / "work", root / "work-begin")
    yield scenario


def reset(root: Path) -> None:
    """Let root/work be as it was in the beginning."""
    shutil.rmtree(root / "work")
    shutil.copytree(root / "work-begin", root / "work")
