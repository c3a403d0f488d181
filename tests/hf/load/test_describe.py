"""A model described by its headers: of a folder, a GGUF file, and a hub that is asked for them."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import HfApi, constants

import greenroom
from greenroom.config import LoadConfig
from greenroom.errors import CheckpointError, NotAModel, NotMoE, UnsupportedModel
from greenroom.hf.checkpoint import hub, resolve
from greenroom.hf.load.describe import describe
from tests.models import cached_tiny

CONFIG = LoadConfig(device="cpu", context=64)


@pytest.fixture(scope="module")
def folder() -> Path:
    return cached_tiny("qwen3_moe", tokenizer=True)


class Hub(http.server.SimpleHTTPRequestHandler):
    """owner/name/resolve/main/FILE is a file of a folder; ranges are served, and counted."""

    folder: Path
    asked: list[tuple[str, str]]

    def do_HEAD(self) -> None:
        self._serve(body=False)

    def do_GET(self) -> None:
        self._serve(body=True)

    def _serve(self, body: bool) -> None:
        match = re.fullmatch(r"/(tiny/[\w-]+)/resolve/main/(.+)", self.path)
        path = self.folder / match[2] if match else None
        if match is None or path is None or match[1] != "tiny/moe" or not path.is_file():
            missing = "EntryNotFound" if match and match[1] == "tiny/moe" else "RepoNotFound"
            self.send_response(404)
            self.send_header("X-Error-Code", missing)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data, bounds = path.read_bytes(), self.headers.get("range", "")
        total = len(data)
        if found := re.fullmatch(r"bytes=(\d+)-(\d+)", bounds):
            data = data[int(found[1]) : int(found[2]) + 1]
        self.asked.append((match[2], bounds))
        self.send_response(206 if bounds else 200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Range", f"bytes 0-{len(data) - 1}/{total}")
        self.send_header("ETag", '"1"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def served(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[tuple[str, str]]]:
    """A hub on this machine, and what it was asked for."""
    asked: list[tuple[str, str]] = []
    handler = type("Tiny", (Hub,), {"folder": folder, "asked": asked})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "reachable", lambda: True)
    api = HfApi(endpoint=url)
    cache = tmp_path / "hub"
    monkeypatch.setattr(
        hub, "hf_hub_download",
        partial(huggingface_hub.hf_hub_download, endpoint=url, cache_dir=cache),
    )  # fmt: skip
    monkeypatch.setattr(hub, "get_safetensors_metadata", api.get_safetensors_metadata)
    monkeypatch.setattr(
        hub, "try_to_load_from_cache",
        partial(huggingface_hub.try_to_load_from_cache, cache_dir=cache),
    )  # fmt: skip
    try:
        yield asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


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


def test_a_hub_id_is_described_from_its_headers(folder: Path, served: list[tuple[str, str]]):
    found = describe("tiny/moe", CONFIG)
    here = describe(str(folder), CONFIG)
    alike = {"name": "", "overhead_bytes": 0}  # the process grows as tests run
    assert replace(found, **alike) == replace(here, **alike)
    weights = [(name, bounds) for name, bounds in served if name.endswith(".safetensors")]
    assert weights
    assert all(bounds for _, bounds in weights)  # ranges only: no file as a whole
    assert {name for name, bounds in served if not bounds} <= {
        "config.json", "model.safetensors.index.json"
    }  # fmt: skip


def test_a_model_that_the_hub_lacks_is_an_error(served: list[tuple[str, str]]):
    with pytest.raises(NotAModel, match="no such model on the hub"):
        describe("tiny/other", CONFIG)


def test_a_hub_model_without_usable_safetensors_is_an_error(
    served: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
):
    def nothing(model: str) -> None:
        raise huggingface_hub.errors.NotASafetensorsRepoError("none")

    monkeypatch.setattr(hub, "get_safetensors_metadata", nothing)
    with pytest.raises(UnsupportedModel, match="no safetensors files on the hub"):
        describe("tiny/moe", CONFIG)

    def gone(model: str) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr(hub, "get_safetensors_metadata", gone)
    with pytest.raises(NotAModel, match="could not be reached"):
        describe("tiny/moe", CONFIG)


def test_a_downloaded_model_is_read_from_the_local_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    whole = tmp_path / "snapshot"
    shutil.copytree(folder, whole)
    monkeypatch.setattr(resolve, "cached_snapshot", lambda model: whole)
    monkeypatch.setattr(resolve, "read_remote", None)
    assert describe("tiny/moe", CONFIG).experts == describe(str(folder), CONFIG).experts
    next(whole.glob("*.safetensors")).unlink()
    monkeypatch.setattr(resolve, "read_remote", lambda model: pytest.fail("asked the hub"))
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
