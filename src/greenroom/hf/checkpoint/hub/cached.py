"""Models in the local cache of the hub: complete and incomplete ones, and their removal."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import constants

from greenroom.errors import NotAModel, OutputError
from greenroom.hf.checkpoint.hub.download import cached_snapshots, is_complete, local_sizes
from greenroom.hf.checkpoint.hub.quantisations import (
    OTHER_FORMATS,
    WEIGHTS,
    Selection,
    choose,
    quantisations,
)
from greenroom.hf.checkpoint.hub.repository import SHA256, cache_folder, hub_name
from greenroom.hf.checkpoint.names import HUB_ID, HubName
from greenroom.json_file import LONGEST, Malformed, parse

PREFIX = "models--"  # of the folders of models in the cache


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the hub's cache: a GGUF quantisation, a safetensors folder or a pack.

    name:   the name by which commands find it
    format: the quantisation's label, safetensors, pack, or unknown
    path:   the path by which it opens; None if it is incomplete
    nbytes: bytes of its weights on the disk
    total:  bytes of its complete weights; None if unknown
    files:  the files of its weights on the disk: links to blobs, and partial downloads
    """

    name: str
    format: str
    path: Path | None
    nbytes: int
    total: int | None
    files: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Removal:
    """Files of the hub's cache that belong to a model alone.

    paths:  links, blobs and partial downloads, or the folder of the whole repository
    nbytes: bytes that their removal frees
    blobs:  the real paths of the content, which another process may use
    """

    root: Path
    paths: tuple[Path, ...]
    nbytes: int
    blobs: frozenset[str]


def cached_models() -> list[CachedModel]:
    """List the models in the local cache of the hub, by name."""
    rows: list[CachedModel] = []
    for root in sorted(Path(constants.HF_HUB_CACHE).glob(f"{PREFIX}*")):
        repository = root.name.removeprefix(PREFIX).replace("--", "/")
        if HUB_ID.fullmatch(repository) and root.is_dir():
            rows += _models_of(root, repository)
    return rows


def _models_of(root: Path, repository: str) -> list[CachedModel]:
    """List the models of a repository; of equal ones in two revisions, the first."""
    rows: dict[object, CachedModel] = {}
    attributed: set[Path] = set()
    for number, folder in enumerate(dict.fromkeys(cached_snapshots(HubName(repository)))):
        name = HubName(repository, None, folder.name[:12] if number else None)
        for model in _models_in(root, folder, name):
            content = frozenset(map(os.path.realpath, model.files))
            rows.setdefault((model.format, content), model)
            attributed.update(model.files)
    unlisted = tuple(
        path for path in (root / "blobs").glob("*.incomplete") if path not in attributed
    )
    if unlisted:  # of a repository whose listing is not stored
        nbytes = _size_of(unlisted)
        rows[None] = CachedModel(repository, "unknown", None, nbytes, None, unlisted)
    return sorted(rows.values(), key=lambda model: model.name)


def _models_in(root: Path, folder: Path, name: HubName) -> Iterator[CachedModel]:
    """Yield the models of which a snapshot has weights, or a part of them."""
    listing, sizes = _stored_listing(root, folder.name), local_sizes(folder)
    all_sizes = {path: size for path, (size, _) in listing.items()} | sizes
    partial = {
        path: tuple((root / "blobs").glob(f"{digest}*.incomplete"))
        for path, (_, digest) in listing.items()
        if digest and path not in sizes
    }

    def model(selection: Selection, kind: str, full_name: HubName) -> CachedModel | None:
        files = [folder / path for path in selection.weights if path in sizes]
        files += [each for path in selection.weights for each in partial.get(path, ())]
        if not files:
            return None
        complete = all(p in sizes for p in selection.weights) and is_complete(folder, selection)
        total = sum(all_sizes[path] for path in selection.weights)
        return CachedModel(
            str(full_name), kind, folder / selection.entry if complete else None,
            _size_of(files), total if complete or listing else None, tuple(files),
        )  # fmt: skip

    top = [path for path in all_sizes if "/" not in path and not fnmatch(path, OTHER_FORMATS)]
    weights = tuple(path for path in top if any(fnmatch(path, each) for each in WEIGHTS))
    if any(not path.endswith(".gguf") for path in weights):
        selection = Selection((), weights)
        if row := model(selection, "pack" if selection.is_pack else "safetensors", name):
            yield row
    for choice in quantisations({p: n for p, n in all_sizes.items() if p != "dense.gguf"}):
        full_name = HubName(name.repository, choice.label, name.revision)
        if row := model(Selection((), choice.files, choice), f"GGUF {choice.label}", full_name):
            yield row


