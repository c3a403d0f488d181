"""Model names: hub ids with quantisations, early checks, suggestions; imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from greenroom.errors import NotAModel

DEMO = "demo"
HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
HOSTS = ("huggingface.co", "hf.co")
_REVISION = r"[\w][\w./-]{0,250}"
_NAME = re.compile(
    rf"(?P<repository>{HUB_ID.pattern})(@(?P<early>{_REVISION}))?"
    rf"(:(?P<quantisation>[\w][\w./+-]{{0,250}}))?(@(?P<revision>{_REVISION}))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class HubName:
    """Name of a model on the hub: `owner/name:Q4_K_M@revision`.

    quantisation: label or file of a GGUF repository's quantisation; None if the name has none
    revision:     branch, tag or commit; None for the default branch
    """

    repository: str
    quantisation: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        text = self.repository
        text += f":{self.quantisation}" if self.quantisation else ""
        return text + (f"@{self.revision}" if self.revision else "")


def parse_hub_name(text: str) -> HubName | None:
    """Parse the name of a model on the hub; None if the text cannot be one.

    `owner/name`, `owner/name:Q4_K_M`, `owner/name@revision`, the two in either order, each with
    `hf.co/` or `huggingface.co/` in front, or the address of a page of the model.
    """
    hosts = (*HOSTS, urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc or HOSTS[0])
    scheme, divider, bare = text.partition("://")
    host, _, path = (bare if divider else text).partition("/")
    if divider and scheme in ("http", "https") and host in hosts:
        return _parse_page(path)
    if not divider and host in hosts:
        text = path
    match = _NAME.fullmatch(text)
    if match is None or ".." in text or (match["early"] and match["revision"]):
        return None
    return HubName(match["repository"], match["quantisation"], match["early"] or match["revision"])


def _parse_page(path: str) -> HubName | None:
    """Parse the path of a hub page: OWNER/NAME[/tree|blob|resolve/REVISION[/FILE]]."""
    parts = urlsplit(path)
    owner, _, tail = parts.path.strip("/").partition("/")
    name, *below = tail.split("/")
    file = parse_qs(parts.query).get("show_file_info", [""])[0]
    revision = None
    if len(below) > 1 and below[0] in ("tree", "blob", "resolve"):
        revision = None if below[1] == "main" else unquote(below[1])
        file = "/".join(map(unquote, below[2:]))
    marks = f"@{revision}" * bool(revision) + f":{file}" * bool(file)
    match = _NAME.fullmatch(f"{owner}/{name}{marks}")
    if match is None or ".." in marks:
        return None
    return HubName(f"{owner}/{name}", file or None, revision)


def check_name(model: str | os.PathLike[str]) -> None:
    """Raise NotAModel for a name that is neither a path nor a possible hub id.

    `demo`, the model that ships with Greenroom, is a valid name.
    """
    text = os.fspath(model)
    path = Path(text).expanduser()
    if text == DEMO or path.exists() or path.with_name(f"{path.name}.unfinished").exists():
        return
    name = parse_hub_name(text)
    if name is not None and (name.quantisation or path.suffix != ".gguf"):
        return
    if "://" in text:
        raise NotAModel(
            f"{text}: this address is not the page of a model: give {HOSTS[0]}/owner/name"
        )
    if path.suffix == ".gguf":
        raise NotAModel(f"{text}: there is no such file{suggestion(text)}")
    if path.is_absolute() or text[:1] in "~." or text.count("/") > 1 or text.endswith(os.sep):
        raise NotAModel(f"{text}: there is no such folder{suggestion(text)}")
    raise NotAModel(
        f"{text}: this name is neither a folder nor a hub id such as owner/name or"
        " owner/name:Q4_K_M"
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
