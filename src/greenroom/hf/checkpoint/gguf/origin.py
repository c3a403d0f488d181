"""Find the config and the tokenizer of a GGUF model.

The config is, in this order: the one that the user names, config.json beside the file, that of the
base model that the metadata name, or made from the metadata.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from greenroom.errors import GreenroomError, NotAModel
from greenroom.hf.checkpoint.checkpoint import read_config
from greenroom.hf.checkpoint.gguf.header import Header
from greenroom.hf.checkpoint.gguf.metadata import makes_config
from greenroom.hf.checkpoint.gguf.tokenizer import makes_tokenizer
from greenroom.hf.checkpoint.hub.download import cached_snapshot, download_small
from greenroom.hf.checkpoint.hub.repository import reachable, snapshot_of

CONFIG = "config.json"
METADATA = "config from the file's metadata"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them is enough
BASE = "general.base_model.0.repo_url"
REPOSITORY = re.compile(r"^https://huggingface\.co/([\w.-]+/[\w.-]+)/?$")


@dataclass(frozen=True, slots=True)
class Origin:
    """Source of the config and the tokenizer of a GGUF model.

    config:    path of the JSON file with the config; None if it is made from the metadata
    tokenizer: folder with the tokenizer's files; None if the metadata have the tokenizer
    text:      words for the config's origin, for messages
    is_guess:  True if neither the user nor a folder of the user's chose the config
    """

    config: Path | None
    tokenizer: Path | None
    text: str
    is_guess: bool = False


def find_origin(header: Header, named: str | None) -> Origin:
    """Find the config and the tokenizer of a GGUF model.

    `named` is the folder, file or hub id that the user names. The hub is asked only for a config
    that the user names, or that the metadata lack. Raises NotAModel if what the user names has no
    config.
    """
    file = header.path
    snapshot = snapshot_of(file)
    folder = snapshot or file.parent
    if named is not None:
        path = _named(named)
        return Origin(path, _tokenizer(path.parent, file.parent), f"config of {named}")
    if (folder / CONFIG).is_file():  # a repackager's may be a stub
        text, is_guess = "config.json beside the file", snapshot is not None
        return Origin(folder / CONFIG, _tokenizer(folder), text, is_guess)
    base = REPOSITORY.match(str(header.metadata.get(BASE, "")))
    if base is not None:
        is_complete = makes_config(header) and makes_tokenizer(header)
        if (base_folder := _base_folder(base[1], is_complete)) is not None:
            folders = (folder,) if is_complete else (folder, base_folder)
            text = f"config of {base[1]}, which the metadata name"
            return Origin(base_folder / CONFIG, _tokenizer(*folders), text, is_guess=True)
    return Origin(None, _tokenizer(folder), METADATA)


def _named(named: str) -> Path:
    """Return the path of the config that a folder, file or hub id stands for."""
    path = Path(named).expanduser()
    if path.is_dir():
        read_config(path)
        return path / CONFIG
    if path.is_file():
        return path
    if path.is_absolute() or named.count("/") != 1:
        raise NotAModel(
            f"--config {named}: there is no such file or folder, and it is no hub id such as"
            " owner/name"
        )
    folder = download_small(named)
    read_config(folder)
    return folder / CONFIG


def _base_folder(model: str, is_complete: bool) -> Path | None:
    """Return the folder with the config of a hub id that metadata name, if it can be had.

    The hub is not asked if the metadata are complete.
    """
    with suppress(GreenroomError):
        if (folder := cached_snapshot(model)) is not None:
            return folder
        if not is_complete and reachable():
            folder = download_small(model)
            return folder if (folder / CONFIG).is_file() else None
    return None


def _tokenizer(*folders: Path) -> Path | None:
    """Return the first of some folders that holds a tokenizer."""
    return next((f for f in folders if any((f / name).is_file() for name in TOKENIZERS)), None)
