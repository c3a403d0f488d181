"""docs/papers.md, `make papers` and benchmarks/papers/ agree on scripts and figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.benchmarks.harness import FOLDER
from tests.benchmarks.table import ROWS

ROOT = FOLDER.parent
PAGE = (ROOT / "docs" / "papers.md").read_text()
SECTIONS = re.split(r"^(?=###? )", PAGE, flags=re.MULTILINE)[1:]  # without the summary
NAMED = re.compile(r"\b(?:benchmarks/)?((?:\w+/)*\w+\.py)\b")
SHOWN = re.compile(r"\]\(figures/([\w-]+\.svg)\)")
# A row of measurements has two cells or more that begin with a number.
MEASURED = re.compile(r"^\|(?=(?:[^\n|]*\|)*? \**-?\d[^\n|]*\|(?:[^\n|]*\|)*? \**-?\d)", re.M)
SCRIPTS = sorted(
    path.stem
    for path in (FOLDER / "papers").glob("*.py")
    if 'if __name__ == "__main__":' in path.read_text()
)


def recipe(target: str) -> str:
    """The commands of a target of the Makefile."""
    text = (ROOT / "Makefile").read_text()
    found = re.search(rf"^{target}: \$\(READY\).*\n((?:\t.*\n)+)", text, re.MULTILINE)
    assert found, target
    return found[1]


def run_by_make(target: str = "papers") -> set[str]:
    """Scripts that a target of make runs: those of its loops, and those with their own line."""
    text = recipe(target).replace("\\\n", " ")
    loops = re.findall(r"for script in ([\w\s]+);", text)
    return {*" ".join(loops).split(), *re.findall(r"benchmarks/papers/(\w+)\.py", text)}


def documented() -> list[str]:
    """The commands of this folder that the documents show, with all that follows `python`."""
    pages = (
        (ROOT / "docs" / name).read_text() for name in ("papers.md", "policies.md", "split.md")
    )
    return re.findall(r"^    python (benchmarks/papers/.*)", "\n".join(pages), re.MULTILINE)


def heading(section: str) -> str:
    return section.splitlines()[0].lstrip("# ")


def test_make_papers_runs_every_script() -> None:
    assert run_by_make() | run_by_make("papers-train") == set(SCRIPTS)
    assert run_by_make().isdisjoint(run_by_make("papers-train"))  # which trains


def test_make_papers_records_what_its_scripts_read() -> None:
    read = re.findall(r"(?:DEMO_DATA\)|papers/demo)/(\S+\.trace)", recipe("papers"))
    recorded = re.findall(r"-o \$\(DEMO_DATA\)/(\S+\.trace)", recipe("papers-demo"))
    assert read
    assert set(read) == set(recorded)


@pytest.mark.parametrize("command", documented())
def test_make_papers_runs_the_commands_of_the_documents(command: str) -> None:
    """With its options, or in a loop if it has none but the recordings."""
    made = re.sub(r"\s*\\\n\s*", " ", recipe("papers")).replace("$(TRACES)", "DIR")
    script, _, options = command.partition(".py")
    alone = not options.removeprefix(" --traces DIR")
    assert command in made or (alone and Path(script).name in run_by_make())


def test_every_script_of_the_papers_is_in_the_documents() -> None:
    pages = ("policies.md", "prefetch.md", "ray.md")
    text = PAGE + "".join((ROOT / "docs" / name).read_text() for name in pages)
    assert not [name for name in SCRIPTS if not re.search(rf"\b{name}\.py\b", text)]


def test_every_script_of_the_page_exists() -> None:
    places = (FOLDER / "papers", FOLDER)
    named = set(NAMED.findall(PAGE))
    assert named
    assert not {name for name in named if not any((place / name).exists() for place in places)}


@pytest.mark.parametrize("section", SECTIONS, ids=heading)
def test_a_section_with_measurements_names_its_command(section: str) -> None:
    if SHOWN.search(section) or MEASURED.search(section):
        assert NAMED.search(section), "no script"


@pytest.mark.parametrize(
    ("text", "measured"),
    [
        ("| OLMoE | 1 | 43.4 % |", True),
        ("| OLMoE | request | **4,626** | - | -0.2 |", True),
        ("| 4.1 | GOODPRED | exact |", False),
        ("| system | claims 9.93x | here |\n| 4.1 | x | y |\n| 4.2 | x | y |", False),
    ],
)
def test_rows_of_measurements_have_two_numbers(text: str, measured: bool) -> None:
    assert bool(MEASURED.search(text)) == measured


@pytest.mark.parametrize("section", [s for s in SECTIONS if SHOWN.search(s)], ids=heading)
def test_a_figure_is_drawn_by_the_script_of_its_section(section: str) -> None:
    """The script that the section names writes the figure, and the smoke test looks for it."""
    named = set(NAMED.findall(section))
    drawn = {
        Path(name).name
        for row in ROWS
        if row.script in {f"papers/{script.removeprefix('papers/')}" for script in named}
        for name in row.writes
    }
    shown = set(SHOWN.findall(section))
    assert shown <= drawn
    assert not {name for name in shown if not (ROOT / "docs" / "figures" / name).exists()}


def test_make_papers_copies_the_figures_that_the_page_shows() -> None:
    pattern = re.search(r"grep -o '(.*)' docs/papers\.md", recipe("papers"))
    assert pattern
    copied = {name.rpartition("/")[2] for name in re.findall(pattern[1], PAGE)}
    assert copied == set(SHOWN.findall(PAGE))
