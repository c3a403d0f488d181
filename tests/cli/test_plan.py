"""`greenroom plan`, `tune` and `bench`, and `--system` of `run` and `simulate`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from greenroom.cli.plan import seconds, store_setting
from greenroom.cli.tune import _entry as tuned
from greenroom.cli.tune import candidates
from greenroom.config import LoadConfig
from greenroom.core.cost import Link
from greenroom.core.machine import Machine, Processor, Route, Table, machine_name
from greenroom.errors import ModelError, UsageError
from greenroom.hf.load.describe import describe
from greenroom.hf.measure.harness import Harness
from greenroom.plan.costs import RunMeasurement
from greenroom.plan.estimate import Estimate
from greenroom.plan.history import files
from greenroom.plan.planner import Plan
from greenroom.plan.settings import DEFAULT, PLAIN, Setting
from greenroom.runtime.measure.bandwidth import host_facts
from greenroom.trace import save
from tests.cli.conftest import Run
from tests.options import needs_option
from tests.plan import models
from tests.sim import small


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, with a profile of another machine beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(files.SWITCH, "on")
    (tmp_path / "abacus.json").write_text(json.dumps(models.MACHINE.as_json()))
    mine = Machine(models.MACHINE.routes, models.MACHINE.processors, host_facts(), {})
    (tmp_path / "cache" / "greenroom").mkdir(parents=True)
    (tmp_path / "cache" / "greenroom" / "machine.json").write_text(json.dumps(mine.as_json()))
    return tmp_path


def trace_of(folder: Path, path: Path, top_k: int = 2) -> Path:
    """Random routing of the tiny model's shape."""
    model = describe(str(folder), LoadConfig())
    requests = [[-6, *[1] * 12]] * 4
    layers, experts = model.layers, model.experts_per_layer[0]
    save(small.trace(requests, layers=layers, experts=experts, top_k=top_k), path)
    return path


