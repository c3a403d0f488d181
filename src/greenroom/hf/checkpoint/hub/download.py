"""Models of the hub on the local disk: downloaded, or found in the hub's cache."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path

from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from greenroom.config import show_bytes
from greenroom.errors import GreenroomError, NotAModel, OutputError
from greenroom.hf.checkpoint.checkpoint import read_config, weight_files
from greenroom.hf.checkpoint.hub.errors import hub_errors, unreachable
from greenroom.hf.checkpoint.hub.quantisations import Selection, select
from greenroom.hf.checkpoint.hub.repository import (
    COMMIT,
    HubFile,
    Repository,
    ask_hub,
    cache_folder,
    hub_name,
    reachable,
)
from greenroom.hf.checkpoint.hub.transfer import (
    DownloadProgress,
    Transfer,
    blob_path,
    partial_path,
)
from greenroom.hf.checkpoint.names import HubName

CONFIG_FILES = ["*config.json", "tokenizer*", "*.model", "vocab.*", "merges.txt", "*.jinja"]

SHORTEST = 7  # characters of an abbreviated commit


@dataclass(frozen=True, slots=True)
class Download:
    """A model in the hub's cache.

    path:       the snapshot's folder, or the GGUF file (of several, the first)
    files:      how many files the model has
    nbytes:     their size
    downloaded: bytes that the cache lacked
    """

    path: Path
    files: int
    nbytes: int
    downloaded: int


def download(model: str) -> Path:
    """Download a model from the Hugging Face hub; return its local folder or GGUF file.

    Only the config, tokenizer and weights are downloaded, of a GGUF repository one quantisation,
    and only what the local cache lacks. If the hub does not answer, the cached files are used.
    Raises NotAModel if the hub has no such model, refuses access or cannot be reached, OutputError
    if the local disk is full or cannot be written, CheckpointError if what arrives is not what the
    hub has.
    """
    if not reachable():
        if (path := cached_model(model)) is None:
            raise unreachable(model)
        return path
    try:
        return pull(model).path
    except NotAModel as error:
        refused = isinstance(error.__cause__, HfHubHTTPError)
        if refused and (path := cached_model(model)) is not None:
            return path  # a hub that fails or refuses takes no model away
        raise


def pull(model: str) -> Download:
    """Download what the local cache lacks of a model on the hub; asks the hub in any case.

    Raises the errors of `download`.
    """
    with hub_errors(model):
        repository = ask_hub(hub_name(model))
        selection = select(model, repository.name, repository.sizes)
        if not selection.weights:
            raise NotAModel(f"{model}: this repository has neither safetensors nor GGUF files")
        files = [repository.files[path] for path in (*selection.texts, *selection.weights)]
        lacking = [file for file in files if not _is_here(repository, file)]
        need = sum(file.nbytes - downloaded_bytes(repository, file) for file in lacking)
        check_space(model, need)
        repository.snapshot.mkdir(parents=True, exist_ok=True)
        progress = DownloadProgress(sum(file.nbytes for file in files))
        progress.add(progress.total - sum(file.nbytes for file in lacking))
        _download_small(repository, [file for file in lacking if file.sha256 is None], progress)
        large = [file for file in lacking if file.sha256 is not None]
        if large:
            Transfer(model, repository, progress).run(large)
        for file in large:  # its blob is there: this links it, and downloads nothing
            hf_hub_download(repository.name.repository, file.path, revision=repository.commit)
        _write_ref(repository)
        path = repository.snapshot / selection.entry
        if not (selection.quantisation or selection.is_pack):
            read_config(path)
        return Download(path, len(files), progress.total, need)


def _download_small(
    repository: Repository, files: list[HubFile], progress: DownloadProgress
) -> None:
    """Download files that are not in LFS, by huggingface_hub, which also stores the listing."""
    if files:
        snapshot_download(
            repository.name.repository, revision=repository.commit,
            allow_patterns=[escape(file.path) for file in files],
        )  # fmt: skip
        for file in files:  # before the commit is written down
            with open(repository.snapshot / file.path, "rb") as stream:
                os.fsync(stream.fileno())
        progress.add(sum(file.nbytes for file in files))


def _is_here(repository: Repository, file: HubFile) -> bool:
    """Return whether a file is in the local cache; remove it if a power cut has damaged it."""
    path = repository.snapshot / file.path
    if file.is_whole(path):
        return True
    if file.sha1 is not None:
        blob = repository.folder / "blobs" / file.sha1  # the hub's library believes its name
        if not file.is_whole(blob):
            blob.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    return False


def _write_ref(repository: Repository) -> None:
    """Store which commit a branch or tag has, after all files of that commit have arrived.

    So a model that was complete stays the one that offline runs use until its update is complete.
    """
    revision = repository.name.revision or constants.DEFAULT_REVISION
    if revision == repository.commit:
        return
    path = repository.folder / "refs" / revision
    if path.is_file() and path.read_text() == repository.commit:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(repository.commit)
    os.replace(temporary, path)


def downloaded_bytes(repository: Repository, file: HubFile) -> int:
    """Count the bytes of a file in the local cache, also of an unfinished download."""
    if file.sha256 is None:
        return 0
    blob = blob_path(repository.folder, file)
    if blob.exists():
        return file.nbytes
    with suppress(OSError):
        return min(file.nbytes, partial_path(blob).stat().st_size)
    return 0


def download_small(model: str) -> Path:
    """Download a model's config and tokenizer from the hub; return the local snapshot folder.

    No weights are downloaded. If the hub does not answer, the cached files are used. Raises
    NotAModel or OutputError like `download`.
    """
    with hub_errors(model):
        return Path(snapshot_download(
            model, allow_patterns=CONFIG_FILES, ignore_patterns="*/*",
            local_files_only=not reachable(),
        ))  # fmt: skip


def check_space(model: str, need: int) -> None:
    """Raise OutputError if the disk of the hub's cache has less than `need` free bytes."""
    cache = Path(constants.HF_HUB_CACHE)
    folder = next(path for path in (cache, *cache.parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    if free < need:
        raise OutputError(
            f"{model}: the download needs {show_bytes(need)}, but {cache} has only"
            f" {show_bytes(free)} free: remove a model (`greenroom list`, `greenroom rm`), or set"
            " HF_HOME to a folder on a larger disk"
        )


def cached_model(model: str) -> Path | None:
    """Return the path of a model of the hub in the local cache, without network.

    None if the cache lacks it, or has only a part of it.
    """
    name = hub_name(model)
    for folder in cached_snapshots(name):
        with suppress(GreenroomError):  # this revision lacks it; another may have it
            selection = select(model, name, local_sizes(folder))
            if is_complete(folder, selection):
                return folder / selection.entry
    return None


def cached_snapshots(name: HubName) -> Iterator[Path]:
    """Yield the folders of a repository's revisions in the local cache.

    With a revision, which may be the first characters of a commit, the folder of that one. Without,
    first the default branch's, then the others, the newest first.
    """
    root = cache_folder(name.repository)
    snapshots, revision = root / "snapshots", name.revision or constants.DEFAULT_REVISION
    with suppress(OSError, UnicodeDecodeError):
        commit = (root / "refs" / revision).read_text().strip()
        if COMMIT.fullmatch(commit) and (snapshots / commit).is_dir():
            yield snapshots / commit
            if name.revision is not None:
                return
    if name.revision is not None:
        commits = snapshots.iterdir() if snapshots.is_dir() else []
        matches = [path for path in commits if path.name.startswith(name.revision)]
        if len(matches) == 1 and len(name.revision) >= SHORTEST:
            yield matches[0]
        return
    with suppress(OSError):
        yield from sorted(snapshots.iterdir(), key=lambda path: -path.stat().st_mtime)


def cached_snapshot(model: str) -> Path | None:
    """Return a hub id's snapshot in the local cache that has a config.json; None if none has."""
    folders = cached_snapshots(hub_name(model))
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def local_sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of a snapshot's files by their paths below its folder."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()  # no link to a blob that has gone
    }


def is_complete(folder: Path, selection: Selection) -> bool:
    """Check whether a snapshot has all files of a model, without reading weights."""
    if selection.quantisation is not None:
        return selection.quantisation.complete
    if selection.is_pack:
        return True  # opening it checks its files
    try:
        read_config(folder)
        weight_files(folder)
    except GreenroomError:
        return False
    return True
