"""`greenroom bench --system A,B,C`: rows whose parts are found, given, or not to be had."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from greenroom.cli import Parser, bench
from greenroom.config import BUDGETS, LoadConfig
from greenroom.errors import UsageError
from greenroom.hf.measure import calibration
from greenroom.hf.measure.entries import Entry
from greenroom.plan.configurator import TokenLatency
from tests.cli.conftest import Run
from tests.hf.memory.test_split import packed
from tests.options import needs_option

ALL = "adapmoe,static,fiddler,hobbit,moepic,llru,greenroom"
SHORT = ("--rounds", 1, "--tokens", 16)


def asked(*words: str) -> argparse.Namespace:
    """The arguments of `greenroom bench`, as the command line reads them."""
    parser = Parser()
    bench.add_to(parser)
    return parser.parse_args(["model", "--cache", "50%", *words])


def settings(*words: str) -> tuple[LoadConfig, dict[str, Entry]]:
    load, entries = bench.entries_of(asked(*words))
    return load, {entry.name: entry for entry in entries}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    sizes = {"format": BUDGETS, "version": 1, "slots": [3, 5], "split": [0.5, 0.75]}
    (tmp_path / "b.json").write_text(json.dumps(sizes))
    return {"sizes": str(tmp_path / "b.json"), "hot": str(tmp_path / "h.json")}


@needs_option("miss_precision")
def test_parts_that_are_given_go_to_the_rows_that_have_them(files: dict[str, str]):
    sizes = ("--scope", files["sizes"], "--pin", files["hot"])
    less = ("--miss-precision", "int4", "--low-below", "0.3")
    words = ("--system", "adapmoe,static,hobbit,llru", *sizes, *less, "--readers", "3")
    load, found = settings(*words)
    every = LoadConfig(cache="50%", readers=3)
    assert load == every
    parts = {
        name: (e.config.scope, e.config.pin, e.config.miss_precision, e.config.low_below)
        for name, e in found.items()
    }
    assert parts == {
        "adapmoe": (files["sizes"], None, "off", None),
        "static": ("shared", files["hot"], "off", None),
        "hobbit": ("shared", None, "int4", 0.3),
        "llru": ("shared", None, "off", None),
    }
    assert [e.calibrated_options for e in found.values()] == [(), (), (), ()]
    assert {e.config.readers for e in found.values()} == {3}
    assert not any(e.skip_reason for e in found.values())


def test_sizes_and_splits_go_together(files: dict[str, str]):
    words = ("--system", "adapmoe,moepic", "--scope", files["sizes"])
    _, found = settings(*words)
    assert [e.calibrated_options for e in found.values()] == [(), ("scope", "split")]
    _, found = settings(*words, "--split", files["sizes"])
    moepic = found["moepic"]
    assert (moepic.calibrated_options, moepic.config.scope, moepic.config.split) == (
        (), files["sizes"], files["sizes"]
    )  # fmt: skip
    _, found = settings(*words, "--split", "auto")
    assert found["moepic"].calibrated_options == (
        "split",
    )  # what was found, not where Algorithm 1 begins


def test_what_overrides_every_row():
    _, found = settings("--system", "adapmoe,llru", "--policy", "fifo", "--scope", "per-layer")
    assert {e.config.policy for e in found.values()} == {"fifo"}
    assert {e.config.scope for e in found.values()} == {"per-layer"}


def test_a_predictor_goes_to_those_that_can_take_it():
    words = ("--system", "promoe,greenroom,fate", "--predictor", "p.safetensors")
    _, found = settings(*words)
    assert [e.config.predictor for e in found.values()] == ["p.safetensors"] * 2 + [None]


@needs_option("miss_precision")
def test_a_row_alone_has_all_that_is_given(files: dict[str, str]):
    load, found = settings("--system", "llru", "--pin", files["hot"], "--scope", "3,5")
    assert (load.pin, load.scope) == (files["hot"], "3,5")
    assert found["llru"].config.pin == files["hot"]
    with pytest.raises(UsageError, match="system hobbit needs misses in int4"):
        settings("--system", "hobbit")


@needs_option("miss_precision")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--pin", "h.json"),
            "--pin is an option of fiddler, static only: name one of these systems",
        ),
        (("--scope", "3,5"), "--scope is an option of adapmoe only: name"),
        (("--split", "0.5"), "--split is an option of moepic only: name"),
        (("--low-share", "5%"), "--low-share is an option of hobbit only: name"),
        (("--miss-precision", "int5"), "--miss-precision is an option of hobbit only"),
        (("--policy", "lur"), "unknown policy 'lur'"),
    ],
)
def test_parts_of_none_of_the_rows(cli: Run, folder: Path, words: tuple[str, str], said: str):
    ran = cli("bench", folder, "--cache", "50%", "--system", "llru,greenroom", *words, *SHORT)
    assert said in ran.mistake


@needs_option("miss_precision")
def test_a_part_that_cannot_be_right_is_a_mistake_and_no_missing_row():
    with pytest.raises(UsageError, match="--split must be a share of an expert, at most 1, got 2"):
        settings("--system", "moepic,llru", "--split", "2")
    with pytest.raises(UsageError, match="effect only with --miss-precision, which is off"):
        settings("--system", "hobbit,llru", "--low-share", "5%")


@needs_option("miss_precision")
@needs_option("co_compute")
def test_all_in_one_table(cli: Run, folder: Path):
    ran = cli("bench", folder, "--cache", "50%", "--system", ALL, *SHORT, "--kernels", "eager")
    assert ran.code == 0, ran.err
    for name, said in {
        "adapmoe": "sizes by a dynamic programme over the warm-up",
        "static": "6 pinned experts, those used most in the warm-up",
        "llru": "the paper's eviction policy alone",
        "fiddler is left out": "needs a GPU",
        "hobbit is left out": "misses in int4, which change the output (--miss-precision)",
        "moepic is left out": "`greenroom pack MODEL -o OUT --experts same --segments 8`",
    }.items():
        (line,) = [each for each in ran.out.splitlines() if each.startswith(f"{name}: ")]
        assert said in line
    assert "generated other tokens" not in ran.out
    sized = [line.split()[0] for line in ran.out.splitlines() if " by layer " in line]
    assert sized == ["adapmoe"]


@needs_option("co_compute")
def test_rows_of_two_processors_are_there_where_these_are(cli: Run, folder: Path):
    both = ("--device", "fake", "--host-memory", "4GiB", "--system", "fiddler,hybrimoe,llru")
    ran = cli("bench", folder, "--cache", "50%", *both, *SHORT, "--kernels", "eager", "--json")
    assert ran.code == 0, ran.err
    assert [row["name"] for row in json.loads(ran.out)] == ["fiddler", "hybrimoe", "llru"]
    assert ran.err == ""
    _, found = settings("--system", "fiddler,llru", "--device", "fake")
    assert [e.config.co_compute for e in found.values()] == ["auto", "off"]


def test_left_out_of_an_object_is_said_beside_it(cli: Run, folder: Path):
    ran = cli("bench", folder, "--cache", "50%", "--system", "moepic,llru,adapmoe", *SHORT,
              "--kernels", "eager", "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    rows = json.loads(ran.out)
    assert [row["name"] for row in rows] == ["llru", "adapmoe"]  # the first that can be measured
    assert rows[0]["ratio"] == [1, 1, 1]
    assert all(row["same_tokens"] for row in rows)
    assert sum(map(float, rows[1]["scope"].split(","))) == 8
    assert ran.err.startswith("moepic is left out: --split needs experts")


def test_no_row_is_left(cli: Run, folder: Path):
    ran = cli("bench", folder, "--cache", "50%", "--system", "moepic,hobbit", *SHORT)
    assert "moepic is left out: --split needs" in ran.mistake
    assert "; hobbit is left out: system hobbit needs misses in int4" in ran.mistake
    alone = cli("bench", folder, "--cache", "50%", "--system", "moepic", *SHORT)
    assert alone.mistake.startswith("--split needs experts that are packed in segments")


def test_splits_are_those_of_algorithm_1(cli: Run, monkeypatch: pytest.MonkeyPatch):
    """Of a machine whose link takes two layers' time for an expert, whatever this one's takes."""
    latency = TokenLatency(attention=1e-3, moe=2e-4, head=0.0, load=2.4e-3)
    monkeypatch.setattr(calibration, "latency_of", lambda driver, head: latency)
    ran = cli("bench", packed(), "--cache", "60%", "--system", "llru,moepic", *SHORT, "--json")
    assert ran.code == 0, ran.err
    llru, moepic = json.loads(ran.out)
    assert sum(map(float, moepic["scope"].split(","))) == pytest.approx(9, abs=1e-4)
    assert "budgets by Algorithm 1 over the warm-up" in moepic["notes"][-1]
    assert "tops 0." in moepic["notes"][-1]
    assert moepic["same_tokens"]
    assert moepic["bytes_per_token"] != llru["bytes_per_token"]
