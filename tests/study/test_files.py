"""Parquet and oracleGeneral files of traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from greenroom import study
from greenroom.config import ZipfConfig
from greenroom.errors import OutputError, TraceError, UnknownName
from greenroom.study.oracle_general import RECORD
from greenroom.trace import Trace
from greenroom.trace.synth import zipf
from tests.trace.test_trace import small


@pytest.fixture
def wide() -> Trace:
    """A trace with ids above 255, layers of several sizes and a label that repeats."""
    random = np.random.default_rng(0)
    experts = np.stack([[random.permutation(300)[:3], random.permutation(20)[:3]] for _ in "abcd"])
    return Trace(
        experts.astype(np.uint16), np.array([300, 20]), np.array([0, 1, 4]), np.array([0, 1, 3, 4]),
        np.array([True, False, True]), ("same", "same"), meta={"model": "m", "expert_bytes": 5},
    )  # fmt: skip


def test_parquet_gives_the_trace_back(tmp_path: Path, wide: Trace) -> None:
    pytest.importorskip("pyarrow")
    full = small(
        weights=np.linspace(0, 1, 20, dtype=np.float16).reshape(5, 2, 2),
        token_ids=np.arange(5, dtype=np.int32),
    )
    for one in (wide, full):
        study.save_parquet(one, tmp_path / "a.parquet")
        again = study.load_parquet(tmp_path / "a.parquet")
        for name in (
            "experts", "experts_per_layer", "request_starts", "pass_starts", "pass_prefill",
            "weights", "token_ids",
        ):  # fmt: skip
            before, after = getattr(one, name), getattr(again, name)
            assert (before is None) == (after is None), name
            assert before is None or np.array_equal(before, after), name
            assert before is None or before.dtype == after.dtype, name
        assert (again.labels, again.meta) == (one.labels, one.meta)


def test_another_parquet_file_is_one_line(tmp_path: Path, wide: Trace) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    good = study.tokens(wide)
    facts = {b"greenroom.trace": b'{"experts_per_layer": [300, 20]}'}
    for table, message in (
        (pa.table({"a": [1]}), "not an object"),
        (good.replace_schema_metadata({b"greenroom.trace": b"{"}), "not JSON"),
        (good.drop_columns("pass").replace_schema_metadata(facts), "columns pass are missing"),
        (good.slice(1).replace_schema_metadata(facts), "7 rows are not a row for each"),
    ):
        parquet.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(TraceError, match=message) as caught:
            study.load_parquet(tmp_path / "a.parquet")
        assert "\n" not in str(caught.value)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for path in (tmp_path / "a.parquet", tmp_path / "none"):
        with pytest.raises(TraceError, match=str(path)):
            study.load_parquet(path)


def test_oracle_general_has_24_bytes_a_request_and_its_next_use(tmp_path: Path) -> None:
    tokens = [[[0, 1], [2, 1]], [[1, 0], [1, 0]], *[[[2, 3], [1, 2]]] * 3]
    one = replace(small(), experts=np.array(tokens, np.uint8))
    path = tmp_path / "x.oracleGeneral.bin"
    assert study.save_oracle_general(one, path, size=7) == 20
    records = np.fromfile(path, RECORD)
    assert path.stat().st_size == 24 * 20
    first = int(one.experts_per_layer[0])
    assert records["object"][:8].tolist() == [
        1,
        2,
        first + 3,
        first + 2,
        2,
        1,
        first + 2,
        first + 1,
    ]
    assert records["time"].tolist() == [n for n in range(5) for _ in range(4)]
    assert set(records["size"].tolist()) == {7}
    for i, record in enumerate(records):
        later = np.flatnonzero(records["object"][i + 1 :] == record["object"])
        assert record["next_use"] == (i + 1 + later[0] if later.size else -1)


def test_oracle_general_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="natural"):
        study.save_oracle_general(small(), tmp_path / "x", order="random")
    with pytest.raises(OutputError):
        study.save_oracle_general(small(), tmp_path / "none" / "x")


def test_libcachesim_counts_the_same_misses(tmp_path: Path) -> None:
    libcachesim = pytest.importorskip("libcachesim")
    one = zipf(ZipfConfig(layers=4, experts=16, top_k=2, tokens=300))
    path = tmp_path / "x.oracleGeneral.bin"
    count = study.save_oracle_general(one, path)
    kind = libcachesim.TraceType.ORACLE_GENERAL_TRACE
    reader = libcachesim.TraceReader(str(path), kind)
    for name, theirs in (("lru", libcachesim.LRU), ("fifo", libcachesim.FIFO),
                         ("opt", libcachesim.Belady)):  # fmt: skip
        ratio, _ = theirs(20).process_trace(reader)
        assert round(ratio * count) == study.simulate(one, name, 20, pin="none")[0]["misses"], name
