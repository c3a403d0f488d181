"""Downloads from a hub on this machine: complete, cut off, resumed, and refused."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.utils import WeakFileLock

from greenroom.errors import CheckpointError, GreenroomError, NotAModel, OutputError
from greenroom.hf.checkpoint.gguf_file import read_gguf
from greenroom.hf.checkpoint.hub.download import cached_model, pull
from greenroom.hf.checkpoint.hub.transfer import DownloadProgress
from greenroom.hf.checkpoint.resolve import open_checkpoint, resolve
from tests.hf.checkpoint.hub.conftest import DATA
from tests.hf.conftest import one_line
from tests.hub_server import HubServer
from tests.models import cached_tiny

WEIGHTS = bytes(range(256)) * 20  # of a file that is no model
TEXTS = {"generation_config.json": b"{}", "tokenizer.model": b"t"}


def add_gguf(server: HubServer) -> None:
    server.add("tiny/gguf", {
        **TEXTS, "m-Q8_0.gguf": (DATA / "Q8_0.gguf").read_bytes(),
        "Q4_0/m-Q4_0-00001-of-00002.gguf": WEIGHTS, "Q4_0/m-Q4_0-00002-of-00002.gguf": WEIGHTS[1:],
        "mmproj-F16.gguf": WEIGHTS,
    })  # fmt: skip


def blobs(cache: Path) -> set[str]:
    return {path.name for path in cache.glob("*/blobs/*")}


def partial_of(data: bytes, cache: Path) -> Path:
    (folder,) = cache.glob("*/blobs")
    return folder / f"{hashlib.sha256(data).hexdigest()}.incomplete"


def failure(model: str) -> str:
    with pytest.raises(GreenroomError) as error:
        resolve(model)
    return one_line(error)


def test_a_folder_is_downloaded_and_opened(server: HubServer, cache: Path) -> None:
    folder = cached_tiny("qwen3_moe", tokenizer=True, shards=3)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    commit = server.add(
        "tiny/moe", {**files, "model.bin": b"x", "original/model.safetensors": b"x"}
    )
    path = resolve("tiny/moe")
    assert path == cache / "models--tiny--moe" / "snapshots" / commit
    assert {each.name for each in path.iterdir()} == {*files, "README.md"}
    assert all((path / name).read_bytes() == data for name, data in files.items())
    assert set(open_checkpoint(path).tensors) == set(open_checkpoint(folder).tensors)
    server.asked.clear()
    assert resolve("tiny/moe@main") == path
    assert len(server.asked) == 2  # does the hub answer, and which commit is it
    assert hf_hub_download("tiny/moe", "config.json") == str(path / "config.json")


def test_one_quantisation_is_downloaded_and_opened(server: HubServer, cache: Path) -> None:
    add_gguf(server)
    path = resolve("hf.co/tiny/gguf:q8_0")
    assert path.name == "m-Q8_0.gguf"
    assert path.is_symlink()
    assert (
        open_checkpoint(path).tensors.keys() == open_checkpoint(DATA / "Q8_0.gguf").tensors.keys()
    )
    below = {each.relative_to(path.parent).as_posix() for each in path.parent.rglob("*")}
    assert below == {"m-Q8_0.gguf", "README.md", *TEXTS}


def test_all_parts_of_a_quantisation_are_downloaded(server: HubServer) -> None:
    add_gguf(server)
    pulled = pull("tiny/gguf:Q4_0")
    assert pulled.path.name == "m-Q4_0-00001-of-00002.gguf"
    assert pulled.path.with_name("m-Q4_0-00002-of-00002.gguf").read_bytes() == WEIGHTS[1:]
    assert (pulled.files, pulled.downloaded) == (5, pulled.nbytes)
    assert pull("tiny/gguf:Q4_0").downloaded == 0


def test_parts_of_a_split_model_open_in_the_cache(server: HubServer, tmp_path: Path) -> None:
    """Parts are links to blobs, whose names say nothing of parts."""
    gguf = pytest.importorskip("gguf")
    import numpy as np

    for number in (1, 2):
        writer = gguf.GGUFWriter(tmp_path / f"{number}.gguf", "qwen3moe")
        writer.add_uint16("split.no", number - 1)
        writer.add_uint16("split.count", 2)
        writer.add_tensor(f"t{number}", np.zeros((2, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    server.add("tiny/split", {
        f"BF16/x-0000{n}-of-00002.gguf": (tmp_path / f"{n}.gguf").read_bytes() for n in (1, 2)
    })  # fmt: skip
    files, _, tensors = read_gguf(resolve("tiny/split:bf16"))
    assert set(tensors) == {"t1", "t2"}
    assert len(files) == 2


def test_progress_counts_all_files_once(server: HubServer, monkeypatch: Any) -> None:
    add_gguf(server)
    shown: list[tuple[float, float]] = []
    monkeypatch.setattr(DownloadProgress, "show", lambda done, of: shown.append((done, of)))
    pulled = pull("tiny/gguf:Q4_0")
    assert shown[-1] == (pulled.nbytes, pulled.nbytes)
    assert shown == sorted(shown)


def test_a_connection_that_breaks_off_is_taken_up_again(server: HubServer) -> None:
    add_gguf(server)
    server.faults.break_off, server.faults.breaks = 700, 4
    path = resolve("tiny/gguf:Q4_0")
    assert path.read_bytes() == WEIGHTS


def test_a_download_goes_on_where_it_stopped(server: HubServer, cache: Path) -> None:
    add_gguf(server)
    server.faults.break_off = 0
    line = failure("tiny/gguf:Q4_0")
    assert "the download of Q4_0/m-Q4_0-00001-of-00002.gguf broke off" in line
    assert line.endswith("the same command goes on from there")
    partial = partial_of(WEIGHTS, cache)
    assert cached_model("tiny/gguf:Q4_0") is None  # nothing half-written is believed
    assert not (cache / "models--tiny--gguf" / "refs").exists()
    partial.write_bytes(WEIGHTS[:4321])
    server.faults.break_off = None
    server.asked.clear()
    assert resolve("tiny/gguf:Q4_0").read_bytes() == WEIGHTS
    assert "bytes=4321-5119" in server.weights_asked()
    assert server.weights_asked().count("bytes=0-999") == 1  # of the second file
    assert not partial.exists()


def test_the_beginning_of_a_part_is_not_downloaded_again(
    server: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_gguf(server)
    server.faults.break_off = 120
    monkeypatch.setattr("greenroom.hf.checkpoint.hub.transfer.ATTEMPTS", 1)
    assert "after 120 B of 5 KiB" in failure("tiny/gguf:Q4_0")
    server.faults.break_off = None
    partial = partial_of(WEIGHTS, cache)
    assert partial.read_bytes() == WEIGHTS[:120]
    assert resolve("tiny/gguf:Q4_0").read_bytes() == WEIGHTS


def test_a_partial_file_that_is_too_long_is_cut(server: HubServer, cache: Path) -> None:
    add_gguf(server)
    server.faults.break_off = 0
    failure("tiny/gguf:Q4_0")
    partial_of(WEIGHTS, cache).write_bytes(WEIGHTS + b"more")
    server.faults.break_off = None
    assert resolve("tiny/gguf:Q4_0").read_bytes() == WEIGHTS


def test_a_wrong_checksum_is_not_believed(server: HubServer, cache: Path) -> None:
    add_gguf(server)
    server.faults.checksum = "0" * 64
    with pytest.raises(CheckpointError, match="another checksum than the hub names"):
        resolve("tiny/gguf:Q8_0")
    assert not {name for name in blobs(cache) if len(name) > 40}
    server.faults.checksum = None
    assert resolve("tiny/gguf:Q8_0").is_file()


def test_a_damaged_part_of_an_earlier_download_is_found(server: HubServer, cache: Path) -> None:
    add_gguf(server)
    server.faults.break_off = 0
    failure("tiny/gguf:Q4_0")
    partial_of(WEIGHTS, cache).write_bytes(b"x" * 2048)
    server.faults.break_off = None
    line = failure("tiny/gguf:Q4_0")
    assert "arrived (2 KiB of it in an earlier download) with another checksum" in line
    assert resolve("tiny/gguf:Q4_0").read_bytes() == WEIGHTS


class Wrong(NamedTuple):
    faults: dict[str, Any]
    words: str
    kind: type[GreenroomError] = NotAModel


@pytest.mark.parametrize(
    "wrong",
    [
        Wrong({"length": 7}, "names its length as", CheckpointError),
        Wrong({"total": 7}, "names its length as", CheckpointError),
        Wrong({"ranges": False}, "does not send parts of files"),
        Wrong({"status": 401, "code": "GatedRepo"}, "is gated: accept its terms at"),
        Wrong({"status": 403, "code": "GatedRepo"}, "run `hf auth login`"),
        Wrong({"status": 403}, "refuses access (403)"),
        Wrong({"status": 401, "code": "RepoNotFound"}, "no such model on the hub"),
        Wrong({"status": 404, "code": "RevisionNotFound"}, "has no revision main"),
        Wrong({"status": 418}, "answers 418: try again later"),
        Wrong({"checksum": "../x"}, "gives no valid SHA-256"),
    ],
    ids=lambda wrong: "-".join(map(str, wrong.faults.values())),
)
def test_a_hub_that_refuses_or_lies(server: HubServer, cache: Path, wrong: Wrong) -> None:
    add_gguf(server)
    for name, value in wrong.faults.items():
        setattr(server.faults, name, value)
    with pytest.raises(wrong.kind) as error:
        resolve("tiny/gguf:Q4_0")
    assert one_line(error).startswith("tiny/gguf")
    assert wrong.words in one_line(error)
    assert not {name for name in blobs(cache) if len(name) == 64}


def test_a_hub_s_names_of_files_stay_in_its_folder(server: HubServer, cache: Path) -> None:
    outside = ["../evil.gguf", "a/../../evil-Q4_0.gguf", "/evil.gguf", "evil\n.gguf"]
    server.add("tiny/gguf", {"m-Q8_0.gguf": WEIGHTS, **dict.fromkeys(outside, WEIGHTS)})
    path = pull("tiny/gguf").path
    assert path.name == "m-Q8_0.gguf"
    assert not [each for each in cache.parent.rglob("*") if "evil" in each.name]


def test_names_that_the_hub_does_not_know(server: HubServer) -> None:
    add_gguf(server)
    pull("tiny/gguf:Q8_0")
    assert "did you mean tiny/gguf?" in failure("tiny/guf:Q8_0")
    assert "tiny/gguf has no revision v9" in failure("tiny/gguf@v9:Q8_0")
    assert "no quantisation Q9; it has Q4_0" in failure("tiny/gguf:Q9")
    server.add("tiny/empty", TEXTS)
    assert "neither safetensors nor GGUF files" in failure("tiny/empty")


def test_a_full_disk_is_found_before_the_download(
    server: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_gguf(server)
    usage = shutil.disk_usage(cache.parent)._replace(free=9000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OutputError, match=r"needs 10 KiB, but .* has only 8.79 KiB free") as error:
        resolve("tiny/gguf:Q4_0")
    assert "HF_HOME" in one_line(error)
    assert not cache.exists()
    assert not server.weights_asked()


def test_a_disk_that_fills_up_during_the_download(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_gguf(server)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left on device: free some space"):
        resolve("tiny/gguf:Q4_0")
    monkeypatch.undo()


def test_two_downloads_of_a_file_do_not_meet(
    server: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_gguf(server)
    monkeypatch.setattr("greenroom.hf.checkpoint.hub.transfer.LOCK_S", 0.05)
    lock = cache / ".locks" / "models--tiny--gguf" / f"{hashlib.sha256(WEIGHTS).hexdigest()}.lock"
    lock.parent.mkdir(parents=True)
    with WeakFileLock(lock):
        assert "another process is downloading" in failure("tiny/gguf:Q4_0")
    assert resolve("tiny/gguf:Q4_0").is_file()


def test_without_a_hub_the_cache_is_used(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_gguf(server)
    path = resolve("tiny/gguf:Q8_0")
    asked = len(server.asked)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve("tiny/gguf:Q8_0") == resolve("tiny/gguf") == path
    assert resolve(f"tiny/gguf@{path.parent.name}") == path
    for model in ("tiny/gguf:Q4_0", "tiny/gguf@v1", "tiny/other"):
        assert "HF_HUB_OFFLINE forbids" in failure(model)
    assert len(server.asked) == asked


def test_a_hub_that_refuses_takes_no_model_away(server: HubServer) -> None:
    add_gguf(server)
    path = resolve("tiny/gguf:Q8_0")
    server.faults.status, server.faults.code = 403, "GatedRepo"
    assert resolve("tiny/gguf:Q8_0") == path
    with pytest.raises(NotAModel, match="gated"):
        pull("tiny/gguf:Q8_0")


def test_an_update_that_is_cut_off_leaves_the_old_model(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_gguf(server)
    path = resolve("tiny/gguf:Q4_0")
    server.add("tiny/gguf", {**TEXTS, "m-Q4_0.gguf": WEIGHTS * 2})
    server.faults.break_off = 0
    assert "broke off" in failure("tiny/gguf:Q4_0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve("tiny/gguf:Q4_0") == path


def test_an_update_that_keeps_the_weights_downloads_none(server: HubServer) -> None:
    add_gguf(server)
    old = pull("tiny/gguf:Q4_0")
    files = server.repositories[f"tiny/gguf@{old.path.parents[1].name}"]
    server.add("tiny/gguf", {**files, "tokenizer.model": b"new"})
    server.asked.clear()
    new = pull("tiny/gguf:Q4_0")
    assert not server.weights_asked()
    assert new.path != old.path
    assert new.path.resolve() == old.path.resolve()


def test_a_hub_that_does_not_answer_is_asked_once(
    server: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Unreachable:
        def head(self, url: str, timeout: float) -> None:
            asked.append(url)
            raise ConnectionError("no route")

    monkeypatch.setattr("greenroom.hf.checkpoint.hub.repository.get_session", Unreachable)
    (cache / "models--owner--name").mkdir(parents=True)
    assert "could not be reached; did you mean owner/name?" in failure("owner/nam")
    assert len(asked) == 1
    assert not server.asked


@pytest.mark.parametrize("is_linked", [True, False])
def test_small_files_that_a_power_cut_has_emptied_are_downloaded_again(
    server: HubServer, cache: Path, is_linked: bool
) -> None:
    folder = cached_tiny("qwen3_moe", tokenizer=True)
    server.add("tiny/moe", {path.name: path.read_bytes() for path in folder.iterdir()})
    snapshot = pull("tiny/moe").path
    config = snapshot / "config.json"
    config.resolve().write_bytes(b"")
    if not is_linked:
        config.unlink()
    assert pull("tiny/moe").path == snapshot
    assert config.read_bytes() == (folder / "config.json").read_bytes()
