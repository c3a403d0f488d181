"""`greenroom serve --adapter`: each variant answers as the complete checkpoint would."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from tests.adapters import make_adapter, merge
from tests.cli.conftest import Run
from tests.cli.test_serve import DEMO, served

PROMPT = "Once upon a time"
TOKENS = 12


@pytest.mark.process
@pytest.mark.timeout(240)
def test_variants_answer_as_complete_checkpoints(cli: Run, tmp_path: Path) -> None:
    every_third = {layer: range(layer, 32, 3) for layer in range(9)}
    math = make_adapter(DEMO, tmp_path / "math", every_third, seed=1)
    law = make_adapter(DEMO, tmp_path / "law", every_third, seed=2)
    checkpoints = {
        "demo": DEMO,
        "math": merge(DEMO, math, tmp_path / "merged-1"),
        "law": merge(DEMO, law, tmp_path / "merged-2"),
    }
    limits = ("--max-new-tokens", TOKENS, "--temperature", 0, "--raw", "--cache", "25%")
    alone = {name: cli("run", path, PROMPT, *limits).out for name, path in checkpoints.items()}
    assert len(set(alone.values())) == 3
    with served("--adapter", f"math={math}", "--adapter", f"law={law}") as (_, url, lines):
        assert "2 adapters" in "".join(lines)
        for name in ("law", "demo", "math", "law"):
            asked = {"model": name, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
            answer = httpx2.post(f"{url}/v1/completions", json=asked, timeout=60).json()
            text = answer["choices"][0]["text"]
            assert text
            assert alone[name].rstrip("\n") in (text, PROMPT + text)
