"""Another process takes memory beside a model: slots are given back, and nobody is ended."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.harness import FOLDER
from tests.models import cached_tiny

PATIENCE = 90.0
LIMIT = 1400 << 20  # of the cgroup
SHARE = 0.9  # of the free memory is taken: less remains than a run leaves to others
MODEL: dict[str, Any] = {
    "hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 32, "tokenizer": True,
}  # fmt: skip
RUN = """
import json, sys, threading, time
import torch
import greenroom
from greenroom.runtime.memory.system import available_bytes

model, _ = greenroom.load(sys.argv[1], cache="100%", pressure="on", context=64)
ends = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ends.set()), daemon=True).start()
room, number = model.greenroom, 0
while not ends.is_set():
    ids = torch.randint(3, 300, (1, 24), generator=torch.Generator().manual_seed(number % 4))
    tokens = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    number += 1
    changes = [(each.at, each.before, each.slots) for each in room.pressure.changes]
    print(json.dumps({"prompt": number % 4, "tokens": tokens[0].tolist(), "slots": room.capacity,
        "filled": room.capacity - room.driver.scheduler.view.free_slots, "changes": changes,
        "free": available_bytes()}), flush=True)
room.close()
"""
HOG = """
import mmap, sys, time

memory, step = mmap.mmap(-1, int(sys.argv[1])), 4 << 20
print(time.monotonic(), flush=True)
for start in range(0, len(memory), step):
    memory[start : start + step] = b"x" * len(memory[start : start + step])
    time.sleep(0.004)  # about a gigabyte a second
print("done", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def group() -> Iterator[Any]:
    """A memory cgroup for both processes."""
    sys.path.insert(0, str(FOLDER))
    try:
        import memlimit
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("memlimit", None)
    try:
        with memlimit.memory_cgroup(LIMIT) as made:
            yield made
    except memlimit.CgroupError as error:
        pytest.skip(str(error))


class Program:
    """A program in a cgroup, and the lines that it has printed."""

    def __init__(self, group: Any, program: str, *arguments: object) -> None:
        enter = ["sh", "-c", 'echo 0 > "$0" && exec "$@"', str(group.procs)]
        self.process = subprocess.Popen(
            [*enter, sys.executable, "-c", program, *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()

    def wait_for(self, condition: Callable[[str], bool]) -> str:
        """Return the first line from now on for which the condition holds."""
        with self._changed:
            begin = max(0, len(self.lines) - 1)
            self._changed.wait_for(
                lambda: any(map(condition, self.lines[begin:])), timeout=PATIENCE
            )
            line = next(filter(condition, self.lines[begin:]), None)
        assert line is not None, f"it never happens; exit code {self.process.poll()}"
        return line

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait(PATIENCE)
        self._thread.join(PATIENCE)
        return code


@contextmanager
def running(group: Any, program: str, *arguments: object) -> Iterator[Program]:
    """A program that is ended in any case."""
    made = Program(group, program, *arguments)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


@pytest.mark.process
@pytest.mark.timeout(400)
def test_slots_are_given_back_to_a_process_and_return_after_it(group: Any) -> None:
    folder: Path = cached_tiny("qwen3_moe", **MODEL)
    with running(group, RUN, folder) as run:
        full = json.loads(run.wait_for(lambda line: '"slots"' in line))["slots"]
        line = run.wait_for(lambda line: json.loads(line)["filled"] >= 0.9 * full)
        nbytes = int(json.loads(line)["free"] * SHARE)
        with running(group, HOG, nbytes) as other:
            begin = float(other.wait_for(lambda line: True))
            other.wait_for(lambda line: "done" in line)
            run.wait_for(lambda line: json.loads(line)["slots"] < full)
            time.sleep(1)
            assert other.end() == 0  # it was not ended for want of memory
        run.wait_for(lambda line: json.loads(line)["slots"] == full)
        time.sleep(0.5)
        assert run.end() == 0
    lines = [json.loads(each) for each in run.lines]
    answers: dict[int, list[int]] = {}
    for each in lines:
        assert answers.setdefault(each["prompt"], each["tokens"]) == each["tokens"]
    changes = lines[-1]["changes"]
    first = next(at for at, before, slots in changes if slots < before)
    assert 0 < first - begin < PATIENCE
    assert changes[-1][2] == full
