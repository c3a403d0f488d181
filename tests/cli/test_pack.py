"""`greenroom pack`, and what other commands say of packs, as their user sees it."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from greenroom.hf.pack.target import ExpertPacker
from tests.cli.conftest import Run
from tests.hf.pack.rig import header, packed, source

SLOW = """
import sys, time
from greenroom.hf.pack import packing, target
real = target.ExpertPacker.__call__
def slow(self, *args):
    time.sleep(0.1)
    real(self, *args)
target.ExpertPacker.__call__ = slow
packing.SYNC_S = 0
from greenroom.cli import main
sys.exit(main())
"""


def test_pack_and_run(cli: Run, tmp_path: Path) -> None:
    out = tmp_path / "pack"
    ran = cli("pack", source(), "-o", out, "--experts", "int8")
    assert ran.code == 0, ran.err
    assert ran.out.startswith(f"{out}: ")
    assert "16 experts in" in ran.out
    assert ran.err == ""
    answer = cli("run", out, "The green", "--cache", "25%", "--max-new-tokens", 3, "--verbose")
    assert answer.code == 0
    assert f"packed as int8 from {source()}" in answer.err.splitlines()[0]
    ran = cli("pack", source(), "-o", out, "--experts", "int8")
    assert "is not empty: it holds a pack: give --repair" in ran.mistake


def test_a_share_of_the_experts(cli: Run, tmp_path: Path) -> None:
    """Recorded, packed, run, and judged against the complete model."""
    trace, out = tmp_path / "trace.safetensors", tmp_path / "pack"
    (tmp_path / "prompts").write_text("The green room\nAn expert waits on disk\n")
    ran = cli(
        "trace", "record", source(), "--prompts", tmp_path / "prompts", "-o", trace, "--weights",
        "--cache", "50%", "--raw", "--max-new-tokens", 4,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    ran = cli("pack", source(), "-o", out, "--experts", "same", "--keep", "50%", "--trace", trace)
    assert ran.code == 0, ran.err
    assert "8 experts in" in ran.out
    answer = cli("run", out, "The green", "--cache", "50%", "--max-new-tokens", 3, "--json")
    assert answer.json["subset"] == {"experts": 8, "model_experts": 16}
    assert "only 8 of the model's 16 experts, WHICH CHANGES THE OUTPUT" in answer.err
    (tmp_path / "text").write_text("The green room is where the performers wait." * 4)
    ran = cli("verify", out, "--quality", tmp_path / "text", "--cache", "50%", "--json")
    assert ran.json["kl_mean"] > 0
    assert (
        cli("verify", out, "--cache", "50%", "--max-new-tokens", 3).code == 0
    )  # as its own experts say


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--keep", "50%"), "needs a recording of the routing"),
        (("--keep", "0%", "--trace", "t"), "--keep must be more than 0"),
        (("--keep", "150%", "--trace", "t"), "--keep"),
        (("--keep", "pins.json", "--trace", "t"), "--trace has an effect only with --keep SHARE"),
        (("--trace", "t"), "--trace has an effect only with --keep SHARE"),
        (("--keep", "50%", "--trace", "nowhere"), "nowhere"),
        (("--keep", "nowhere.json"), "nowhere.json"),
        (("--keep", "50%", "--repair"), "leave out --keep"),
    ],
)
def test_shares_that_make_no_subset(
    cli: Run, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    ran = cli("pack", source(), "-o", tmp_path / "pack", "--experts", "same", *arguments)
    assert words in ran.mistake
    assert not (tmp_path / "pack").exists()


def test_json(cli: Run, tmp_path: Path) -> None:
    ran = cli("pack", source(), "-o", tmp_path / "pack", "--experts", "int4", "--json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.json["experts"] == 16
    assert ran.json["unchanged"] == 0
    assert ran.json["expert_bytes"] < ran.json["source_expert_bytes"] / 3
    assert ran.json["folder"] == str(tmp_path / "pack")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere/at/all", "-o", "x", "--experts", "int8"), "there is no such folder"),
        ((source(), "-o", "/dev/null", "--experts", "int8"), "is not a folder"),
        ((source(), "-o", "x", "--experts", "int3"), "choose one of int8, int4, fp8, bf12, same"),
        ((source(), "-o", "x"), "required: --experts"),
        (
            (source(), "-o", "nowhere", "--experts", "int8", "--repair"),
            "holds no pack, so --repair",
        ),
    ],
)
def test_mistakes(
    cli: Run,
    arguments: tuple[object, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in cli("pack", *arguments).mistake
    assert list(tmp_path.iterdir()) == []


def wait_for(path: Path, lines: int, process: subprocess.Popen[str]) -> None:
    """Until the journal tells of some experts."""
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        if path.is_file() and path.read_bytes().count(b"\nexpert ") >= lines:
            return
        time.sleep(0.01)
    pytest.fail(f"it did not get there: {process.communicate()}")


@pytest.mark.process
def test_killed_in_the_middle(cli: Run, tmp_path: Path) -> None:
    out = tmp_path / "pack"
    arguments = [str(a) for a in ("pack", source(), "-o", out, "--experts", "int8")]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *arguments], text=True, stderr=subprocess.PIPE
    )
    wait_for(tmp_path / "pack.unfinished" / "unfinished", 3, process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    refused = cli("run", out, "The green")
    assert f"this pack is not finished: run `greenroom pack {source()} -o {out}" in refused.mistake
    ran = cli(*arguments, "--json")
    assert 3 <= ran.json["unchanged"] < 16
    for name in ("greenroom.json", "experts.greenroom"):
        assert (out / name).read_bytes() == (packed("int8") / name).read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["pack"]


def test_interrupted(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ExpertPacker.__call__

    def interrupting(self: ExpertPacker, *args: Any) -> None:
        if args[-1] == 5:
            raise KeyboardInterrupt
        real(self, *args)

    arguments = ("pack", source(), "-o", tmp_path / "pack", "--experts", "int8")
    with monkeypatch.context() as patch:
        patch.setattr(ExpertPacker, "__call__", interrupting)
        ran = cli(*arguments)
    assert ran.code == 130
    assert ran.err == "greenroom: interrupted: the same command continues the pack\n"
    assert cli(*arguments, "--json").json["unchanged"] > 0
    assert header(tmp_path / "pack") == header(packed("int8"))


def test_the_disk_is_full(cli: Run, tmp_path: Path) -> None:
    """No file may become larger than 150 kB: the dense parts fit, the experts do not."""
    out, before = tmp_path / "pack", resource.getrlimit(resource.RLIMIT_FSIZE)
    arguments = ("pack", source(), "-o", out, "--experts", "int8")
    packed("int8")  # what is compiled is on disk now
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, before[1]))
    try:
        ran = cli(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "experts.greenroom: cannot be written" in ran.mistake
    assert "run the same command again" in ran.mistake
    assert not out.exists()
    assert cli(*arguments, "--json").json["unchanged"] > 0
    assert header(out) == header(packed("int8"))


def test_quality(cli: Run, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The green room is where the performers wait before they go on stage. " * 3)
    ran = cli("verify", packed("int4"), "--quality", text, "--cache", "25%")
    assert ran.code == 0, ran.err
    assert ran.err == ""
    last = ran.out.splitlines()[-2:]
    assert last[0].startswith(f"KL divergence from {source()}: mean ")
    assert last[1].startswith("perplexity ")
    ran = cli("verify", packed("int4"), "--quality", text, "--tokens", 9, "--json")
    assert ran.json["tokens"] == 8
    assert ran.json["kl_mean"] > 0
    assert set(ran.json) >= {"kl_p99", "perplexity", "original_perplexity", "same_top", "original"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--quality", "none.txt"), "cannot read none.txt"),
        (("--quality", "binary"), "binary is not UTF-8 text"),
        (("--quality", "text", "--layers"), "--layers has no effect with --quality"),
        (("--quality", "text", "--prompt", "x"), "--prompt has no effect with --quality"),
        (("--quality", "text", "--tokens", "1"), "--tokens must be at least 2"),
        (("--against", "demo"), "--against has an effect only with --quality"),
        (("--tokens", "5"), "--tokens has an effect only with --quality"),
    ],
)
def test_quality_s_mistakes(
    cli: Run,
    arguments: tuple[str, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("binary").write_bytes(b"\xff\xfe\xff")
    Path("text").write_text("some text")
    assert words in cli("verify", packed("int8"), *arguments).mistake


def test_a_damaged_pack_is_named(cli: Run, tmp_path: Path) -> None:
    import shutil

    folder = shutil.copytree(packed("int8"), tmp_path / "pack")
    raw = json.loads((folder / "greenroom.json").read_text())
    layer = raw["layers"][0]
    with open(folder / "experts.greenroom", "r+b") as file:
        for expert in range(layer["experts"]):
            file.seek(layer["offset"] + expert * layer["stride"])
            file.write(b"\x55\xaa\x55")
    ran = cli("run", folder, "The green", "--cache", "25%", "--max-new-tokens", 2)
    assert ran.code == 2
    assert "is damaged (its checksum is wrong)" in ran.err
