"""`greenroom simulate`, as a user calls it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from greenroom.core.cost import Link
from greenroom.core.machine import Machine, Processor, Route, Table
from greenroom.policies import policy
from greenroom.sim.replay import replay
from greenroom.trace import Prediction, load, save, stream
from tests.cli.conftest import Run
from tests.sim import small

FIELDS = ["policy", "order", "scope", "pin", "capacity", "requests", "misses", "miss_ratio"]
TIMES = [
    "ttft_s", "ttft_mean_s", "ttft_p95_s", "tpot_s", "tpot_mean_s", "tpot_p95_s", "tokens_per_s",
    "stall_s", "compute_s", "seconds", "bytes_moved",
]  # fmt: skip
AHEAD = [
    "ahead", "useful", "prefetches", "late", "wasted", "dropped", "displaced", "accuracy",
    "fetch_rate", "goodpred",
]  # fmt: skip
TRACES = Path(__file__).parents[3] / "shared" / "traces"
LRU = ("--policy", "lru", "--capacity", "4")
SIZES = ("--expert-bytes", "1MB", "--dense-bytes", "2MB")
TIMED_LRU = ("--policy", "lru", "--capacity", 8, *SIZES)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten requests, two layers of eight experts, top-2."""
    path = tmp_path_factory.mktemp("trace") / "small.safetensors"
    save(small.trace([[-4, 1, 1, 1]] * 10), path)
    return path


@pytest.fixture(scope="session")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One request with forty tokens in its answer."""
    path = tmp_path_factory.mktemp("trace") / "answer.safetensors"
    save(small.trace([[-4] + [1] * 40]), path)
    return path


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A disk of 1 GB/s; an expert of 1 MB takes a millisecond."""
    table = Table((1_000_000,), (1,), ((0.001,),))
    profile = Machine(
        (Route("disk", "host", Link(1e9, 0.0, 2)),), (Processor("cpu", "host", table, table),)
    )
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(profile.as_json()))
    return path


def test_one_cell_is_one_object(cli: Run, recorded: Path):
    ran = cli("simulate", recorded, "--policy", "lru", "--capacity", "25%", "--json")
    assert ran.code == 0
    row = ran.json
    assert list(row) == FIELDS
    assert [row[name] for name in FIELDS[:5]] == ["lru", "natural", "shared", "step", 4]
    trace = load(recorded)
    done = replay(stream(trace, "natural"), trace.offsets, 4, policy("lru"))
    assert (row["requests"], row["misses"]) == (done.requests, done.misses)
    assert row["miss_ratio"] == done.misses / done.requests


def test_several_cells_are_a_list(cli: Run, recorded: Path):
    ran = cli("simulate", recorded, "--policy", "lru,fifo", "--capacity", "4,50%", "--json")
    rows = json.loads(ran.out)
    assert [(row["policy"], row["capacity"]) for row in rows] == [
        ("lru", 4), ("lru", 8), ("fifo", 4), ("fifo", 8),
    ]  # fmt: skip
    assert all(list(row) == FIELDS for row in rows)


def test_every_flag_does_something(cli: Run, recorded: Path):
    def misses(*flags: object, name: str = "lru", capacity: object = 4) -> int:
        asked = ("--policy", name, "--capacity", capacity, "--json")
        return int(cli("simulate", recorded, *asked, *flags).json["misses"])

    plain = misses()
    assert misses("--limit", 7) < plain
    assert misses("--reset", capacity=14) > misses(capacity=14)
    assert misses("--scope", "per-layer", capacity=6) != misses(capacity=6)
    assert misses("--order", "runtime") != plain
    assert misses("--order", "rounds") != plain
    assert misses("--pin", "none", name="lfu", capacity=3) != misses(name="lfu", capacity=3)
    assert len({misses("--seed", seed, name="random") for seed in range(5)}) > 1
    assert misses("--seed", 3, name="random") == misses("--seed", 3, name="random")


