"""Early checks of model names, and suggestions for mistyped names; imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from greenroom.errors import NotAModel

DEMO = "demo"
HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)


def check_name(model: str | os.PathLike[str]) -> None:
    """Raise NotAModel if a name is no existing path and cannot be a hub id.

    `demo`, the model that ships with Greenroom, is a valid name.
    """
    text = os.fspath(model)
    path = Path(text).expanduser()
    if text == DEMO or path.exists() or path.with_name(f"{path.name}.unfinished").exists():
        return
    if path.suffix == ".gguf":
        raise NotAModel(f"{text}: there is no such file{suggestion(text)}")
    if path.is_absolute() or text[:1] in "~." or text.count("/") > 1 or text.endswith(os.sep):
        raise NotAModel(f"{text}: there is no such folder{suggestion(text)}")
    if not HUB_ID.fullmatch(text):
        raise NotAModel(
            f"{text}: this name is neither a folder nor a hub id such as owner/name"
            + (suggestion(text) or f"; did you mean {DEMO}, the model that ships with Greenroom?")
        )


def suggestion(text: str) -> str:
    """Return "; did you mean NAME?" for a mistyped model name, or "".

    NAME is the most similar name among `demo`, models in the working folder, and models in the
    Hugging Face cache.
    """
    names = {name.lower(): name for name in _models()}
    names.pop(text.lower(), None)
    parts = {key.rpartition("/")[2]: name for key, name in names.items()}
    match = get_close_matches(text.lower(), names, 1) or get_close_matches(text.lower(), parts, 1)
    return f"; did you mean {(names | parts)[match[0]]}?" if match else ""


def _models() -> Iterator[str]:
    """Yield the names of local models: demo, those in the working folder and the hub cache."""
    from huggingface_hub import constants

    yield DEMO
    with suppress(OSError):
        paths = sorted(Path().iterdir())
        yield from [p.name for p in paths if p.suffix == ".gguf" or (p / "config.json").is_file()]
    with suppress(OSError):
        for path in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*")):
            yield path.name.removeprefix("models--").replace("--", "/", 1)
