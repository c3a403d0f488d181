"""`greenroom pull`, `list` and `rm` against a hub on this machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from greenroom.cli.list import LONGEST_REMARK, Row, cells
from tests.cli.conftest import Run
from tests.hub_server import HubServer, use
from tests.models import cached_tiny
from tests.plan.models import MACHINE

DATA = Path(__file__).parents[1] / "data" / "gguf"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub with a GGUF repository; the working folder is empty."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    with HubServer().serving() as hub:
        use(monkeypatch, hub, tmp_path / "hub")
        hub.add("tiny/gguf", {
            f"m-{name}.gguf": (DATA / f"{name}.gguf").read_bytes() for name in ("Q8_0", "Q4_0")
        })  # fmt: skip
        yield hub


def test_a_model_is_pulled_listed_planned_and_removed(cli: Run, server: HubServer) -> None:
    size = (DATA / "Q8_0.gguf").stat().st_size
    ran = cli("pull", "tiny/gguf:q8_0")
    assert ran.code == 0
    assert "98.4 KiB in 2 files; 98.4 KiB downloaded in" in ran.out
    assert "run it: greenroom run tiny/gguf:q8_0" in ran.out
    assert "all of it was here already" in cli("pull", "tiny/gguf:q8_0").out
    found = cli("pull", "tiny/gguf:q8_0", "--json").json
    assert (found["downloaded"], found["files"]) == (0, 2)
    assert os.path.exists(found["path"])

    (row,) = [row for row in json.loads(cli("list", "--json").out) if row["name"] != "demo"]
    assert (row["name"], row["format"]) == ("tiny/gguf:Q8_0", "GGUF Q8_0")
    assert (row["nbytes"], row["complete"], row["path"]) == (size, True, found["path"])
    assert 0 < row["least_memory"] <= row["whole_memory"]
    assert row["fits"]
    table = cli("list", "--no-plan").out.splitlines()
    assert table[0].split() == ["model", "format", "size", "memory", "tokens/s", "remarks"]
    assert table[3].startswith("tiny/gguf:Q8_0  GGUF Q8_0")

    here = cli("list", "tiny/gguf").out.splitlines()
    assert [line.split()[0] for line in here[2:]] == ["tiny/gguf:Q4_0", "tiny/gguf:Q8_0"]
    assert here[3].endswith("here")
    assert json.loads(cli("list", "tiny/gguf", "--json").out)[1] == {
        "name": "tiny/gguf:Q8_0", "nbytes": size, "here": True
    }  # fmt: skip

    assert "give --yes" in cli("rm", "tiny/gguf:Q8_0").mistake
    assert cli("rm", "tiny/gguf:Q8_0", "--yes").out == (
        "tiny/gguf:Q8_0: removed; 99 KiB are free again\n"
    )
    assert "has nothing of this model" in cli("rm", "tiny/gguf:Q8_0", "--yes").mistake


def test_a_list_has_speeds_where_the_machine_has_a_profile(cli: Run, server: HubServer) -> None:
    assert "a profile of this machine: greenroom doctor" in cli("list").err
    path = Path("..") / "xdg" / "greenroom" / "machine.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(MACHINE.as_json()))
    ran = cli("list", "--json")
    (demo,) = json.loads(ran.out)
    assert 0 < demo["tpot_s"] < 10
    assert "profile" not in ran.err


def test_an_incomplete_model_says_how_to_go_on(cli: Run, server: HubServer) -> None:
    server.faults.break_off = 0
    assert "the same command goes on from there" in cli("pull", "tiny/gguf:Q4_0").mistake
    (folder,) = Path(constants.HF_HUB_CACHE).glob("*/blobs")
    (partial,) = folder.glob("*.incomplete")
    partial.write_bytes(bytes(34_000))
    ran = cli("list", "--no-plan")
    assert "incomplete, 50% of it: greenroom pull tiny/gguf:Q4_0" in ran.out
    assert "not (completely) in the local cache" in offline(cli, "run", "tiny/gguf:Q4_0", "Hi")


def offline(cli: Run, *argv: object) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        return cli(*argv).mistake


def test_models_of_the_working_folder_are_listed(cli: Run, server: HubServer) -> None:
    dense = cached_tiny("qwen3", tokenizer=True)
    Path("dense").symlink_to(dense)
    Path("x.gguf").write_bytes(b"GGUF")
    Path("other").mkdir()
    rows = {row["name"]: row for row in json.loads(cli("list", "--json").out)}
    assert set(rows) == {"demo", "dense", "x.gguf"}
    assert "experts" in rows["dense"]["problem"]
    assert rows["x.gguf"]["problem"].startswith("truncated")
    assert rows["demo"]["fits"]


def test_local_models_are_neither_pulled_nor_removed(cli: Run, folder: Path) -> None:
    assert "nothing to download" in cli("pull", folder).mistake
    assert "delete it yourself" in cli("rm", folder, "--yes").mistake
    assert "demo" in cli("rm", "demo", "--yes").mistake
    assert "HF_HUB_OFFLINE" in cli("pull", "a/b").mistake
    assert "HF_HUB_OFFLINE" in cli("list", "a/b").mistake


@pytest.mark.parametrize(("answer", "gone"), [("y\n", True), ("\n", False), ("no\n", False)])
def test_removing_asks_first(
    cli: Run, server: HubServer, monkeypatch: pytest.MonkeyPatch, answer: str, gone: bool
) -> None:
    cli("pull", "tiny/gguf:Q8_0")
    terminal = SimpleNamespace(isatty=lambda: True, readline=lambda: answer)
    monkeypatch.setattr(sys, "stdin", terminal)
    ran = cli("rm", "tiny/gguf:Q8_0")
    assert "remove tiny/gguf:Q8_0 (99 KiB)? [y/N] " in ran.err
    assert ("removed;" in ran.out) == gone
    assert bool(list(Path(constants.HF_HUB_CACHE).glob("models--*"))) == (not gone)


def test_a_model_in_use_is_not_removed(
    cli: Run, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("pull", "tiny/gguf:Q8_0")
    monkeypatch.setattr("greenroom.hf.checkpoint.hub.cached.users_of", lambda paths: ["serve (7)"])
    assert (
        "in use by serve (7): end that process first"
        in cli("rm", "tiny/gguf:Q8_0", "--yes").mistake
    )


def test_a_run_downloads_the_quantisation_that_it_names(cli: Run, server: HubServer) -> None:
    options = ("--cache", "50%", "--max-new-tokens", 2, "--raw", "--kernels", "eager")
    ran = cli("run", "tiny/gguf:Q8_0", "Hi", *options)
    assert ran.code == 0, ran.err
    assert "gguf:Q8_0: 2 of 4 experts in slots" in ran.err


def test_a_remark_of_the_list_is_short() -> None:
    row = Row("a.gguf", "GGUF", 1, 1, Path("a.gguf"), problem="it is not supported; " + "a, " * 100)
    memory, rate, remark = cells(row)
    assert (memory, rate) == ("", "")
    assert remark.startswith("it is not supported;")
    assert remark.endswith(" ...")
    assert len(remark) <= LONGEST_REMARK
    row.least_memory = row.whole_memory = 1 << 20
    row.fits, row.tpot_s = True, 4e-4
    assert cells(row) == ("1 MiB", "2,500", "fits")