def test_a_table_for_people(cli: Run, recorded: Path):
    ran = cli("simulate", recorded, "--policy", "lru,fifo", "--capacity", "25%")
    assert ran.code == 0
    assert ran.out.startswith("trace: 70 tokens of 10 requests, 16 experts in 2 layers, top-2\n")
    assert "order natural, scope shared, pin step" in ran.out
    lines = ran.out.splitlines()[-2:]
    assert [line.split()[:3] for line in lines] == [["lru", "4", "(25%)"], ["fifo", "4", "(25%)"]]
    assert len({len(line) for line in lines}) == 1
    assert ran.err == ""  # no progress bar where nobody watches


def test_time_on_a_machine(cli: Run, recorded: Path, machine: Path):
    asked = ("--machine", machine, "--expert-bytes", "1MB", "--json")
    row = cli("simulate", recorded, "--policy", "lru", "--capacity", 16, *asked).json
    assert list(row) == [*FIELDS, "prefetch", *TIMES]
    assert (row["order"], row["prefetch"]) == ("runtime", "off")
    assert row["bytes_moved"] == row["misses"] * 10**6
    assert row["seconds"] == pytest.approx(row["stall_s"] + row["compute_s"])
    # All resident after a while: two layers of two experts, a millisecond each.
    assert row["tpot_s"] == pytest.approx(0.004)
    more = cli("simulate", recorded, *LRU, *asked, "--dense-bytes", "2MB").json
    less = cli("simulate", recorded, *LRU, *asked, "--dense-bytes", "0").json
    assert more["tpot_s"] == pytest.approx(less["tpot_s"] + 2 * 0.002, rel=0.2)
    ran = cli("simulate", recorded, *LRU, *asked[:-1])
    assert {"TTFT", "TPOT", "tokens/s", "stalled"} <= set(ran.out.split())


def test_prefetching_beside_the_run_without(cli: Run, answer: Path, machine: Path, tmp_path: Path):
    names = "off,markov,noisy-oracle:1,accuracy=0.5,oracle:2"
    out = tmp_path / "out.html"
    asked = (answer, *TIMED_LRU, "--machine", machine, "--prefetch", names)
    ran = cli("simulate", *asked, "--report", out, "--json")
    plain, markov, noisy, oracle = rows = json.loads(ran.out)
    assert [row["prefetch"] for row in rows] == [
        "off", "markov", "noisy-oracle:1,accuracy=0.5", "oracle:2",
    ]  # fmt: skip
    assert list(markov) == [*FIELDS, "prefetch", *TIMES, *AHEAD]
    assert plain == cli("simulate", answer, *TIMED_LRU, "--machine", machine, "--json").json
    assert (markov["ahead"], oracle["accuracy"]) == (2, 1.0)
    assert 0 < noisy["useful"] < oracle["useful"]
    assert oracle["misses"] < noisy["misses"] < plain["misses"]
    assert oracle["seconds"] < plain["seconds"]
    page = out.read_text()
    for shown in ("Time of a token", "lru + markov", "GOODPRED", "100%", "--prefetch off,"):
        assert shown in page
    assert page.count('<div class="bar">') == 4
    ran = cli("simulate", *asked)
    assert {"prefetch", "accuracy", "useful", "late", "wasted"} <= set(ran.out.split())
    assert [line.split()[:2] for line in ran.out.splitlines()[-4:]] == [
        ["lru", row["prefetch"]] for row in rows
    ]


def test_flags_of_prefetching(cli: Run, answer: Path, recorded: Path, machine: Path):
    def row(trace: Path, name: str, *flags: object) -> dict:
        asked = (*TIMED_LRU, "--machine", machine, "--prefetch", name, *flags, "--json")
        return cli("simulate", trace, *asked).json

    few, more = row(answer, "oracle", "--ahead", 1), row(answer, "oracle")
    assert (few["ahead"], more["ahead"]) == (1, 2)
    assert few["useful"] < more["useful"]
    kept, reset = row(recorded, "oracle"), row(recorded, "oracle", "--reset")
    assert reset["misses"] + reset["useful"] > kept["misses"] + kept["useful"]
    assert reset["seconds"] == pytest.approx(reset["stall_s"] + reset["compute_s"])
    noisy = "noisy-oracle:accuracy=0.5"
    assert len({row(answer, noisy, "--seed", seed)["bytes_moved"] for seed in range(4)}) > 1
    assert row(answer, noisy, "--seed", 3) == row(answer, noisy, "--seed", 3)


