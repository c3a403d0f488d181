"""Reader of prompt files: each line is a text, or a JSON object with a prompt or chat."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from greenroom.errors import UsageError
from greenroom.json_file import JsonObject, Malformed, parse

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and its label; the prompt is a text, or the messages of a chat."""

    content: str | Messages
    label: str


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts of a file: plain text or JSON lines. Empty lines are skipped.

    Plain text has a prompt on each line. If the file's name ends in .jsonl, or its first line is a
    JSON object, each line must be a JSON object with `prompt` (text) or `messages` (a list of
    `{"role", "content"}`), and perhaps a `label`. The default label is the file's name without its
    suffix. Raises UsageError, with the number of a wrong line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: the prompt file is not valid UTF-8 text") from error
    except OSError as error:
        raise UsageError(f"{path}: the prompt file cannot be read: {error.strerror}") from error
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not filled:
        raise UsageError(f"{path}: the prompt file has no prompts: write one on each line")
    if path.suffix == ".jsonl" or _is_object(filled[0][1]):
        return [_of_json(f"{path}, line {number}", line, path.stem) for number, line in filled]
    return [Prompt(line.strip(), path.stem) for _, line in filled]


def _is_object(line: str) -> bool:
    try:
        return isinstance(parse(line), dict)
    except Malformed:
        return False


def _of_json(where: str, line: str, label: str) -> Prompt:
    try:
        entry = JsonObject(parse(line))
        label = str(entry.value("label", label))
    except Malformed as error:
        raise UsageError(f"{where}: this line is not a JSON object: {error}") from error
    match entry.values:
        case {"prompt": str(text)} if text.strip():
            return Prompt(text, label)
        case {"messages": [_, *_] as messages} if all(_is_message(m) for m in messages):
            return Prompt([{"role": m["role"], "content": m["content"]} for m in messages], label)
    raise UsageError(
        f'{where}: this line needs a "prompt" that is text, or "messages", each with "role" and'
        ' "content"'
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(name), str) for name in ("role", "content")
    )
