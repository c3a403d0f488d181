"""The files of the live page, and the HTTP headers that they are served with."""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple

from greenroom.drawing.files import FOLDER as DRAWING

ROOT, FOLDER = "/", "/page/"  # paths of the page and of its other files
DATA = "/v1/live"  # path of the data that the page draws
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Scripts, styles and requests of this server alone; no text becomes HTML or a script.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


class Asset(NamedTuple):
    """A file of the live page and its media type."""

    content: bytes
    media_type: str


def assets() -> dict[str, Asset]:
    """Read the files of the live page and of its map; return them by their URL's path."""
    table = {}
    folder = files("greenroom.server.page") / "static"
    for file in (*folder.iterdir(), *DRAWING.iterdir()):
        kind = file.name.rpartition(".")[2]
        if kind in TYPES:
            path = ROOT if file.name == "index.html" else FOLDER + file.name
            table[path] = Asset(file.read_bytes(), TYPES[kind])
    return table