def test_what_ran_beside_the_model_is_replayed(cli: Run, tmp_path: Path, machine: Path):
    trace = small.trace([[-4, 1, 1, 1]] * 10)
    exact = Prediction(trace.experts, 1)  # as if that predictor were always right
    wrong = Prediction(((trace.experts + 4) % 8).astype(np.uint8), 2)
    save(replace(trace, predictions={"next-gate": exact, "learned": wrong}), tmp_path / "t.trace")

    def row(name: str) -> dict:
        asked = ("--machine", machine, "--expert-bytes", "1MB", "--prefetch", name, "--json")
        ran = cli("simulate", tmp_path / "t.trace", "--policy", "lru", "--capacity", 12, *asked)
        return ran.json

    named = row("next-gate")
    assert (named["prefetch"], named["accuracy"]) == ("next-gate", 1.0)
    assert row("auto") == named
    assert row("recorded:of=next-gate") == named | {"prefetch": "recorded:of=next-gate"}
    assert row("learned")["accuracy"] < 0.5


def test_automatic_is_markov_where_the_trace_has_no_better(cli: Run, recorded: Path, machine: Path):
    asked = ("--machine", machine, "--expert-bytes", "1MB", "--prefetch", "auto", "--json")
    assert cli("simulate", recorded, *LRU, *asked).json["prefetch"] == "markov"


def test_sizes_come_from_the_trace_where_it_knows_them(
    cli: Run, tmp_path: Path, machine: Path, monkeypatch: pytest.MonkeyPatch
):
    trace = small.trace([[-4, 1, 1]])
    trace.meta.update(expert_bytes=3_000_000, dense_bytes=1_000_000)
    save(trace, tmp_path / "known.safetensors")
    row = cli("simulate", tmp_path / "known.safetensors", *LRU, "--machine", machine, "--json").json
    assert row["bytes_moved"] == row["misses"] * 3_000_000
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "greenroom").mkdir()
    machine.rename(tmp_path / "greenroom" / "machine.json")
    again = cli("simulate", tmp_path / "known.safetensors", *LRU, "--machine", "auto", "--json")
    assert again.json == row


def test_a_recorded_run_knows_its_sizes(cli: Run, folder: Path, machine: Path, tmp_path: Path):
    (tmp_path / "prompts.txt").write_text("The green room is where")
    few = ("--cache", "25%", "--max-new-tokens", 3, "--kernels", "eager")
    asked = ("--prompts", tmp_path / "prompts.txt", "-o", tmp_path / "t.trace", *few)
    assert cli("trace", "record", folder, *asked).code == 0
    sizes = {"experts": 0, "dense": 0}
    for path in folder.glob("*.safetensors"):
        header = path.read_bytes()
        for name, entry in json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")]).items():
            if name != "__metadata__" and "embed_tokens" not in name:
                begin, end = entry["data_offsets"]
                sizes["experts" if ".experts." in name else "dense"] += end - begin
    trace = load(tmp_path / "t.trace")
    assert trace.meta["expert_bytes"] == sizes["experts"] // int(trace.offsets[-1])
    assert trace.meta["dense_bytes"] == sizes["dense"] // trace.layers
    row = cli("simulate", tmp_path / "t.trace", *LRU, "--machine", machine, "--json").json
    assert row["bytes_moved"] == row["misses"] * trace.meta["expert_bytes"]


def test_a_report_is_one_file_that_says_how_it_was_made(cli: Run, recorded: Path, tmp_path: Path):
    out = tmp_path / "out.html"
    asked = ("--policy", "lru,fifo", "--capacity", "25%,50%", "--report", out, "--json")
    ran = cli("simulate", recorded, *asked, "--seed", 5)
    assert ran.code == 0
    assert ran.err == f"report: {out}\n"
    assert len(json.loads(ran.out)) == 4
    page = out.read_text()
    assert f"greenroom simulate {recorded} --policy lru,fifo --capacity 25%,50% --report" in page
    assert "order natural, scope shared, pin step, seed 5" in page
    assert page.count('class="curve"') == 4  # two curves, two keys
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    floor = dict(map(tuple, data["curves"][-1]["points"]))
    trace = load(recorded)
    for capacity, ratio in floor.items():
        best = replay(stream(trace, "natural"), trace.offsets, capacity, policy("opt"), pin="none")
        assert ratio == best.miss_ratio
    for curve in data["curves"][:-1]:
        assert all(ratio >= floor[capacity] for capacity, ratio in curve["points"])
    assert list(tmp_path.iterdir()) == [out]


