"""A model described by its headers: of a folder, a GGUF file, and a hub that is asked for them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import greenroom
from greenroom.config import LoadConfig
from greenroom.errors import CheckpointError, NotAModel, NotMoE, UnsupportedModel
from greenroom.hf.checkpoint import remote, resolve
from greenroom.hf.load.describe import describe
from tests.gguf_models import write
from tests.hub_server import HubServer, use
from tests.models import cached_tiny

CONFIG = LoadConfig(device="cpu", context=64)
DATA = Path(__file__).parents[2] / "data" / "gguf"


@pytest.fixture(scope="module")
def folder() -> Path:
    return cached_tiny("qwen3_moe", tokenizer=True)


@pytest.fixture
def server(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub on this machine that has the model as tiny/moe."""
    hub = HubServer()
    hub.add("tiny/moe", {path.name: path.read_bytes() for path in folder.iterdir()})
    with hub.serving():
        use(monkeypatch, hub, tmp_path / "hub")
        yield hub


def test_a_description_has_the_sizes_of_a_run(folder: Path):
    found = describe(str(folder), CONFIG)
    model, _ = greenroom.load(str(folder), cache="100%", device="cpu", context=64, prefetch="off")
    parts = model.greenroom.setup
    try:
        assert found.experts == parts.catalog.experts == found.offsets[-1]
        assert found.slot_bytes == parts.catalog.slot_bytes
        assert found.fingerprint == parts.fingerprint
        dense = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
        assert found.dense_bytes == dense
        assert found.kv_bytes == parts.keys_values.total_bytes(parts.context)
        assert found.context == parts.context == 64
        embedding = model.get_input_embeddings().weight.nbytes
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert found.read_bytes == dense - (0 if tied else embedding)
    finally:
        model.greenroom.detach()


def test_a_tied_embedding_counts_as_read():
    folder = cached_tiny("qwen3_moe", tokenizer=True, tie_word_embeddings=True)
    found = describe(str(folder), CONFIG)
    assert found.read_bytes == found.dense_bytes


def test_a_hub_id_is_described_from_its_headers(folder: Path, server: HubServer):
    found = describe("tiny/moe", CONFIG)
    here = describe(str(folder), CONFIG)
    alike = {"name": "", "overhead_bytes": 0}  # the process grows as tests run
    assert replace(found, **alike) == replace(here, **alike)
    assert server.weights_asked()
    assert all(server.weights_asked())  # ranges only: no file as a whole


def test_a_quantisation_on_the_hub_is_described_from_its_header(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
):
    """Headers longer than the first request are requested in further parts."""
    files = {path.name: path.read_bytes() for path in DATA.glob("Q[48]*.gguf")}
    server.add("tiny/gguf", files)
    monkeypatch.setattr(remote, "HEADER_BYTES", 512)
    found = describe("tiny/gguf:q4_k_m", CONFIG)
    asked = server.weights_asked()
    here = describe(str(DATA / "Q4_K_M.gguf"), CONFIG)
    alike = {"name": "", "overhead_bytes": 0}
    assert replace(found, **alike) == replace(here, **alike)
    assert asked[:2] == ["bytes=0-511", "bytes=512-1023"]
    last = int(asked[-1].rpartition("-")[2])
    assert last < len(files["Q4_K_M.gguf"]) - 1  # never all of it


@pytest.mark.parametrize(
    "stub", [b'{"model_type": "qwen3_moe"}', b'{"model_type": "mixtral"}', b""]
)
def test_a_config_of_the_repository_is_used_if_it_fits(
    server: HubServer, tmp_path: Path, stub: bytes
):
    """Repackagers have the original's config, a stub, or none: before a download and after it."""
    (folder := tmp_path / "local").mkdir()
    file = write(folder / "model.gguf", "qwen3_moe", {"": "Q8_0"}, rope_theta=5e5)
    files = {"Q8_0/x-Q8_0.gguf": file.read_bytes()}
    server.add("tiny/gguf", {**files, **({"config.json": stub} if stub else {})})
    here = describe(str(file), CONFIG)
    alike = {"name": "", "overhead_bytes": 0}
    assert replace(describe("tiny/gguf:Q8_0", CONFIG), **alike) == replace(here, **alike)
    path = resolve.resolve("tiny/gguf:Q8_0")
    assert replace(describe(str(path), CONFIG), **alike) == replace(here, **alike)
    config = resolve.open_checkpoint(file).hf_config()
    config.router_aux_loss_coef = 0.077  # the file's metadata do not have it
    server.add("tiny/other", {**files, "config.json": config.to_json_string().encode()})
    for opened in (resolve.open_or_inspect("tiny/other"), resolve.find_checkpoint("tiny/other")):
        assert opened.hf_config().router_aux_loss_coef == 0.077


def test_a_damaged_header_on_the_hub_is_an_error(server: HubServer):
    data = (DATA / "Q8_0.gguf").read_bytes()
    server.add("tiny/gguf", {"a-Q8_0.gguf": data[:4] + b"\x09" + data[5:]})
    with pytest.raises(UnsupportedModel, match=r"tiny/gguf/a-Q8_0.gguf: has GGUF version 9"):
        describe("tiny/gguf", CONFIG)
    server.add("tiny/gguf", {"a-Q8_0.gguf": data[:1000]})
    with pytest.raises(CheckpointError, match="cut off or damaged"):
        describe("tiny/gguf", CONFIG)


def test_a_model_that_the_hub_lacks_is_an_error(server: HubServer):
    with pytest.raises(NotAModel, match="no such model on the hub"):
        describe("tiny/other", CONFIG)


def test_a_hub_model_without_usable_files_is_an_error(server: HubServer):
    server.add("tiny/moe", {"config.json": b'{"model_type": "mixtral"}', "model.bin": b"x"})
    with pytest.raises(UnsupportedModel, match="no safetensors files on the hub"):
        describe("tiny/moe", CONFIG)
    server.add("tiny/moe", {"model.bin": b"x"})
    with pytest.raises(UnsupportedModel, match="no config"):
        describe("tiny/moe", CONFIG)


def test_a_hub_that_does_not_answer_is_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    use(monkeypatch, HubServer(port=9), tmp_path)
    with pytest.raises(NotAModel, match="could not be reached"):
        describe("tiny/moe", CONFIG)


def test_a_downloaded_model_is_read_from_the_local_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    whole = tmp_path / "snapshot"
    shutil.copytree(folder, whole)
    monkeypatch.setattr(resolve, "cached_model", lambda model: whole)
    monkeypatch.setattr(resolve, "read_remote", None)
    assert describe("tiny/moe", CONFIG).experts == describe(str(folder), CONFIG).experts
    monkeypatch.setattr(resolve, "cached_model", lambda model: None)
    monkeypatch.setattr(resolve, "read_remote", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(pytest.fail.Exception):
        describe("tiny/moe", CONFIG)


def test_offline_mode_is_named_in_the_error():
    with pytest.raises(NotAModel, match="HF_HUB_OFFLINE forbids"):
        describe("nobody/nothing", CONFIG)


def test_models_that_cannot_be_described_are_errors(tmp_path: Path):
    with pytest.raises(NotAModel, match="there is no such folder"):
        describe(str(tmp_path / "none"), CONFIG)
    dense = cached_tiny("qwen3", tokenizer=True)
    with pytest.raises(NotMoE):
        describe(str(dense), CONFIG)
    broken = tmp_path / "broken"
    shutil.copytree(cached_tiny("qwen3_moe", tokenizer=True), broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "hidden_size": 48}))
    with pytest.raises(CheckpointError):
        describe(str(broken), CONFIG)
