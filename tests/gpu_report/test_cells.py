"""What the report measures, rehearsed on a CPU: interpreted kernels, a model of two layers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu_report.conftest import FOLDER

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the report itself runs here"),
]
PARTS = ("tests", "kernels", "models", "demo")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Several would wait for one another: the model is tiny, and other tests run beside.

    Its weights, and with them the experts that are chosen, come from a fixed seed.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    (tmp_path / "scratch").mkdir()
    return Namespace(
        smoke=True, out=tmp_path, scratch=tmp_path / "scratch", until=time.time() + 600
    )


def test_names_of_cells_are_distinct_and_cover_what_is_asked(report) -> None:
    shapes = report("shapes")
    for smoke in (True, False):
        for part in PARTS:
            names = shapes.cells(part, smoke)
            assert len(names) == len(set(names)) > 0
    table = shapes.cells("kernels", smoke=False)
    assert "mixtral-8x7b:q4_0" in table
    assert "deepseek-v3:fp8" in table
    assert "gpt-oss-120b:fp8" not in table  # blocks of 128 do not divide 2880
    assert {f"{shape}:grouped_mm" for shape in shapes.KERNELS} <= set(table)


def test_every_encoding_is_filled_as_its_decoder_reads_it(report) -> None:
    """A step of one token is near to eager's, in every encoding and for both kinds of class."""
    cells, layers, shapes = map(report, ("kernel_cells", "kernel_layers", "shapes"))
    device = torch.device("cpu")
    wanted = [("qwen3-30b-a3b", encoding) for encoding in shapes.ENCODINGS]
    for name, encoding in [*wanted, ("gpt-oss-120b", "plain")]:
        shape = shapes.SMALL_KERNELS[name]
        layer = layers.Layer.make(shape, encoding, device, most=1)
        assert layer.capacity == 2 * shape.top_k < shape.experts  # some share a slot
        x, weights = layers.inputs(shape, 1, device)
        choice = layers.choices(shape, 1, 1)[0][:, :1]
        cells.distance(cells.TritonKernel(), layer, x, weights[:, :1], choice)


def test_choices_of_single_tokens_share_no_expert(report) -> None:
    layers, shapes = report("kernel_layers"), report("shapes")
    shape = shapes.KERNELS["qwen3-30b-a3b"]
    sets = [set(c.ravel().tolist()) for c in layers.choices(shape, 1, 16)]
    assert len(sets) == 16
    assert len(set().union(*sets)) == 128
    many = layers.choices(shape, 16, 4)
    assert len(many) == 4
    assert all(c.shape == (16, 8) and len(set(c[0])) == 8 for c in many)


def test_the_kernel_part(report, args, monkeypatch) -> None:
    cells, shapes = report("kernel_cells"), report("shapes")
    monkeypatch.setattr(shapes, "tokens", lambda smoke: (1,))
    part = cells.Cells(args, None)
    assert part.measure("memory")["copy_gb_s"] > 0
    for cell in ("gpt-oss-120b:grouped_mm", "gpt-oss-120b:mxfp4"):
        (row,) = part.measure(cell)["rows"]
        assert row["us"] > 0
        assert row["timed"] == "host"
        assert row["experts"] == 2
    with pytest.raises(report("ledger").NotHere):
        part.measure("sanitizer")


def test_a_wrong_kernel_fails_its_cell(report, args, monkeypatch) -> None:
    cells, shapes = report("kernel_cells"), report("shapes")
    monkeypatch.setattr(shapes, "tokens", lambda smoke: (1,))
    combine = cells.TritonKernel.combine
    monkeypatch.setattr(cells.TritonKernel, "combine", lambda self, step: combine(self, step) * 2)
    with pytest.raises(RuntimeError, match="from eager"):
        cells.Cells(args, None).measure("gpt-oss-120b:mxfp4")


def test_the_model_part(report, args, monkeypatch) -> None:
    part = report("model_cells").Cells(args, None)
    part._prompt, part._blocks = 32, (16, 32)
    values: dict[str, Any] = {
        cell: part.measure(f"qwen3-30b-a3b:{cell}")
        for cell in ("link", "transformers", "tier 100%", "tier 25%", "copies 25%",
                     "co-compute 25%", "trace 25%")
    }  # fmt: skip
    assert set(values["transformers"]) == {"grouped_mm", "eager"}
    assert values["tier 100%"]["hits"] == 1
    assert values["tier 100%"]["bytes_a_token"] == 0
    assert values["tier 25%"]["bytes_a_token"] > 0
    assert set(values["tier 25%"]["prefill"]) == {"16", "32"}
    assert 0 < values["copies 25%"]["hits"] < 1
    assert values["trace 25%"]["host"]
    assert (args.out / "trace.json.gz").stat().st_size > 100
    json.dumps(values)


