"""Ctrl-C at moments that lose an ordinary KeyboardInterrupt, in processes that import nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from greenroom.interrupts import hold_interrupts

PROGRAM = """
import ctypes, gc, os, sys, threading, time, weakref
from pathlib import Path
import greenroom.cli as cli
import greenroom.interrupts
from greenroom.cli import models
from greenroom.interrupts import mark_handled, undo_on_interrupt

greenroom.interrupts.END_S = 0.5
out = Path(sys.argv.pop())

def ready():
    print("ready", flush=True)

def sit(seconds=0.6):  # Python code, so that the exception is raised here
    until = time.monotonic() + seconds
    ready()
    while time.monotonic() < until:
        pass

def in_c():  # without the lock of Python, and never interrupted
    library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(lock)
    ready()
    library.pthread_mutex_lock(lock)

{moment}

models.main = command
sys.argv = ["greenroom", "models"]
sys.exit(cli.main())
"""
MOMENTS = {
    "anywhere": """
def command(args):
    sit(60)
""",
    "a finaliser": """
class Finalised:
    def __del__(self):
        sit()
def command(args):
    Finalised()
    time.sleep(60)
""",
    "a weak reference's callback": """
class Referred: pass
def command(args):
    it = Referred()
    ref = weakref.ref(it, lambda ref: sit())
    del it
    time.sleep(60)
""",
    "a callback of ctypes": """
def command(args):
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    def compare(a, b):
        sit()
        return 0
    ctypes.CDLL(None).qsort((ctypes.c_int * 2)(2, 1), 2, 4, kind(compare))
    time.sleep(60)
""",
    "a library that catches everything": """
def command(args):
    try:
        sit()
    except BaseException:
        pass
    time.sleep(60)
""",
    "an import that makes another error of it": """
def command(args):
    try:
        sit(60)
    except BaseException:
        raise ImportError("half imported") from None
""",
    "a call into C": """
def command(args):
    in_c()
""",
    "what is not left half done": """
from greenroom.interrupts import defer_interrupts
def command(args):
    draft = out / "draft"
    with defer_interrupts():
        draft.write_text("half")
        sit(0.2)
        draft.unlink()
    time.sleep(60)
""",
    "an import that must not be interrupted": """
def command(args):
    package = out / "path" / "torch.py"
    package.parent.mkdir()
    package.write_text(
        "import __main__, shutil\\n__main__.sit(0.2)\\n"
        f"shutil.rmtree({str(package.parent)!r})\\n"  # not reached where it is interrupted
    )
    sys.path.insert(0, str(package.parent))
    sys.modules.pop("torch", None)
    import torch
    sit(60)
""",
    "a child that would complain": """
import subprocess
def command(args):
    code = "import sys; sys.stdin.read(); print('where is my parent?', file=sys.stderr)"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    in_c()
""",
    "an end that takes long": """
def command(args):
    try:
        sit(60)
    finally:
        time.sleep(60)
""",
    "a thread that nobody ends": """
def command(args):
    threading.Thread(target=time.sleep, args=(60,)).start()
    sit(60)
""",
    "the end of Python": """
def command(args):
    class Last:
        def __del__(self):
            in_c()
    sys.last_of_all = Last()
    threading.Thread(target=in_c).start()
""",
    "a file that is half written": """
from greenroom.errors import UsageError
def command(args):
    draft = out / "draft"
    draft.write_text("half")
    with undo_on_interrupt(draft.unlink):
        in_c()
""",
}


def start(moment: str, folder: Path) -> subprocess.Popen[str]:
    """The process, at that moment."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("{moment}", moment), str(folder)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()
    return process


UNFINISHED = """
import signal, sys, time
from pathlib import Path
from greenroom.interrupts import undo_on_interrupt
draft, whole = Path(sys.argv[1]) / "draft", Path(sys.argv[1]) / "whole"
for path in (draft, whole):
    path.write_text("")
with undo_on_interrupt(whole.unlink):
    pass
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
with undo_on_interrupt(draft.unlink):
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_terminated_process_removes_what_is_unfinished(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", UNFINISHED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.wait(50) == -signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_ends_it_with_one_line_and_leaves_nothing(moment: str, tmp_path: Path) -> None:
    process = start(MOMENTS[moment], tmp_path)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, err = process.communicate(timeout=50)
    assert time.monotonic() - began < 30  # half a second, on a machine that has time
    assert (process.returncode, err) == (130, "greenroom: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_what_a_command_stops_for_by_itself_goes_on() -> None:
    process = start(
        """
def command(args):
    for _ in range(2):
        try:
            sit(60)
        except KeyboardInterrupt as error:
            mark_handled(error)
            time.sleep(1)  # longer than the time to end
    print("done", flush=True)
""",
        Path(),
    )
    assert process.stdout is not None
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("done\n", "")
    assert process.returncode == 0


def test_a_second_ctrl_c_does_not_wait() -> None:
    patient = "greenroom.interrupts.END_S = 600\n"
    process = start(patient + MOMENTS["an end that takes long"], Path())
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "greenroom: interrupted\n")


def test_a_device_that_hangs_while_it_is_held_back_keeps_no_process() -> None:
    process = start(
        """
def command(args):
    lock = threading.Lock()
    lock.acquire()
    with greenroom.interrupts.hold_interrupts():
        ready()
        lock.acquire()
""",
        Path(),
    )
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "greenroom: interrupted\n")


def test_a_process_that_ignores_it_goes_on_doing_so() -> None:
    """Of a shell's background, for example."""
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from greenroom.interrupts import InterruptWatch\n"
        "assert not InterruptWatch().begin()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("fails", [False, True])
def test_ctrl_c_is_handled_behind_a_context_that_holds_it(fails: bool) -> None:
    def run() -> None:
        with hold_interrupts():
            signal.raise_signal(signal.SIGINT)
            done.append("whole")
            if fails:
                raise OSError("of the part")
        done.append("later")

    done = list[str]()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            run()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["whole"]
    assert isinstance(raised.value.__context__, OSError) == fails


def test_another_thread_changes_no_handler() -> None:
    handlers = list[object]()

    def run() -> None:
        with hold_interrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
