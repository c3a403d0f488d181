"""The worked example of docs/trace-format.md works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from greenroom.trace import load

DOC = Path(__file__).parents[2] / "docs" / "trace-format.md"


def test_the_example_makes_the_trace_that_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = DOC.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (data,) = re.findall(r"```json dump\.jsonl\n(.*?)```", text, re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    Path("dump.jsonl").write_text(data)
    exec(compile(code, str(DOC), "exec"), {})
    trace = load("mine.trace")
    assert trace.experts[:, 0].tolist() == [[0, 3], [3, 1], [3, 0], [2, 1]]
    assert trace.request_starts.tolist() == [0, 3, 4]
    assert trace.pass_starts.tolist() == [0, 2, 3, 4]
    assert trace.pass_prefill.tolist() == [True, False, True]
    assert trace.labels == ("maths", "prose")


def test_the_table_names_the_tensors_that_are_written(tmp_path: Path) -> None:
    import numpy as np
    from safetensors import safe_open

    from greenroom.trace import GateInputs, Prediction, save
    from tests.trace.test_trace import small

    full = small(
        weights=np.zeros((5, 2, 2), np.float16),
        token_ids=np.zeros(5, np.int32),
        output_norms=np.zeros((5, 2, 2), np.float32),
        token_changes=np.zeros((5, 2), np.float32),
        gate_inputs=GateInputs(np.array([1]), np.zeros((1, 2, 3), np.float32)),
        predictions={"NAME": Prediction(np.zeros((5, 2, 1), np.uint8), 1)},
    )
    save(full, tmp_path / "t")
    named = re.findall(r"^\| `([\w.]+)` \| (\w+)", DOC.read_text(encoding="utf-8"), re.MULTILINE)
    with safe_open(tmp_path / "t", "np") as file:
        assert {name for name, _ in named} == set(file.keys())
        for name, kind in named:
            assert file.get_slice(name).get_dtype() == kind