def test_the_baselines_compute_what_transformers_computes(report, args) -> None:
    """Copies and stacked weights give the same logits, and leave the model as it was."""
    baselines, cells = report("baselines"), report("model_cells").Cells(args, None)
    bench = cells._model("qwen3-30b-a3b")
    experts, ids = cells._stacked(bench), torch.tensor([[5, 9, 2, 7]])
    with torch.inference_mode():
        with baselines.stock(bench.model, bench.names, experts, "eager"):
            wanted = bench.model(ids).logits
        copied = {}
        for resident in (0, 3, len(experts.host[0])):
            with baselines.copies(bench.model, bench.names, experts, resident) as counts:
                got = bench.model(ids).logits
            assert (got - wanted).abs().max() < 0.02 * wanted.abs().max()
            copied[resident] = counts["copied"], counts["requests"]
    requests = copied[0][1]
    assert requests > 0
    assert [n for n, _ in copied.values()] == [requests, copied[3][0], 0]
    assert 0 <= copied[3][0] <= requests
    module = bench.model.get_submodule(bench.names[0])
    assert module.gate_up_proj is None
    assert bench.model.config._experts_implementation == "greenroom"


@pytest.mark.slow
def test_the_whole_report_rehearsed(tmp_path) -> None:
    command = [sys.executable, str(FOLDER), "--smoke", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "--scratch", str(tmp_path / "scratch")],
        capture_output=True, text=True, timeout=1000, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert set(results) == {"machine", *PARTS}
    for part in PARTS:
        for cell, row in results[part].items():
            assert row["status"] in ("done", "left out"), (part, cell, row)
    assert results["tests"]["parallel"]["values"]["passed"] > 0
    assert not (tmp_path / "scratch").exists()


def test_outcomes_of_tests_are_counted_once(report, args, monkeypatch) -> None:
    """Both the process that runs a test and the one that collects report it."""
    outcomes, cells = report("outcomes"), report("test_cells")
    path = args.out / "outcomes"
    monkeypatch.setenv("OUTCOMES", str(path))

    def told(name: str, when: str, outcome: str) -> None:
        outcomes.pytest_runtest_logreport(
            Namespace(nodeid=name, when=when, outcome=outcome, duration=1.0, longrepr="E  far")
        )

    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    told("a", "call", "passed")
    assert not path.exists()
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    for row in (("a", "setup", "passed"), ("a", "call", "passed"), ("b", "setup", "failed"),
                ("c", "setup", "skipped")):  # fmt: skip
        told(*row)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = cells.summed(rows, 1, 2.0)
    assert [found[key] for key in ("passed", "failed", "skipped")] == [1, 1, 1]
    assert found["failures"][0]["test"] == "b"


def test_tests_that_the_deadline_ends_are_run_again(report, args, monkeypatch) -> None:
    cells, ledger, worker = report("test_cells"), report("ledger"), report("worker")
    monkeypatch.setenv("PYTHONPATH", "src")

    def cut(command: list[str], *, env: dict[str, str], timeout: float, **_: Any) -> None:
        row = {"test": "a", "outcome": "passed", "seconds": 1.0, "reason": ""}
        Path(env["OUTCOMES"]).write_text(json.dumps(row) + "\n")
        raise subprocess.TimeoutExpired(command, timeout, output=b"half a")

    monkeypatch.setattr(cells.subprocess, "run", cut)
    book = ledger.Ledger(args.out)
    args.part, args.run = "tests", "1"
    assert worker.measured(book, args, cells.Cells(args, book), "parallel")
    assert book.rows()["tests", "parallel"]["values"]["passed"] == 1
    assert book.open_cells("tests", ["parallel"], "1") == []
    assert book.open_cells("tests", ["parallel"], "2") == ["parallel"]


def test_a_call_that_no_graph_can_hold_is_timed_by_events(report, monkeypatch) -> None:
    """Stand-ins for CUDA's streams, graphs and events: what is called, and the stream after it."""
    machine, calls = report("machine"), []

    class Anything:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: Any) -> None: ...
        def __getattr__(self, name: str) -> Any:
            return lambda *_: calls.append(name) or 2.0

    class Refusing(Anything):
        def __exit__(self, *_: Any) -> None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    for name in ("Stream", "Event", "CUDAGraph", "stream"):
        monkeypatch.setattr(torch.cuda, name, Anything)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Anything())
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _: calls.append("home"))
    at = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "graph", Refusing)
    assert machine.device_seconds(lambda: None, at) == (0.002, "events")
    assert "home" in calls
    assert "replay" not in calls
    monkeypatch.setattr(torch.cuda, "graph", Anything)
    assert machine.device_seconds(lambda: None, at) == (0.002, "graph")
    assert "replay" in calls
