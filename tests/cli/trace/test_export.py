"""`greenroom trace export`, and `trace import` of published folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from greenroom import study
from greenroom.study.oracle_general import RECORD
from greenroom.trace import load, save
from tests.cli.conftest import Run
from tests.study.test_published import EXPERTS, write
from tests.trace.strategies import assert_same
from tests.trace.test_trace import small


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    save(small(), tmp_path / "run.trace")
    return tmp_path / "run.trace"


def test_parquet_is_the_table_of_a_study(cli: Run, trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    out = tmp_path / "run.parquet"
    ran = cli("trace", "export", trace, "--format", "parquet", "-o", out)
    assert ran.code == 0, ran.err
    assert ran.out.startswith(f"{out}: 5 tokens of 2 requests")
    assert_same(study.load_parquet(out), load(trace))


def test_oracle_general_has_every_request(cli: Run, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.oracleGeneral.bin"
    ran = cli("trace", "export", trace, "--format", "oracle-general", "-o", out)
    assert ran.out == f"{out}: 20 requests\n"
    assert np.fromfile(out, RECORD)["object"].size == 20


def test_import_reads_a_published_folder(cli: Run, tmp_path: Path) -> None:
    write(tmp_path / "in", "expert-selection", ("a",))
    out = tmp_path / "out.trace"
    options = ("--format", "expert-selection", "--experts", 4, "-o", out)
    ran = cli("trace", "import", tmp_path / "in", *options)
    assert ran.code == 0, ran.err
    assert np.array_equal(load(out).experts, EXPERTS)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("export", "--format", "csv"), "invalid choice"),
        (("export",), "--format"),
        (("import", "--experts", 4), "--experts has an effect only with --format"),
        (("import", "--format", "other"), "unknown format 'other': choose one of moe-beyond"),
        (("import", "--format", "expert-selection"), "give experts"),
    ],
)
def test_a_mistake_is_one_line(cli: Run, trace: Path, tmp_path: Path, command, message) -> None:
    name, *options = command
    ran = cli("trace", name, trace, *options, "-o", tmp_path / "out")
    assert message in ran.mistake
    assert not (tmp_path / "out").exists()
