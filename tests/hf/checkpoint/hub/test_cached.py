"""What the cache of the hub holds, and what removing a model deletes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from greenroom.errors import GreenroomError, NotAModel, OutputError
from greenroom.hf.checkpoint.hub.cached import cached_models, find_removal, remove, users_of
from greenroom.hf.checkpoint.hub.download import pull
from tests.hub_server import HubServer

SMALL, LARGE = b"a" * 3000, b"b" * 7000
FILES = {
    "x-Q4_0.gguf": SMALL, "Q8_0/x-Q8_0-00001-of-00002.gguf": LARGE,
    "Q8_0/x-Q8_0-00002-of-00002.gguf": LARGE[1:],
}  # fmt: skip


@pytest.fixture
def root(server: HubServer, cache: Path) -> Iterator[Path]:
    server.add("tiny/gguf", FILES)
    return cache / "models--tiny--gguf"


def rows() -> list[tuple[str, int, int | None, bool]]:
    return [(row.name, row.nbytes, row.total, row.path is not None) for row in cached_models()]


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_an_empty_cache_has_no_models(cache: Path, server: HubServer) -> None:
    assert rows() == []
    with pytest.raises(NotAModel, match="has nothing of this model"):
        find_removal("tiny/gguf")


def test_each_quantisation_is_a_model(root: Path) -> None:
    pull("tiny/gguf:Q4_0")
    pull("tiny/gguf:Q8_0")
    assert rows() == [
        ("tiny/gguf:Q4_0", 3000, 3000, True), ("tiny/gguf:Q8_0", 13_999, 13_999, True)
    ]  # fmt: skip


def test_a_download_that_was_cut_off_is_incomplete(root: Path, server: HubServer) -> None:
    server.faults.break_off = 0
    with pytest.raises(GreenroomError, match="broke off"):
        pull("tiny/gguf:Q8_0")
    partial = root / "blobs" / f"{hashlib.sha256(LARGE).hexdigest()}.incomplete"
    partial.write_bytes(LARGE[:1234])
    assert rows() == [("tiny/gguf:Q8_0", 1234, 13_999, False)]
    server.faults.break_off = None
    partial.rename(partial.with_name("f" * 64 + ".incomplete"))  # of a commit without a listing
    assert rows() == [("tiny/gguf", 1234, None, False)]
    remove("tiny/gguf", find_removal("tiny/gguf"))
    assert not root.exists()


def test_safetensors_are_complete_with_all_files_of_their_index(
    server: HubServer, cache: Path
) -> None:
    index = b'{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}'
    server.add("tiny/moe", {
        "config.json": b'{"model_type": "mixtral"}', "model.safetensors.index.json": index,
        "m-1.safetensors": SMALL, "m-2.safetensors": LARGE, "x-Q4_0.gguf": SMALL[1:],
    })  # fmt: skip
    path = pull("tiny/moe").path
    assert rows() == [("tiny/moe", 10_000, 10_000, True)]
    (path / "m-2.safetensors").unlink()
    assert rows() == [("tiny/moe", 3000, 10_000, False)]
    next((cache / "models--tiny--moe" / "trees").iterdir()).unlink()
    assert rows() == [("tiny/moe", 3000, None, False)]


def test_an_older_revision_has_its_commit_in_its_name(root: Path, server: HubServer) -> None:
    pull("tiny/gguf:Q4_0")
    server.add("tiny/gguf", {**FILES, "README.md": b"new"})
    old = pull("tiny/gguf:Q4_0").path.parent.name
    assert [row[0] for row in rows()] == ["tiny/gguf:Q4_0"]  # the same weights
    server.add("tiny/gguf", {**FILES, "x-Q4_0.gguf": LARGE[2:]})
    pull("tiny/gguf:Q4_0")
    names = [row[0] for row in rows()]
    assert names == ["tiny/gguf:Q4_0", f"tiny/gguf:Q4_0@{old[:12]}"]
    assert find_removal(names[1]).nbytes == 0  # the first commit has the same content


def test_removing_a_quantisation_leaves_the_others(root: Path, cache: Path) -> None:
    pull("tiny/gguf:Q4_0")
    before = files_below(cache)
    pull("tiny/gguf:Q8_0")
    chosen = find_removal("tiny/gguf:q8_0")
    assert chosen.nbytes == 13_999
    remove("tiny/gguf:q8_0", chosen)
    locks = {path for path in files_below(cache) if path.startswith(".locks")}
    assert files_below(cache) - locks == before - locks
    assert not list(root.glob("snapshots/*/Q8_0"))
    assert rows() == [("tiny/gguf:Q4_0", 3000, 3000, True)]
    assert pull("tiny/gguf:Q8_0").downloaded == 13_999


def test_removing_the_last_quantisation_removes_the_repository(root: Path) -> None:
    pull("tiny/gguf:Q4_0")
    chosen = find_removal("tiny/gguf:Q4_0")
    assert chosen.paths == (root,)
    remove("tiny/gguf:Q4_0", chosen)
    assert not root.exists()


def test_content_that_another_revision_uses_stays(root: Path, server: HubServer) -> None:
    commits = [pull("tiny/gguf:Q4_0").path.parent.name]
    server.add("tiny/gguf", {**FILES, "README.md": b"new"})
    commits.append(pull("tiny/gguf:Q4_0").path.parent.name)
    chosen = find_removal(f"tiny/gguf@{commits[0]}")
    assert chosen.nbytes == len(b"tiny/gguf")  # of the old README.md
    remove("tiny/gguf", chosen)
    assert [path.name for path in (root / "snapshots").iterdir()] == [commits[1]]
    assert rows() == [("tiny/gguf:Q4_0", 3000, 3000, True)]


def test_nothing_outside_of_the_repository_is_removed(root: Path, cache: Path) -> None:
    pull("tiny/gguf:Q4_0")
    snapshot = pull("tiny/gguf:Q8_0").path.parents[1]
    outside = cache.parent / "precious.gguf"
    outside.write_bytes(SMALL)
    link = snapshot / "x-Q4_0.gguf"
    link.unlink()
    link.symlink_to(outside)
    chosen = find_removal("tiny/gguf:Q4_0")
    assert (chosen.paths, chosen.nbytes) == ((link,), 0)
    remove("tiny/gguf:Q4_0", chosen)
    remove("tiny/gguf", find_removal("tiny/gguf"))
    assert outside.read_bytes() == SMALL
    root.symlink_to(cache.parent)
    with pytest.raises(NotAModel, match="has nothing of this model"):
        find_removal("tiny/gguf")


def test_a_folder_that_cannot_be_deleted_is_an_error(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull("tiny/gguf:Q4_0")
    chosen = find_removal("tiny/gguf:Q4_0")

    def denied(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("shutil.rmtree", denied)
    with pytest.raises(OutputError, match=r"cannot delete .*models--tiny--gguf: Permission denied"):
        remove("tiny/gguf:Q4_0", chosen)


def test_a_file_in_use_names_the_process(tmp_path: Path) -> None:
    """Both an open file and one that is only mapped, by another process."""
    path = tmp_path / "blob"
    path.write_bytes(bytes(4096))
    assert users_of({str(path)}) == []
    for close in ("", "f.close()"):
        code = f"import mmap,sys\nf=open({str(path)!r},'rb')\nm=mmap.mmap(f.fileno(),0,prot=1)\n"
        process = subprocess.Popen(
            [sys.executable, "-c", f"{code}{close}\nprint(flush=True)\nsys.stdin.read()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        try:
            assert [user.endswith(f"({process.pid})") for user in users_of({str(path)})] == [True]
        finally:
            process.communicate()
    assert users_of({os.devnull + "x"}) == []