def test_a_report_of_times_and_of_caches_for_each_layer(
    cli: Run, recorded: Path, machine: Path, tmp_path: Path
):
    out = tmp_path / "out.html"
    ran = cli(
        "simulate", recorded, *LRU, "--scope", "per-layer", "--report", out,
        "--machine", machine, "--expert-bytes", "1MB", "--reset",
    )  # fmt: skip
    assert ran.code == 0
    assert "<th>TPOT p95</th>" in out.read_text()


def test_a_report_with_speculation(cli: Run, machine: Path, tmp_path: Path):
    """Its curves and its map are replays, which have no times and no drafts."""
    repeating = small.trace([[-4, *[1] * 40]])
    ids = np.resize([5, 6, 7, 8], repeating.tokens).astype(np.int32)
    path, out = tmp_path / "a.trace", tmp_path / "out.html"
    save(replace(repeating, token_ids=ids), path)
    ran = cli(
        "simulate", path, *LRU, "--speculate", "lookup", "--machine", machine,
        "--expert-bytes", "1MB", "--report", out,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "Miss ratio by capacity" in out.read_text()


@pytest.mark.skipif(not TRACES.is_dir(), reason="the recordings of real models are not here")
def test_a_published_recording(cli: Run):
    ran = cli("simulate", TRACES / "mixtral-8x7b.npz", *LRU, "--json")
    assert ran.json["requests"] == 577 * 32 * 2


MISTAKES = {
    "an unknown policy": (("--policy", "lru,best"), "unknown policy 'best': choose one of auto, "),
    "an unknown order": (("--order", "up"), "unknown order 'up': choose one of natural, rounds, r"),
    "an unknown scope": (("--scope", "x"), "unknown scope 'x': choose one of shared, per-layer"),
    "an unknown pin": (("--pin", "x"), "unknown pin 'x': choose one of step, none"),
    "no slots": (("--capacity", "0"), "--capacity 0: must be from 1 to 16"),
    "too many slots": (("--capacity", "4,17"), "--capacity 17: must be from 1 to 16"),
    "no number": (("--capacity", "x"), "--capacity 'x': give a number of experts such as 64"),
    "a wrong share": (("--capacity", "120%"), "--capacity 120%: a share must be above 0%"),
    "a share of nothing": (("--capacity", "1%"), "--capacity 1%: this share of 16 experts"),
    "no slot a layer": (("--capacity", "1", "--scope", "per-layer"), "a cache slot for each of"),
    "no tokens": (("--limit", "0"), "--limit must be at least 1 token, got 0"),
    "a size without a machine": (("--expert-bytes", "1MB"), "--expert-bytes has an effect only"),
    "no such profile": (("--machine", "none.json"), "cannot read none.json: No such"),
    "no such folder": (("--report", "/nowhere/out.html"), "there is no folder /nowhere"),
    "a folder as a report": (("--report", "/"), "cannot write /: it is a folder"),
    "prefetching without times": (("--prefetch", "off"), "--prefetch has an effect only with"),
    "slots without times": (("--ahead", "4"), "--ahead has an effect only with --machine"),
    "no number as a seed": (("--seed", "x"), "argument --seed: invalid int value"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(cli: Run, recorded: Path, mistake: str):
    flags, says = MISTAKES[mistake]
    assert says in cli("simulate", recorded, *LRU, *flags).mistake


TIMED = {
    "an order that is no run": (("--order", "natural"), "leave out --order, or give"),
    "no size": ((), "the size of an expert: give --expert-bytes"),
    "a share as a size": (("--expert-bytes", "5%"), "--expert-bytes must be in bytes, as 12MiB"),
    "no size at all": (("--expert-bytes", "x"), "--expert-bytes is 'x': write bytes"),
    "slots without prefetching": (("--ahead", "4"), "--ahead has an effect only with --prefetch"),
    "no slots": (("--prefetch", "oracle", "--ahead", "0"), "--ahead must be at least 1 slot"),
    "an unknown predictor": (("--prefetch", "off,best"), "unknown predictor 'best': choose one of"),
    "a distance beyond": (("--prefetch", "markov:3"), "the model has 2 MoE layers"),
    "no such distance": (("--prefetch", "markov:0"), "it must be a number of layers"),
    "what needs a model": (
        ("--prefetch", "next-gate:2"), "predictor next-gate:2 needs a running model, and this trace"
        " does not have its predictions: record them with `greenroom trace record --predict"
        " next-gate:2`",
    ),
    "no predictions": (("--prefetch", "recorded"), "recorded needs a trace with predictions"),
    "no token ids": (("--prefetch", "token"), "predictor token needs token ids"),
    "no ids of drafts": (
        ("--speculate", "lookup", "--expert-bytes", "1MB"),
        "--speculate drafts tokens by their ids, which this trace does not have",
    ),
    "no protection": (
        ("--prefetch", "oracle", "--pin", "none", "--expert-bytes", "1MB"),
        "does not work with prefetching",
    ),
    "a policy of the future": (
        ("--prefetch", "oracle", "--policy", "opt", "--expert-bytes", "1MB"),
        "policy opt must know all expert requests beforehand",
    ),
    "an unknown processor": (("--expert-bytes", "1MB", "--processor", "tpu"), "choose one of cpu"),
    "an unknown store": (("--expert-bytes", "1MB", "--store", "tape"), "choose one of disk, host"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", TIMED)
def test_mistakes_about_time(cli: Run, recorded: Path, machine: Path, mistake: str):
    flags, says = TIMED[mistake]
    assert says in cli("simulate", recorded, *LRU, "--machine", machine, *flags).mistake


def test_a_profile_of_another_version(cli: Run, recorded: Path, machine: Path):
    machine.write_text(machine.read_text().replace('"version": 1', '"version": 7'))
    ran = cli("simulate", recorded, *LRU, "--machine", machine, "--expert-bytes", "1MB")
    assert "version 7, this Greenroom reads version 1" in ran.mistake


def test_no_such_trace_and_no_trace_at_all(cli: Run, tmp_path: Path):
    assert "No such file" in cli("simulate", tmp_path / "none.npz", *LRU).mistake
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    assert "other.npz" in cli("simulate", tmp_path / "other.npz", *LRU).mistake
    assert "nothing to simulate" in cli("simulate", "x.npz", "--capacity", 3).mistake


def test_ray_without_a_cluster(cli: Run, recorded: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    ran = cli("simulate", recorded, *LRU, "--ray", "local")
    assert (
        "--ray needs the package ray, which is not installed: pip install 'greenroom[ray]'"
        in ran.mistake
    )


def test_a_cache_that_is_resized(cli: Run, recorded: Path):
    def misses(*options: object) -> int:
        return int(cli("simulate", recorded, *LRU, *options, "--json").json["misses"])

    plain = misses()
    assert misses("--resize", "20:4") == plain
    assert misses("--resize", "20:1,40:4") > plain
    assert misses("--resize", "0:50%") == misses("--capacity", "50%") < plain
    # Token 8 is the first of the second prompt's pass: later tokens of the pass are the same.
    passes = {misses("--order", "runtime", "--resize", f"{token}:1") for token in (7, 8, 10)}
    assert len(passes) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--resize", "soon:4"), "give the number of a token and the size"),
        (("--resize", "20:99"), "--resize 99: must be from 1 to 16"),
        (("--resize", "99:4"), "the trace has only 70 tokens"),
        (("--resize", "9:4", "--reset"), "--resize and --reset exclude each other"),
        (("--resize", "9:4", "--machine", "auto"), "--resize counts misses only"),
    ],
)
def test_an_impossible_resize(cli: Run, recorded: Path, options: tuple[str, ...], message: str):
    assert message in cli("simulate", recorded, *LRU, *options).mistake
