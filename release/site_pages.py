"""Hooks of mkdocs: pages from outside of docs/, the reference of commands, links, lists.

Pages are written for a Git host. Here a link to a file that is no page leads to the repository
(`Repository` in pyproject.toml), or stays as text if there is no address.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))
# Files outside of docs/, and their pages.
OUTSIDE = {
    "README.md": "start.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/olmoe.md": "olmoe.md",
}
# Pages of the Python reference: title, and the objects of each.
OBJECTS = {
    "reference/python.md": (
        "Python",
        ["greenroom.load", "greenroom.simulate", "greenroom.verify", "greenroom.quality",
         "greenroom.pack", "greenroom.hf.attach.attach.Greenroom"],
    ),
    "reference/study.md": ("Studies in Python", ["greenroom.study"]),
    "reference/errors.md": ("Errors", ["greenroom.errors"]),
}  # fmt: skip
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside of docs/, and those of the reference."""
    from mkdocs.structure.files import File

    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    commands = dict(command_pages())
    for page, text in (commands | dict(object_pages())).items():
        files.append(File.generated(config, page, content=text))
    for section in config.nav or []:
        if "Reference" in section:
            section["Reference"].insert(
                1, {"Commands": [page for page in commands if "/cli/" in page]}
            )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links of a page, and separate lists and tables from paragraphs before them."""
    path = page.file.src_uri
    source = {page: name for name, page in OUTSIDE.items()}.get(path, f"docs/{path}")
    parts = FENCE.split(markdown)
    for n in range(0, len(parts), 2):
        parts[n] = separate_blocks(LINK.sub(lambda m: rewrite_link(m, source, path), parts[n]))
    for n in range(1, len(parts), 2):  # "```python mine.py" is a Git host's
        parts[n] = re.sub(r"\A(```\w+)[^\n]*", r"\1", parts[n])
    return "".join(parts)


def rewrite_link(link: re.Match[str], source: str, page: str) -> str:
    """Rewrite a link from a file of the repository for the page that it becomes."""
    image, text, target = link.groups()
    name, mark, anchor = target.partition("#")
    if not name or "://" in name or name.startswith("mailto:"):
        return link[0]
    path = os.path.normpath(f"{os.path.dirname(source)}/{name}").lstrip("/")
    if path in OUTSIDE or path.startswith("docs/"):
        place = OUTSIDE.get(path, path.removeprefix("docs/"))
        return (
            f"{image}[{text}]({os.path.relpath(place, os.path.dirname(page) or '.')}{mark}{anchor})"
        )
    if not (ROOT / path).exists():
        return link[0]  # which mkdocs reports
    address = repository()
    return f"[{text}]({address}/blob/main/{path})" if address else text


def repository() -> str:
    """Return the repository's address, or an empty text if pyproject.toml has none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project.get("urls", {}).get("Repository", "")).removesuffix("/")


def separate_blocks(text: str) -> str:
    """Put an empty line between a paragraph and the list or table that follows it."""
    lines: list[str] = []
    for line in text.split("\n"):
        last = lines[-1] if lines else ""
        begins = re.match(r"([-*]|\d+\.) |\|", line)
        if begins and last.strip() and not re.match(r"\s*([-*]|\d+\.) |\s+|#|\|", last):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def object_pages() -> Iterator[tuple[str, str]]:
    """Return the pages of the Python reference, which mkdocstrings fills."""
    for page, (title, names) in OBJECTS.items():
        yield page, "\n\n".join([f"# {title}", *(f"::: {name}" for name in names)])


def command_pages() -> Iterator[tuple[str, str]]:
    """Return the index of the reference, and a page for each command, from the parser itself."""
    from greenroom.cli import parser

    rows = []
    for command in commands_of(parser()):
        name = command.prog.removeprefix("greenroom ")
        page = f"cli/{name.replace(' ', '-')}.md"
        rows.append(f"| [`{command.prog}`]({page}) | {cell(command.description or '')} |")
        yield f"reference/{page}", command_page(command)
    table = "\n".join(["| command | what it does |", "|---|---|", *rows])
    python = ", ".join(f"[{title}]({Path(page).name})" for page, (title, _) in OBJECTS.items())
    yield "reference/index.md", f"# Reference\n\n{table}\n\nFrom Python: {python}.\n"


def commands_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of all commands, without groups of commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                below = list(commands_of(command))
                yield from below or [command]


def command_page(command: argparse.ArgumentParser) -> str:
    """Write a command's page: its usage, and a table for each group of its options."""
    parts = [f"# {command.prog}", f"{(command.description or '').capitalize()}."]
    names = [part for a in command._get_positional_actions() for part in arguments(command, a)]
    usage = " ".join([command.prog, *names, "[options]"])
    parts.append(f"```\n{usage}\n```")
    for group in command._action_groups:
        rows = [option_row(command, action) for action in group._group_actions]
        if rows:
            title = (group.title or "").capitalize()
            parts.append("\n".join([f"## {title}", "", "| | meaning |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def arguments(command: argparse.ArgumentParser, action: argparse.Action) -> list[str]:
    """Return the arguments of a positional or an option, as the usage line shows them."""
    formatter = command._get_formatter()
    shown = formatter._format_args(action, formatter._get_default_metavar_for_positional(action))
    return [shown] if shown else []


def option_row(command: argparse.ArgumentParser, action: argparse.Action) -> str:
    names = action.option_strings or arguments(command, action)
    values = arguments(command, action) if action.option_strings and action.nargs != 0 else []
    shown = " ".join([", ".join(names), *values]).replace("|", "\\|")
    text = command._get_formatter()._expand_help(action) if action.help else ""
    return f"| `{shown}` | {cell(text)} |"


def cell(text: str) -> str:
    """Return a help text as the cell of a table, without this user's home folder."""
    text = re.sub(r"\s+", " ", text).replace(str(Path.home()), "~")
    text = re.sub(r"([\\|*_<>\[\]])", r"\\\1", text)
    return re.sub(r"(?<![\w`-])(--[a-z][\w-]*)", r"`\1`", text)


def on_config(config: MkDocsConfig, **_: Any) -> MkDocsConfig:
    """Link the repository in the header, if it has an address."""
    config.repo_url = repository() or None
    return config
