"""A model repository on the hub: its commit, and its files with sizes and checksums."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import get_session

from greenroom.errors import NotAModel
from greenroom.hf.checkpoint.names import HubName, parse_hub_name

ANSWER_S = 4.0  # seconds to wait for the hub's answer
COMMIT, SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository; `sha256` is None for small files, which are not in LFS.

    Small files have `sha1`, that of Git's object.
    """

    path: str
    nbytes: int
    sha256: str | None
    sha1: str | None = None

    def is_whole(self, path: Path) -> bool:
        """Return whether a local file exists and, if it is small, has the right content."""
        if not path.exists() or self.sha1 is None:
            return path.exists()
        data = path.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() == self.sha1


@dataclass(frozen=True, slots=True)
class Repository:
    """A model repository of the hub at one commit."""

    name: HubName
    commit: str
    files: Mapping[str, HubFile]

    @property
    def folder(self) -> Path:
        """Return the repository's folder in the local cache."""
        return cache_folder(self.name.repository)

    @property
    def snapshot(self) -> Path:
        """Return the folder of this commit's files in the local cache."""
        return self.folder / "snapshots" / self.commit

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes of the files by their paths."""
        return {path: file.nbytes for path, file in self.files.items()}


def hub_name(model: str) -> HubName:
    """Parse the name of a model on the hub; raises NotAModel if it cannot be one."""
    if (name := parse_hub_name(model)) is None:
        raise NotAModel(
            f"{model}: this name is neither a folder nor a hub id such as owner/name or"
            " owner/name:Q4_K_M"
        )
    return name


def cache_folder(repository: str) -> Path:
    """Return the folder of a repository in the local cache of the hub."""
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")


def snapshot_of(file: Path) -> Path | None:
    """Return the snapshot's folder of a file in the hub's cache; None for others.

    Config and tokenizer of a repository lie there, also if a quantisation has a folder of its own.
    """
    for folder in file.parents:
        if folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name):
            return folder
    return None


def ask_hub(name: HubName) -> Repository:
    """Ask the hub for the files of a repository, in one request.

    Raises the errors of huggingface_hub, and NotAModel if the answer is not valid.
    """
    info: Any = HfApi().model_info(name.repository, revision=name.revision, files_metadata=True)
    if not COMMIT.fullmatch(commit := str(info.sha)):
        raise NotAModel(f"{name}: {constants.ENDPOINT} names no commit for this model")
    files = {}
    for file in info.siblings or []:
        path, lfs = str(file.rfilename), file.lfs
        if path.startswith("/") or ".." in path.split("/") or not path.isprintable():
            continue  # the hub refuses such names; a mirror may not
        size = lfs.size if lfs else file.size
        if lfs and not SHA256.fullmatch(str(lfs.sha256)):
            raise NotAModel(f"{name}: {constants.ENDPOINT} gives no valid SHA-256 of {path}")
        sha256, sha1 = (str(lfs.sha256), None) if lfs else (None, file.blob_id)
        files[path] = HubFile(path, int(size or 0), sha256, sha1)
    return Repository(name, commit, files)


def reachable() -> bool:
    """True if the Hugging Face hub answers one request within 4 seconds.

    False at once if HF_HUB_OFFLINE is set. The hub's own library would retry six times, with
    pauses.
    """
    if constants.HF_HUB_OFFLINE:
        return False
    answers: list[Any] = []

    def ask() -> None:
        with suppress(Exception):  # whatever the transport raises
            answers.append(get_session().head(constants.ENDPOINT, timeout=ANSWER_S))

    asking = threading.Thread(target=ask, name="hub", daemon=True)  # names may resolve for minutes
    asking.start()
    asking.join(ANSWER_S)
    return bool(answers)
