"""Recordings that others publish: a small folder of each format, and damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from greenroom import study
from greenroom.errors import TraceError, UnknownName, UsageError

DAMAGED = "not a recording of this format|this npz file is damaged"
EXPERTS = np.array([[[0, 3], [2, 1]], [[3, 1], [0, 2]], [[1, 2], [3, 0]]])  # 3 tokens, 2 layers
WEIGHTS = np.arange(12).reshape(3, 2, 2) / 16


def moe_beyond(path: Path) -> None:
    """Layer by layer, counted from 1; ids in brackets."""
    rows = ["Layer ID,Batch Number,Token,Activated Expert IDs"]
    for layer in range(2):
        rows += [f'{layer + 1},0,"a,b","{EXPERTS[token, layer].tolist()}"' for token in range(3)]
    path.write_text("\n".join(rows) + "\n")


def fingerprinting(path: Path) -> None:
    """An object for each generated token, which names the token's place."""
    data = [
        {f"token_{90 + t}": {
            f"layer_{layer}": {"selected_experts": EXPERTS[t, layer].tolist(),
                               "selected_probs": WEIGHTS[t, layer].tolist()}
            for layer in range(2)
        }} for t in range(3)
    ]  # fmt: skip
    path.write_text(json.dumps({"full_text": ["a"], "router_data": data}))


def residency(path: Path) -> None:
    """An event for each token and layer."""
    np.savez(
        path, layer_index=np.tile(np.arange(2, dtype=np.int16), 3),
        requested_expert_ids=EXPERTS.reshape(6, 2).astype(np.int16),
        router_weights=WEIGHTS.reshape(6, 2).astype(np.float32),
        token_id=np.repeat([7, 8, 9], 2).astype(np.int32),
    )  # fmt: skip


def expert_selection(path: Path) -> None:
    """The prompt's pass of two tokens, then one token; layer 0 is dense."""
    passes = [
        {"0": None, "10": EXPERTS[:2, 1].tolist(), "2": EXPERTS[:2, 0].tolist()},
        {"0": None, "2": {"selected_experts": EXPERTS[2:, 0].tolist()},
         "10": EXPERTS[2:, 1].tolist()},
    ]  # fmt: skip
    path.write_text(json.dumps(passes))


WRITERS: dict[str, tuple[Callable[[Path], None], str, int]] = {
    "moe-beyond": (moe_beyond, "prompt_{}_data.csv", 3),
    "expert-fingerprinting": (fingerprinting, "{}_examples.json", 0),
    "olmoe-residency": (residency, "sequence_{}.npz", 0),
    "expert-selection": (expert_selection, "{}.json", 2),
}


def write(folder: Path, name: str, labels: tuple[str, ...] = ("a", "b")) -> list[Path]:
    writer, pattern, _ = WRITERS[name]
    paths = []
    for label in labels:
        (folder / label).mkdir(parents=True, exist_ok=True)
        paths.append(folder / label / pattern.format(1))
        writer(paths[-1])
    return paths


def count(name: str) -> int | None:
    return 4 if study.FORMATS[name].experts is None else None


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_becomes_a_trace(name: str, tmp_path: Path) -> None:
    write(tmp_path, name)
    trace = study.load_published(name, tmp_path, experts=count(name))
    assert np.array_equal(trace.experts, np.concatenate([EXPERTS, EXPERTS]))
    assert trace.experts.dtype == np.uint8
    assert trace.request_starts.tolist() == [0, 3, 6]
    assert trace.labels == ("a", "b")
    assert set(trace.experts_per_layer.tolist()) == {study.FORMATS[name].experts or 4}
    prompt = WRITERS[name][2]
    first = [0, *range(prompt or 1, 4)] if prompt != 3 else [0, 3]
    assert trace.pass_starts[trace.pass_starts <= 3].tolist() == first
    assert trace.pass_prefill.tolist()[0] is bool(prompt)
    assert trace.pass_prefill.sum() == 2 * bool(prompt)
    if trace.weights is not None:
        assert np.array_equal(trace.weights[:3], WEIGHTS.astype(np.float16))
    assert (trace.weights is None) == (name in ("moe-beyond", "expert-selection"))
    if name == "olmoe-residency":
        assert trace.token_ids is not None
        assert trace.token_ids.tolist() == [7, 8, 9] * 2
    assert trace.meta["provenance"] == study.FORMATS[name].source


def test_files_and_a_limit_choose_requests(tmp_path: Path) -> None:
    write(tmp_path, "moe-beyond", ("a", "b", "c"))
    files = ["c/prompt_1_data.csv", "a/prompt_1_data.csv"]
    chosen = study.load_published("moe-beyond", tmp_path, files=files)
    assert chosen.labels == ("c", "a")
    assert study.load_published("moe-beyond", tmp_path, limit=4).labels == ("a", "b")


def test_flame_moe_has_a_file_for_each_layer(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    random = np.random.default_rng(0)
    tokens = 2048 + 5
    layers = [np.argsort(random.random((tokens, 64)), axis=1)[:, :6] for _ in range(3)]
    for number, ids in enumerate(layers, 2):
        scores = random.random((tokens, 6)).astype(np.float16)
        parquet.write_table(
            pa.table({"scores": pa.array(list(scores)), "indices": pa.array(ids.tolist(), pa.list_(
                pa.int16()))}), tmp_path / f"layer_{number:02d}.parquet",
        )  # fmt: skip
    trace = study.load_published("flame-moe", tmp_path)
    assert np.array_equal(trace.experts, np.stack(layers, axis=1))
    assert trace.request_starts.tolist() == [0, 2048, tokens]
    assert trace.pass_prefill.tolist() == [True, True]
    assert study.load_published("flame-moe", tmp_path, limit=2048).tokens == 2048


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("damage", ["", "{", '[{"2": [[0.5]]}]', "Layer ID\n1\n", '{"a": 1}', "PK"])
def test_a_damaged_file_is_one_line(name: str, damage: str, tmp_path: Path) -> None:
    path, _ = write(tmp_path, name)
    path.write_text(damage)
    with pytest.raises(TraceError, match=DAMAGED) as caught:
        study.load_published(name, tmp_path, experts=count(name))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "kind", "message"),
    [
        ("other", {}, UnknownName, "unknown format 'other': choose one of moe-beyond"),
        ("expert-selection", {}, UsageError, "give experts, the number of experts of a layer"),
        ("moe-beyond", {"experts": 8}, UsageError, "leave out experts, its layers have 64"),
        ("moe-beyond", {}, TraceError, "there are no files"),
        ("moe-beyond", {"files": ["none.csv"]}, TraceError, "No such file"),
    ],
)
def test_a_mistake_is_one_line(name, options, kind, message, tmp_path: Path) -> None:
    with pytest.raises(kind, match=message) as caught:
        study.load_published(name, tmp_path, **options)
    assert "\n" not in str(caught.value)


def test_an_id_beyond_the_model_s_experts_and_two_models_are_refused(tmp_path: Path) -> None:
    first, _ = write(tmp_path, "expert-selection")
    with pytest.raises(TraceError, match="which has 3 experts"):
        study.load_published("expert-selection", tmp_path, experts=3)
    first.write_text('[{"2": [[0, 1]]}]')
    with pytest.raises(TraceError, match="several models: 1 layers, top-2; 2 layers, top-2"):
        study.load_published("expert-selection", tmp_path, experts=4)