def test_a_plan_of_a_recording(cli: Run, folder: Path, home: Path):
    model = describe(str(folder), LoadConfig())
    memory = model.memory(model.experts // 2)
    trace = trace_of(folder, home / "t.safetensors")
    ran = cli("plan", folder, "--memory", memory + (64 << 20), "--trace", trace, "--target-tpot",
              "1000s", "-o", home / "p.html", "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    found = ran.json
    assert "recorded, 72 tokens of 4 requests" in found["routing"]
    assert "(this one)" in found["machine"]
    assert found["best"]["flags"].startswith("--policy ")
    assert {(e["policy"], e["prefetch"]) for e in found["compared"]} >= {("lru", "off")}
    assert found["target"]["blocked"] is None
    assert found["target"]["memory"] <= memory + (64 << 20)
    assert "<svg" in (home / "p.html").read_text()


def test_a_plan_of_stand_ins_on_another_machine(cli: Run, folder: Path, home: Path):
    ran = cli("plan", folder, "--memory", "2GiB", "--machine", home / "abacus.json",
              "--target-tpot", "0.0001ms")  # fmt: skip
    assert ran.code == 0, ran.err
    assert "abacus, 2 cores, 1 GiB (another machine than this one)" in ran.out
    assert "synthetic, with typical" in ran.out
    assert "out of reach" in ran.out
    assert "the nearest TPOT is" in ran.out
    assert "recommended: greenroom run" in ran.out


def test_runs_of_this_model_are_what_a_plan_goes_by(cli: Run, folder: Path, home: Path):
    model = describe(str(folder), LoadConfig())
    run = RunMeasurement(0.5, 0.1, 1.0, 1e9, 1.0)
    files.update_records(
        model.fingerprint, machine_name(host_facts()), lambda records: records.with_runs((run,))
    )
    ran = cli("plan", folder, "--memory", "2GiB", "--json")
    assert "and 1 runs of this model on it" in ran.json["machine"]
    assert ran.json["best"]["tpot_s"] > 0.3


def test_a_choice_that_is_sure_is_left_to_runs(home: Path):
    def estimate(setting: Setting, tpot: float) -> Estimate:
        return Estimate(setting, 20, 0, tpot, tpot, tpot, None, 0.5, 1.0, 0.5, np.full(4, tpot))

    best = estimate(Setting("lcp", "per-layer", "off"), 0.08)
    found = Plan(1, 20, best, True, (best, estimate(PLAIN, 0.1)), (), None)
    store_setting(models.MODEL, models.MACHINE, found, "cpu")
    left = files.load_records("abc", machine_name(models.HOST)).nearest(21)
    assert left is not None
    assert left.options == {"policy": "lcp", "scope": "per-layer", "prefetch": "off"}
    assert (left.by, left.tpot, left.plain) == ("plan", 0.08, 0.1)


def test_what_a_plan_was_made_for_is_in_the_command(cli: Run, folder: Path, home: Path):
    ran = cli("plan", folder, "--memory", "2GiB", "--read-limit", "5MB", "--context", 96)
    assert "--memory 2GiB --context 96 --read-limit 5MB --policy" in ran.out
    assert "TTFT" in ran.out
    usual = cli("plan", folder, "--memory", "2GiB")
    assert "--memory 2GiB --policy" in usual.out


def test_a_plan_for_other_circumstances_is_not_left_to_runs(
    cli: Run, folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
):
    left = []
    monkeypatch.setattr("greenroom.cli.plan.store_setting", lambda *given: left.append(given[-1]))
    monkeypatch.setattr("greenroom.plan.planner.surely_faster", lambda one, other: True)
    model = describe(str(folder), LoadConfig(context=96))
    memory = model.memory(model.experts // 2)
    trace = trace_of(folder, home / "t.safetensors")
    asked = ("plan", folder, "--memory", memory, "--context", 96, "--trace", trace)
    for more in (("--read-limit", "5MB"), ("--machine", home / "abacus.json")):
        assert cli(*asked, *more).code == 0
    assert left == []
    assert "the defaults for this --memory" not in cli(*asked).out
    assert left == ["cpu"]


def test_a_profile_made_under_load_is_named(cli: Run, folder: Path, home: Path):
    busy = replace(models.MACHINE, host={**models.HOST, "load": 3.0})
    (home / "busy.json").write_text(json.dumps(busy.as_json()))
    asked = ("plan", folder, "--memory", "2GiB", "--machine")
    assert "other programs ran during" in cli(*asked, home / "busy.json").out
    assert "other programs ran during" not in cli(*asked, home / "abacus.json").out


def test_mistakes(cli: Run, folder: Path, home: Path):
    assert "more than the budget of 1 MiB: " in cli("plan", folder, "--memory", "1MiB").mistake
    wrong = trace_of(folder, home / "t.safetensors", top_k=1)
    said = cli("plan", folder, "--memory", "2GiB", "--trace", wrong).mistake
    assert "is a trace of another model" in said
    assert "write a time above 0" in cli(
        "plan", folder, "--memory", "2GiB", "--target-tpot", "fast").mistake  # fmt: skip
    (home / "bad.json").write_text("{}")
    assert "is no machine profile" in cli(
        "plan", folder, "--memory", "2GiB", "--machine", home / "bad.json").mistake  # fmt: skip
    assert "there is no folder" in cli(
        "plan", folder, "--memory", "2GiB", "-o", home / "none" / "p.html").mistake  # fmt: skip
    assert "the following arguments are required: --memory" in cli("plan", folder).mistake


def test_times_are_written_with_units():
    assert seconds("120ms") == pytest.approx(0.12)
    assert seconds("0.5 s") == 0.5
    for wrong in ("120", "-1ms", "0ms", "1m"):
        with pytest.raises(UsageError, match="write a time above"):
            seconds(wrong)


def test_systems_side_by_side(cli: Run, folder: Path, home: Path):
    ran = cli("bench", folder, "--cache", "50%", "--system", "llru,greenroom", "--rounds", 2,
              "--tokens", 16, "--json", "--kernels", "eager")  # fmt: skip
    assert ran.code == 0, ran.err
    rows = json.loads(ran.out)
    assert [row["name"] for row in rows] == ["llru", "greenroom"]
    assert rows[0]["ratio"] == [1, 1, 1]
    assert all(row["same_tokens"] and row["rounds"] == 2 for row in rows)
    shown = cli("bench", folder, "--cache", "50%", "--system", "llru", "--policy", "fifo",
                "--rounds", 1, "--tokens", 16, "--kernels", "eager")  # fmt: skip
    assert "fifo" in shown.out
    assert "experts in memory, 1 interleaved rounds" in shown.out


def test_what_cannot_be_measured(cli: Run, folder: Path, home: Path):
    asked = ("bench", folder, "--cache", "50%")
    assert "system hobbit needs misses in int4" in cli(*asked, "--system", "hobbit").mistake
    assert "unknown system" in cli(*asked, "--system", "fastest").mistake
    assert "there is nothing to compare" in cli("bench", folder, "--cache", "100%").mistake
    assert "--tokens must be at least 16" in cli(*asked, "--tokens", 4).mistake
    assert "--rounds must be at least 1" in cli(*asked, "--rounds", 0).mistake
    for chosen in (("--policy", "lru"), ("--split", "0.5")):
        assert "is an option that `greenroom tune` chooses" in cli("tune", folder, *chosen).mistake


def test_what_tune_measures(monkeypatch: pytest.MonkeyPatch):
    """Plain LRU and the default are first; of a plan's others the best two, split or not."""
    cut = replace(DEFAULT, scope="6,6", split="0.5,0.75")
    others = [cut, DEFAULT, replace(PLAIN, split="0.5"), PLAIN, Setting("lcp", "shared", "off")]
    found = [Estimate(s, 8, 0, 1.0, 1.0, 1.0, None, 0.5, 1.0, 0.5, np.ones(1)) for s in others]
    monkeypatch.setattr(
        "greenroom.plan.planner.compare_settings", lambda estimator, capacity: found
    )
    chosen = candidates(None, 8)
    assert chosen == [PLAIN, DEFAULT, cut, replace(PLAIN, split="0.5")]
    entries = [tuned(setting, LoadConfig(cache="50%")) for setting in chosen]
    assert [each.name for each in entries] == [
        "plain LRU", "next-use, shared, prefetching",
        "next-use, sizes by layer, prefetching, split by layer", "lru, shared, split at 0.5",
    ]  # fmt: skip
    assert [each.config.split for each in entries] == ["off", "off", "0.5,0.75", "0.5"]


def test_tune_keeps_a_winner_that_a_run_takes(cli: Run, folder: Path, home: Path):
    ran = cli("tune", folder, "--cache", "50%", "--rounds", 1, "--tokens", 16, "--json",
              "--kernels", "eager")  # fmt: skip
    assert ran.code == 0, ran.err
    found = ran.json
    assert found["winner"] in [row["name"] for row in found["rows"]]
    assert "plain LRU" in [row["name"] for row in found["rows"]]
    machines = json.loads(Path(found["stored"]).read_text())["machines"]
    (known,) = machines.values()
    assert known["settings"][0]["by"] == "tune"
    assert len(known["runs"]) == sum(row["prefetch"] == "off" for row in found["rows"])
    run = cli("run", folder, "hello", "--cache", "50%", "--max-new-tokens", 2, "--kernels", "eager")
    assert "settings measured by tune on" in run.err


@pytest.mark.parametrize("policy", ["lru", "next-use"])
def test_tune_leaves_out_what_cannot_be_attached(
    cli: Run, folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch, policy: str
):
    """Without plain LRU there is nothing to compare with; any other setting is left out."""
    attach = Harness.attach

    def failing(harness: Harness, config: LoadConfig, **options: Any) -> None:
        if config.policy == policy:
            raise ModelError("the experts cannot be read")
        attach(harness, config, **options)

    monkeypatch.setattr(Harness, "attach", failing)
    ran = cli("tune", folder, "--cache", "50%", "--rounds", 1, "--tokens", 16, "--json",
              "--kernels", "eager")  # fmt: skip
    if policy == "lru":
        assert ran.mistake == "plain LRU could not be measured: the experts cannot be read"
        return
    assert ran.code == 0, ran.err
    assert "next-use, shared, prefetching is left out: the experts cannot be read" in ran.err
    assert "next-use" not in {row["policy"] for row in ran.json["rows"]}
    assert "plain LRU" in {row["name"] for row in ran.json["rows"]}


def test_tune_behind_a_limit_is_not_left_to_runs(cli: Run, folder: Path, home: Path):
    ran = cli("tune", folder, "--cache", "50%", "--rounds", 1, "--tokens", 16, "--read-limit",
              "100MB", "--kernels", "eager")  # fmt: skip
    assert ran.code == 0, ran.err
    assert "not stored (with --read-limit" in ran.out


def test_a_run_takes_the_setting_that_tune_stored_for_its_budget(
    cli: Run, folder: Path, home: Path
):
    digest = describe(str(folder), LoadConfig()).fingerprint
    dense = describe(str(folder), LoadConfig()).dense_bytes
    files.update_records(
        digest, machine_name(host_facts()), lambda records: records.with_load((400 << 20) - dense)
    )
    model = describe(str(folder), LoadConfig())
    memory = model.memory(model.experts // 2)
    ran = cli("tune", folder, "--memory", memory, "--rounds", 1, "--tokens", 16, "--json",
              "--kernels", "eager")  # fmt: skip
    assert ran.code == 0, ran.err
    run = cli("run", folder, "hello", "--memory", memory, "--max-new-tokens", 2,
              "--kernels", "eager")  # fmt: skip
    assert "settings measured by tune on" in run.err
    said = cli("plan", folder, "--memory", memory, "--json").json
    assert said["best"]["policy"] == json.loads(ran.out)["rows"][0]["policy"]


def test_a_run_as_a_system(cli: Run, folder: Path, home: Path):
    asked = ("run", folder, "hello", "--cache", "50%", "--max-new-tokens", 2, "--kernels", "eager")
    ran = cli(*asked, "--system", "mixtral-offloading", "--policy", "fifo", "--verbose")
    assert ran.code == 0, ran.err
    assert "--policy fifo" in ran.err
    assert "--scope per-layer" in ran.err
    assert "--prefetch next-gate:1" in ran.err
    assert "greenroom pack" in cli(*asked, "--system", "moepic").mistake  # splits need a pack
    assert "system hobbit needs" in cli(*asked, "--system", "hobbit").mistake
    assert (
        "system static needs experts chosen before the run"
        in cli(*asked, "--system", "static").mistake
    )


def test_systems_over_a_trace(cli: Run, home: Path):
    save(models.trace(), home / "t.safetensors")
    asked = ("simulate", home / "t.safetensors", "--capacity", 16)
    ran = cli(*asked, "--system", "mixtral-offloading,adapmoe,static,greenroom", "--json")
    rows = json.loads(ran.out)
    assert [row["system"] for row in rows] == [
        "mixtral-offloading", "adapmoe", "static", "greenroom"
    ]  # fmt: skip
    assert [row["scope"] for row in rows] == ["per-layer", "given", "shared", "shared"]
    assert rows[0]["without"] == ["prefetching, which needs --machine"]
    assert rows[2]["without"] == []
    timed = cli(*asked, "--system", "fate,greenroom,hybrimoe", "--machine", home / "abacus.json",
                "--expert-bytes", "1MiB")  # fmt: skip
    assert timed.code == 0, timed.err
    assert "noisy-oracle:1,like=next-gate replaces" in timed.err
    assert "hybrimoe: without misses computed by the host's processor" in timed.err
    over = json.loads(cli(*asked, "--system", "llru", "--policy", "fifo", "--scope", "per-layer",
                          "--json").out)  # fmt: skip
    assert (over["policy"], over["scope"]) == ("fifo", "per-layer")
    assert "nothing to simulate" in cli(*asked).mistake
    by_rank = (*asked, "--policy", "lru", "--prefetch-rule", "all")
    assert "--prefetch-rule has an effect only with --machine" in cli(*by_rank).mistake
    timed = ("--machine", home / "abacus.json", "--expert-bytes", "1MiB")
    needs = "--prefetch-rule has an effect only with --prefetch or --system"
    assert needs in cli(*by_rank, *timed).mistake
    assert "prefetches nothing: give llru" in cli(*asked, "--system", "llru+greenroom").mistake
    row = cli(*by_rank, *timed, "--prefetch", "markov", "--json").json
    assert (
        row["prefetches"]
        > cli(*by_rank[:-2], *timed, "--prefetch", "markov", "--json").json["prefetches"]
    )
    assert "unknown system" in cli(*asked, "--system", "x").mistake
    assert "leave out --system" in cli(*asked, "--system", "llru", "--report", "r.html").mistake


def test_moepic_over_a_trace(cli: Run, home: Path):
    """Algorithm 1 where there are times to weigh, a dynamic programme where there are none."""
    save(models.trace(), home / "t.safetensors")
    asked = ("simulate", home / "t.safetensors", "--capacity", 16, "--system", "moepic", "--json")
    untimed = cli(*asked).json
    assert untimed["scope"] == "given"
    assert untimed["without"][0].startswith("Algorithm 1, which needs --machine")
    timed = (*asked, "--machine", home / "abacus.json", "--expert-bytes", "1MiB")
    cut = cli(*timed).json
    assert len(cut["split"]) == 4
    assert min(cut["split"]) < 1
    assert cut["bottoms"] > 0  # of split experts, which were played
    assert cut["without"] == [
        "next-gate:1,width=all, which noisy-oracle:1,like=next-gate,width=all replaces, since the"
        " trace has no predictions of it"
    ]
    few = cli(*timed[:3], 5, *timed[4:]).json
    assert "splits, which need more than 5 slots" in few["without"][-1]
    assert "split" not in few
    halves = cli(*timed, "--split", "0.5").json
    assert "split" not in halves  # the user's, not Algorithm 1's
    assert halves["bottoms"] > cut["bottoms"]
    equal = cli(*timed, "--scope", "per-layer").json
    assert (equal["scope"], "bottoms" in equal) == ("per-layer", False)
    assert equal["without"][0] == "split experts, since --scope is given without --split"


@needs_option("co_compute")
def test_a_plan_for_two_processors(cli: Run, folder: Path, home: Path):
    """An expert comes to the device in 40 ms, and the host computes it in 1."""
    nbytes = models.MIB
    table = Table((nbytes,), (1, 16), ((1e-3, 4e-3),))
    routes = (
        Route("disk", "host", Link(1e9)), Route("host", "device", Link(nbytes / 40e-3)),
    )  # fmt: skip
    processors = (Processor("gpu", "device", table, table), Processor("cpu", "host", table, table))
    machine = home / "gpu.json"
    machine.write_text(json.dumps(Machine(routes, processors, models.HOST).as_json()))
    asked = ("plan", folder, "--memory", "2GiB", "--machine", machine, "--processor", "gpu")
    alone = home / "cpu.json"
    alone.write_text(json.dumps(Machine(routes[:1], processors[1:], models.HOST).as_json()))
    assert "needs experts in host memory" in cli(
        *asked[:5], alone, "--co-compute", "auto").mistake  # fmt: skip
    assert "unknown co_compute 'on'" in cli(*asked, "--co-compute", "on").mistake
    failed = cli(*asked[:-1], "cpu", "--host-memory", "1GiB")
    assert "--host-memory is for a GPU" in failed.mistake
    usual = cli(*asked[:-2])  # a run's device, and what it keeps in host memory
    assert "gpu computes" in usual.out
    assert "--device cuda" in usual.out
    assert "--device cpu" in cli(*asked[:-1], "cpu").out
    ran = cli(*asked, "--host-memory", "1GiB", "--co-compute", "auto", "--json")
    assert ran.code == 0, ran.err
