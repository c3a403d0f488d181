"""The scripts and the style sheet of the map of experts.

The live page serves them one by one; an HTML report contains them.
"""

from __future__ import annotations

import re
from importlib.resources import files
from importlib.resources.abc import Traversable

FOLDER = files("greenroom.drawing") / "static"
MODULES = "format.js", "map.js", "playback.js"  # what a script imports comes before it
IMPORT, EXPORT = re.compile(r"^import .*\n", re.MULTILINE), re.compile(r"^export ", re.MULTILINE)


def style_sheet() -> str:
    """Return the style sheet: the colours, light and dark, and the parts of the map."""
    return (FOLDER / "drawing.css").read_text()


def joined_script(last: Traversable) -> str:
    """Join the scripts and one that uses them, `last`, into one that imports nothing."""
    texts = [each.read_text() for each in (*(FOLDER / name for name in MODULES), last)]
    return EXPORT.sub("", IMPORT.sub("", "\n".join(texts)))
