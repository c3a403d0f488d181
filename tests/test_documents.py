"""The documents say what is so: command lines, options, links, files and counts."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from greenroom.cli import parser
from greenroom.errors import UsageError
from greenroom.hf.checkpoint.gguf_file import ggml_type
from greenroom.plan.systems.table import SYSTEMS
from greenroom.policies import POLICIES
from greenroom.predictors import PREDICTORS
from greenroom.runtime.encodings import ENCODINGS
from tests.ggml_blocks import GGML

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md",
    ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("**/*.md")),
    *sorted((ROOT / "examples").glob("*.md")),
]  # fmt: skip
MADE = {"bench-data", "build", "dist"}  # by commands, and not in a fresh clone
PAGES = [path for path in DOCUMENTS if path.parent.name != "log"]  # logs describe the past
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)  # of any language
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
SCRIPT = re.compile(r"(?:python3? )?(benchmarks/[\w/]+\.py|examples/[\w/]+\.py)(.*)")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def fenced(path: Path) -> Iterator[str]:
    """The lines of code blocks; one that ends with a backslash goes on."""
    for kind, block in FENCE.findall(path.read_text()):
        if kind in ("", "bash", "sh", "console"):
            yield from block.replace("\\\n", " ").splitlines()


def arguments_of(line: str) -> list[str]:
    """The arguments of a command line, without pipes, further commands and comments."""
    line_words = shlex.split(line, comments=True)
    ends = [n for n, word in enumerate(line_words) if word in ("|", "&&", ";", "&", ">")]
    return line_words[: min(ends, default=len(line_words))]


def commands(path: Path) -> list[str]:
    return [line for line in fenced(path) if line.startswith("greenroom ")]


def known_options(arguments: list[str]) -> set[str]:
    """Options of the command that these arguments name, and of its parent commands."""
    at: argparse.ArgumentParser = parser()
    options = set(at._option_string_actions)
    for word in arguments:
        below = [a for a in at._actions if isinstance(a, argparse._SubParsersAction)]
        if not below or word not in below[0].choices:
            break
        at = below[0].choices[word]
        options |= set(at._option_string_actions)
    return options


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_command_lines_are_accepted(path: Path) -> None:
    wrong = []
    for line in commands(path):
        if "..." in line:
            continue  # a part of one: its options are looked at below
        try:
            parser().parse_args(arguments_of(line)[1:])
        except (UsageError, SystemExit) as error:
            wrong.append(f"{line}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_options_of_commands_exist(path: Path) -> None:
    wrong = []
    spans = [span for span in SPAN.findall(path.read_text()) if span.startswith("greenroom ")]
    for line in [*spans, *(line for line in commands(path) if "..." in line)]:
        option_words = arguments_of(line)[1:]
        options = {word.partition("=")[0] for word in option_words if word.startswith("--")}
        if missing := options - known_options(option_words) - {"--low-..."}:
            wrong.append(f"{line}: {missing}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_scripts_and_their_options_exist(path: Path) -> None:
    text = path.read_text()
    wrong = []
    for line in [*fenced(path), *SPAN.findall(text)]:
        if (script_match := SCRIPT.search(line)) is None:
            continue
        script = ROOT / script_match[1]
        if not script.exists():
            wrong.append(script_match[1])
            continue
        shared = [p for p in (script.with_name("common.py"), script.with_name("rig.py"))
                  if p.exists()]  # fmt: skip
        source = "".join(each.read_text() for each in (script, *shared))
        for option in re.findall(r"(?<!\S)--[a-z][\w-]+", script_match[2].partition(" -- ")[0]):
            if f'"{option}"' not in source:
                wrong.append(f"{script_match[1]} {option}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_links_lead_somewhere(path: Path) -> None:
    targets = [target.partition("#")[0] for target in LINK.findall(path.read_text())]
    local = [target for target in targets if target and "://" not in target]
    assert not [target for target in local if not (path.parent / target).exists()]


def anchors(path: Path) -> set[str]:
    """The anchors that a Git host and the site give a page's headings."""
    headings = re.findall(r"^#+ +(.+)$", BLOCK.sub("", path.read_text()), re.MULTILINE)
    shown = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", each).lower() for each in headings]
    return {re.sub(r"[^\w\- ]", "", each).strip().replace(" ", "-") for each in shown}


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_anchors_of_links_exist(path: Path) -> None:
    wrong = []
    for target in LINK.findall(path.read_text()):
        name, _, anchor = target.partition("#")
        page = path.parent / name if name else path
        if anchor and "://" not in target and page.suffix == ".md" and page.exists():
            wrong += [target] * (anchor not in anchors(page))
    assert not wrong


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_files_exist(path: Path) -> None:
    """Of the repository's own folders, as a page names them in code; not of what commands make."""
    places = (ROOT, ROOT / "src" / "greenroom", path.parent, ROOT / "benchmarks")
    folders = {p.name for place in places[:2] for p in place.iterdir() if p.is_dir()} - MADE
    named = {
        span for span in SPAN.findall(path.read_text())
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?\.?\w*", span) and span.split("/")[0] in folders
    }  # fmt: skip
    files = {span for span in named if "/" in span.rstrip("/") and "NAME" not in span}
    assert not {span for span in files if not any((place / span).exists() for place in places)}


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_targets_of_make_exist(path: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = path.read_text()
    named = {word for line in [*fenced(path), *SPAN.findall(text)]
             for word in re.findall(r"^make ([a-z][\w-]*)", line)}  # fmt: skip
    assert named <= targets


def test_make_help_names_its_targets() -> None:
    text = (ROOT / "Makefile").read_text()
    helped = set(re.findall(r'@echo "make ([\w-]+)', text))
    ci = "processes interpreted check-gpu-offline bench-smoke portable browser ray"
    long = "fuzz schedules faults without-options"
    not_parallel = "demo check ci native check-gpu gpu-report format soak bench papers papers-train"
    release = "docs dist try-install sbom licenses release versions real-run"
    assert helped == {
        *not_parallel.split(), *ci.split(), *long.split(), *release.split(), "clean"
    }  # fmt: skip
    (named,) = re.findall(r'@echo "make ci +[^:]*: (.*)"', text)
    (targets,) = re.findall(r"^ci: (?!export)(.*)", text, re.MULTILINE)
    assert named.split(", ") == targets.split()


def counts(pattern: str) -> set[int]:
    """The numbers that the pages give where the pattern's group stands."""
    numbers = [int(n) for path in PAGES for n in re.findall(pattern, path.read_text())]
    assert numbers, f"no page has {pattern}"
    return set(numbers)


def test_counts_of_policies() -> None:
    assert counts(r"(\d+) (?:eviction )?policies\b") == {len(POLICIES)}
    online = [name for name in POLICIES if not POLICIES[name].needs_trace]
    assert counts(r"policies, (?:shared or per layer, )?(\d+) of them in a run") == {len(online)}


def test_counts_of_predictors() -> None:
    named = {name: kind for name, kind in PREDICTORS.items() if name != "none"}
    assert counts(r"(\d+) predictors\b") == {len(named)}
    in_a_run = [n for n, kind in named.items() if "trace" not in kind.needs]
    assert counts(r"predictors, (\d+) of them in a run") == {len(in_a_run)}
    table = (ROOT / "docs" / "prefetch.md").read_text()
    assert not [name for name in in_a_run if f"| `{name}` |" not in table]


def test_counts_of_systems() -> None:
    papers = set(SYSTEMS) - {"static", "greenroom"}
    assert counts(r"(\d+) systems of papers") == {len(papers)} == {12}
    for name in ("README.md", "docs/systems.md"):
        assert "Twelve systems" in (ROOT / name).read_text()
    rows = (ROOT / "docs" / "systems.md").read_text()
    assert not [name for name in SYSTEMS if f"| `{name}` |" not in rows]


def test_the_page_of_systems_has_each_row_s_parts() -> None:
    """Its first table: policy, slots, prefetching and further parts of each row."""
    page = (ROOT / "docs" / "systems.md").read_text()
    slots = {"per-layer": "equal for each layer", "shared": "shared"}
    found = {"dp": "by a dynamic programme", "configurator": "by Algorithm 1"}
    words = {
        "next-gate:1": "next layer's gate", "next-gate:1,width=all": "gate, which ranks all",
        "pregated": "one layer ahead", "off": "nothing",
    }  # fmt: skip
    for name, row in SYSTEMS.items():
        line = re.search(rf"^\| `{name}` \|(.*)\|$", page, re.MULTILINE)
        assert line, name
        policy, size, prefetches, further, _ = (part.strip() for part in line[1].split(" |"))
        assert policy == ("next-use" if row.policy == "auto" else row.policy)
        assert size == (found[row.sizes] if row.sizes else slots[row.scope]), name
        assert words.get(row.prefetch, f"`{row.prefetch}`") in prefetches, name
        assert ("--co-compute auto" in further) == row.co_compute, name
        assert ("--pin FILE" in further) == row.preselected, name
        assert ("--miss-precision" in further) == bool(row.precision), name
        assert ("--split" in further) == row.split, name
    assert SYSTEMS["promoe"].distance == 4
    assert "four layers ahead" in page


def test_no_page_counts_another_number_of_systems() -> None:
    pages = "".join(path.read_text() for path in PAGES).lower()
    assert "thirteen systems" not in pages


def test_tables_of_formats_have_the_ggml_types_that_are_tested() -> None:
    """A range such as `Q2_K to Q6_K` has the types between in the order of docs/formats.md."""
    page = (ROOT / "docs" / "formats.md").read_text()
    listed = cell(page, "| Q4_0, Q4_1, ").split(", ")
    assert sorted(listed) == sorted(map(ggml_type, GGML))
    others = {*ENCODINGS} - {*GGML, "gguf_nvfp4_scaled"}  # NVFP4 with one more tensor
    assert not [name for name in others if f"`{name}`" not in page]
    in_readme: list[str] = []
    for part in cell((ROOT / "README.md").read_text(), "BF16, F16, F32, ").split(", "):
        first, _, last = part.partition(" to ")
        stop = listed.index(last or first) + 1
        in_readme += listed[listed.index(first) : stop]
    assert sorted(in_readme) == sorted(listed)


def cell(page: str, start: str) -> str:
    """A list of types in the cell of a table that has `start`, from its first quantised type on."""
    (line,) = (line for line in page.splitlines() if line.startswith("|") and start in line)
    rest = line.partition(start)[2].partition(" |")[0].partition(", and ")[0]
    return start.removeprefix("| ").removeprefix("BF16, F16, F32, ") + rest


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert "Linux" in text.split("\n\n")[1]
