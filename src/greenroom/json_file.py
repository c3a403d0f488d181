"""JSON files that name their format: profiles, budgets, pins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from greenroom.errors import GreenroomError


def read_json(
    path: str | Path, form: str, what: str, made_by: str, error: type[GreenroomError]
) -> dict[str, Any]:
    """What a file of the format `form` holds.

    what:    says of another file that it is none, as "is no machine profile" after its path
    made_by: the command that makes such files
    error:   what is raised where it cannot be read, or is another file
    """
    try:
        found = json.loads(Path(path).read_text())
    except OSError as reason:
        raise error(f"cannot read {path}: {reason.strerror}") from reason
    except ValueError as reason:
        raise error(f"{path} {what}: it is not JSON") from reason
    if not isinstance(found, dict) or found.get("format") != form:
        raise error(f"{path} {what}: {made_by} makes such files")
    return found
