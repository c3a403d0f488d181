"""`greenroom models` prints the table that the parity tests are made from."""

from __future__ import annotations

import json

from greenroom.cli import main


def test_json_has_every_architecture_once(capsys):
    assert main(["models", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["qwen3_moe"]["how"] == "native"
    assert rows["switch_transformers"]["how"] == "adapter"
    assert "encoder-decoder" in rows["switch_transformers"]["special"]
    assert rows["gpt_oss"]["special"] == ["bias", "transposed", "gate and up interleaved"]
    assert "shared experts" in rows["deepseek_v3"]["special"]
    assert "text part" in rows["qwen3_vl_moe"]["special"]
    assert rows["doge"]["how"] == "not"
    assert rows["doge"]["reason"]
    assert "llama" not in rows
    assert rows["kimi_k25"]["how"] == "wrapper"
    assert rows["kimi_k25"]["tested"]
    assert not rows["llava"]["tested"]
    assert "gemma3" not in rows  # whose text part is always its own


def test_the_table_is_for_people(capsys):
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].split() == ["architecture", "support", "in", "GGUF", "remarks"]
    (mixtral,) = (line for line in lines if line.startswith("mixtral "))
    assert mixtral.split() == ["mixtral", "native", "llama"]
    (jetmoe,) = (line for line in lines if line.startswith("jetmoe "))
    assert jetmoe.split()[2] == "-"
    assert max(map(len, lines)) <= 132
    assert not any(line.startswith("kimi_k25 ") for line in lines)
    assert any("are supported" in line for line in lines)
    wrappers = out.partition("The text part of these multimodal architectures")[2]
    assert "kimi_k25" in wrappers
