from __future__ import annotations

import json
from pathlib import Path

import pytest

from greenroom.trace import save
from tests.cli.conftest import Run
from tests.sim import small

MOEPIC = ("--method", "moepic", "--machine", "MACHINE", "--expert-bytes", "9")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("budgets") / "trace.safetensors"
    save(small.trace([[-3, 1, 1, 1, 1], [1, 1, 1]], seed=1), path)
    return path


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = {"nbytes": [100], "tokens": [1], "seconds": [[0.001]]}
    profile = {
        "format": "greenroom-machine", "version": 1,
        "links": [{"source": "disk", "target": "host", "bandwidth": 1e5, "latency": 0, "lanes": 1}],
        "processors": [{"name": "cpu", "memory": "host", "expert": table, "dense": table}],
    }  # fmt: skip
    path = tmp_path_factory.mktemp("machine") / "machine.json"
    path.write_text(json.dumps(profile))
    return path


@pytest.mark.parametrize("method", ["marginal", "optimal"])
@pytest.mark.parametrize("timed", [False, True])
def test_simulate_takes_what_it_writes(
    cli: Run, trace: Path, machine: Path, tmp_path: Path, method: str, timed: bool
) -> None:
    out, more = tmp_path / "b.json", ("--machine", machine, "--expert-bytes", "100B") * timed
    assert cli(
        "trace", "budgets", trace, "--capacity", "6", "--method", method, "-o", out, *more
    ).out.startswith(f"{out}: 6 slots, by layer: ")
    written = json.loads(out.read_text())
    assert sum(written["slots"]) == 6
    assert written["method"] == method
    row = cli(
        "simulate", trace, "--policy", "lru", "--capacity", "6", "--order", "runtime",
        "--scope", out, "--json",
    ).json  # fmt: skip
    assert row["scope"] == "given"
    assert row["misses"] > 0


def test_moepic_says_how_to_split(cli: Run, trace: Path, machine: Path, tmp_path: Path) -> None:
    out = tmp_path / "b.json"
    ran = cli(
        "trace", "budgets", trace, "--capacity", "6", "--method", "moepic", "-o", out,
        "--machine", machine, "--expert-bytes", "100B", "--dense-bytes", "100B",
    )  # fmt: skip
    written = json.loads(out.read_text())
    assert "share of an expert in its top segment" in ran.out
    assert sum(written["slots"]) == pytest.approx(6)
    assert all(0 < share <= 1 for share in written["split"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--method", "best"), "unknown method 'best': choose one of marginal, optimal, moepic"),
        (("--method", "moepic"), "moepic needs the times of loading and computing"),
        (("--expert-bytes", "1MiB"), "--expert-bytes has an effect only with --machine"),
        (("--limit", "0"), "--limit must be at least 1 token, got 0"),
        (("--capacity", "1"), "2 layers need at least one cache slot each"),
        (("--capacity", "2,3"), "--capacity must be a single number or share here"),
        (("--machine", "MACHINE"), "the trace does not have the size of an expert"),
        ((*MOEPIC, "--zeta", "2"), "zeta must be above 0 and below 1, got 2"),
        ((*MOEPIC, "--predictions", "markov"), "unknown predictions 'markov'"),
        (
            ("--machine", "MACHINE", "--expert-bytes", "5%"),
            "--expert-bytes must be in bytes, as 12MiB",
        ),
    ],
)
def test_mistakes(
    cli: Run, trace: Path, machine: Path, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    out = tmp_path / "b.json"
    words = [str(machine) if word == "MACHINE" else word for word in options]
    ran = cli("trace", "budgets", trace, "--capacity", "6", "-o", out, *words)
    assert said in ran.mistake
    assert not out.exists()
