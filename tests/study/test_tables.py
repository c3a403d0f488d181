"""Tables of traces, policies and results, and what is said without the extra."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import greenroom
from greenroom import study
from greenroom.config import TopicsConfig
from greenroom.errors import UnknownName, UsageError, VersionError
from greenroom.policies import POLICIES
from greenroom.trace.synth import topics
from tests.sim.small import trace
from tests.trace.test_trace import small

pytest.importorskip("pyarrow")
pytest.importorskip("pandas")


def test_a_row_for_each_token_and_layer() -> None:
    recorded = small(
        weights=np.arange(20, dtype=np.float16).reshape(5, 2, 2),
        token_ids=np.arange(10, 15, dtype=np.int32),
    )
    frame = study.tokens(recorded).to_pandas()
    assert len(frame) == 5 * 2
    assert frame["token"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert frame["layer"].tolist() == [0, 1] * 5
    assert frame["token_id"].tolist()[::2] == [10, 11, 12, 13, 14]
    first = frame.drop_duplicates("pass").set_index("pass")
    assert first["prefill"].tolist() == recorded.pass_prefill.tolist()
    assert first["token"].tolist() == recorded.pass_starts[:-1].tolist()
    by_request = frame.drop_duplicates("request")
    assert by_request["label"].tolist() == list(recorded.labels)
    assert by_request["token"].tolist() == recorded.request_starts[:-1].tolist()
    for name in ("experts", "weights"):
        values = np.stack(frame[name].to_numpy()).reshape(5, 2, 2)
        assert np.array_equal(values, getattr(recorded, name)), name


def test_results_are_a_table_with_nulls_where_a_result_lacks_a_field() -> None:
    results = study.simulate(trace([[-5, 1, 1]]), ["lru", "opt"], ["25%", 8])
    frame = study.table([*results, {"policy": "other", "note": "x"}]).to_pandas()
    assert frame["misses"].tolist()[:4] == [row["misses"] for row in results]
    assert frame["misses"].isna().tolist() == [False] * 4 + [True]
    assert frame["note"].tolist()[-1] == "x"


def test_the_table_of_policies_names_what_simulate_takes() -> None:
    rows = study.policies().to_pylist()
    assert [row["name"] for row in rows] == list(POLICIES)
    assert {row["name"] for row in rows if not row["online"]} == {"opt", "static"}
    for row in rows:
        full = f"{row['name']}:{row['options']}" if row["options"] else row["name"]
        assert study.policy(full).name == full


def test_a_sweep_has_every_trace_and_the_gap_that_each_policy_closes() -> None:
    one = topics(TopicsConfig(layers=3, experts=8, top_k=2, tokens=200, requests=4))
    traces = {"one": one, "head": one.head(50)}
    frame = study.sweep(traces, ["lru", "fifo", "opt"], ["25%", 12], pin="none").to_pandas()
    assert len(frame) == 2 * 3 * 2
    assert frame["share"].unique().tolist() == [0.25, 0.5]
    for name, part in frame.groupby("trace"):
        rows = study.simulate(traces[str(name)], ["lru", "fifo", "opt"], [6, 12], pin="none")
        misses = {(row["policy"], row["capacity"]): row["misses"] for row in rows}
        for row in part.to_dict("records"):
            size = row["capacity"]
            assert row["misses"] == misses[row["policy"], size]
            lru, opt = misses["lru", size], misses["opt", size]
            assert row["gap_closed"] == pytest.approx((lru - row["misses"]) / (lru - opt))


def test_the_floor_of_a_sweep_is_opt_without_pins() -> None:
    one = topics(TopicsConfig(layers=3, experts=8, top_k=4, tokens=100, requests=4))
    (row,) = study.sweep({"one": one}, "opt", 6, limit=80).to_pylist()
    head = one.head(80)
    lru, pinned, free = (
        study.simulate(head, name, 6, pin=pin)[0]["misses"]
        for name, pin in (("lru", "step"), ("opt", "step"), ("opt", "none"))
    )
    assert pinned > free
    assert row["gap_closed"] == pytest.approx((lru - pinned) / (lru - free))


def test_no_traces_are_a_mistake() -> None:
    with pytest.raises(UsageError, match="traces is empty"):
        study.sweep({}, "lru")


def test_plots_have_a_curve_for_each_policy_and_a_cell_for_each_expert() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    one = trace([[-5, 1, 1, 1]])
    results = study.simulate(one, ["lru", "opt"], ["25%", "50%"])
    axes = study.plot_misses(results)
    assert axes.get_legend_handles_labels()[1] == ["lru", "opt"]
    sizes, ratios = results.curves()["lru"]
    assert axes.lines[0].get_xdata().tolist() == [100 * n / 16 for n in sizes]
    assert axes.lines[0].get_ydata().tolist() == ratios
    assert study.plot_misses(results, "misses", axes) is axes
    assert len(axes.lines) == 4
    with pytest.raises(UnknownName, match="colour"):
        study.plot_misses(results, "colour")
    image = study.plot_experts(one).images[0].get_array()
    assert image.shape == (2, 8)
    assert np.allclose(image.mean(axis=1), 1)


@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("pyarrow", lambda path: study.policies()),
        ("pyarrow", lambda path: study.tokens(trace([[1]]))),
        ("pyarrow.parquet", lambda path: study.load_parquet(path)),
        ("matplotlib.pyplot", lambda path: study.plot_experts(trace([[1]]))),
    ],
)
def test_a_missing_library_is_one_line(
    module: str, call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # makes its import fail
    with pytest.raises(VersionError, match="pip install 'greenroom\\[study\\]'") as caught:
        call(tmp_path / "x")
    assert module.partition(".")[0] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_are_public() -> None:
    assert all(getattr(study, name) is not None for name in study.__all__)
    assert study.simulate is greenroom.simulate