def _stored_listing(root: Path, commit: str) -> dict[str, tuple[int, str]]:
    """Read the files of a commit as huggingface_hub stores them: path -> (size, SHA-256 or "")."""
    rows: dict[str, tuple[int, str]] = {}
    with suppress(OSError, Malformed, AttributeError, TypeError, KeyError):
        for path, row in parse((root / "trees" / f"{commit}.json").read_bytes(), LONGEST)[
            "files"
        ].items():
            digest = row.get("lfs_sha256") or ""
            if type(row["size"]) is int and (not digest or SHA256.fullmatch(digest)):
                rows[path] = row["size"], digest
    return rows


def find_removal(model: str) -> Removal:
    """Find the files that removing a model of the hub deletes from the cache.

    Without quantisation and revision, all of the repository is removed. Content that other models
    or revisions use stays. Raises NotAModel if the cache has nothing of the model.
    """
    name = hub_name(model)
    root = cache_folder(name.repository)
    links = {
        path for path in (root / "snapshots").rglob("*") if path.is_symlink() or path.is_file()
    }
    partials = set((root / "blobs").glob("*.incomplete"))
    if not root.is_dir() or root.is_symlink() or not links | partials:
        raise NotAModel(f"{model}: the hub's cache ({root.parent}) has nothing of this model")
    chosen = links | partials if name.quantisation is None else _files_of(root, model, name)
    if name.quantisation is None and name.revision is not None:
        folders = list(cached_snapshots(name))
        chosen = {path for path in links if any(f in path.parents for f in folders)}
    if not chosen:
        raise NotAModel(f"{model}: the hub's cache ({root.parent}) has nothing of this model")
    others = [row for row in _models_of(root, name.repository) if not chosen >= {*row.files}]
    if not others:
        blobs = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
        return Removal(root, (root,), _size_of(blobs), frozenset(map(str, blobs)))
    used = {_blob_of(root, path) for path in links - chosen}
    paths = {*chosen, *(_blob_of(root, path) for path in chosen)} - used - {None}
    content = [p for p in paths if p is not None and p.is_file() and not p.is_symlink()]
    return Removal(
        root, tuple(p for p in paths if p is not None), _size_of(content),
        frozenset(map(str, content)),
    )  # fmt: skip


def _files_of(root: Path, model: str, name: HubName) -> set[Path]:
    """Return the files of a quantisation, in the named revision or in all of them."""
    files: set[Path] = set()
    for folder in set(cached_snapshots(name)):
        listing = _stored_listing(root, folder.name)
        sizes = {path: size for path, (size, _) in listing.items()} | local_sizes(folder)
        choice = choose(quantisations(sizes), name.quantisation)
        for path in choice.files if choice else ():
            files |= {folder / path} if (folder / path).is_symlink() else set()
            files |= {folder / path} if (folder / path).is_file() else set()
            if digest := listing.get(path, (0, ""))[1]:
                files |= set((root / "blobs").glob(f"{digest}*.incomplete"))
    return files


def remove(model: str, chosen: Removal) -> None:
    """Delete the files of a removal; raises OutputError if one of them cannot be deleted."""
    try:
        for path in chosen.paths:
            if path == chosen.root:
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if chosen.root.is_dir():
            for folder in sorted((chosen.root / "snapshots").rglob("*"), reverse=True):
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()
    except OSError as error:
        where = error.filename or chosen.root
        raise OutputError(f"{model}: cannot delete {where}: {error.strerror}") from error


def users_of(paths: Collection[str]) -> list[str]:
    """List other processes that have one of some files open or mapped: `name (process id)`.

    Processes of other users are seen by root alone.
    """
    users = []
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) != os.getpid() and any(path in paths for path in _open_files(process)):
            with suppress(OSError):
                users.append(f"{(process / 'comm').read_text().strip()} ({process.name})")
    return users


def _open_files(process: Path) -> Iterator[str]:
    with suppress(OSError):
        for link in (process / "fd").iterdir():
            with suppress(OSError):
                yield os.readlink(link)
    with suppress(OSError):
        for line in (process / "maps").read_text(errors="replace").splitlines():
            yield line.partition("/")[1] + line.partition("/")[2]


def _blob_of(root: Path, link: Path) -> Path | None:
    """Return the blob of its own repository to which a link of a snapshot leads."""
    with suppress(OSError):
        path = Path(os.path.normpath(link.parent / os.readlink(link)))
        if path.parent == root / "blobs":
            return path
    return None


def _size_of(paths: Iterable[Path]) -> int:
    total = 0
    for path in paths:
        with suppress(OSError):
            total += path.stat().st_size
    return total
