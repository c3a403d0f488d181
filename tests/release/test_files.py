"""What `make dist` checks, the workflow of a public host, and the pages of the site."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = runpy.run_path(str(ROOT / "release/check_files.py"))
LIBRARY = f"{FILES['LIBRARIES']}/greenroom-avx2.so"
PACKAGE = {"src/greenroom/__init__.py", "src/greenroom/py.typed"}
DEMO = {"models/demo/config.json"}
LICENSE = "greenroom-0.2.0.dist-info/licenses/LICENSE"
EXPECTED = FILES["expected_files"](PACKAGE, DEMO)
WHEEL = {*EXPECTED, LIBRARY, LICENSE}


def test_a_complete_wheel_has_no_problem() -> None:
    assert FILES["wheel_problems"](WHEEL, EXPECTED) == []


@pytest.mark.parametrize("name", sorted(WHEEL))
def test_each_file_of_a_wheel_is_asked_for(name: str) -> None:
    (problem,) = FILES["wheel_problems"](WHEEL - {name}, EXPECTED)
    assert "missing" in problem or "no compiled kernels" in problem


@pytest.mark.parametrize("name", ["tests/test_x.py", "greenroom/left_over.py", "hatch_build.py"])
def test_a_file_of_something_else_is_named(name: str) -> None:
    (problem,) = FILES["wheel_problems"]({*WHEEL, name}, EXPECTED)
    assert problem == f"not of the package: {name}"


def test_an_sdist_has_sources_and_no_libraries() -> None:
    sources = {*PACKAGE, *DEMO, "native/x.cpp"}
    assert FILES["sdist_problems"]({*sources, "PKG-INFO"}, sources) == []
    wrong = {*PACKAGE, *DEMO, "src/x.so"}
    assert FILES["sdist_problems"](wrong, sources) == [
        "missing: PKG-INFO", "missing: native/x.cpp", "a built file: src/x.so"
    ]  # fmt: skip


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone: git lists no files")
def test_the_repository_has_what_a_wheel_needs() -> None:
    package, demo = FILES["tracked"]("src/greenroom"), FILES["tracked"]("models/demo")
    assert {*FILES["NEEDED"]} <= FILES["expected_files"](package, demo)


def test_every_step_of_the_workflow_is_a_target_of_make() -> None:
    workflow: Any = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE)) | {"setup"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    assert len(commands) >= 9
    for command in commands:
        first, target, *variables = command.split(" ", 2)
        assert (first, target in targets) == ("make", True), command
        assert all(re.fullmatch(r'[A-Z]+=("[^"]*"|\S+)', each) for each in variables), command
    assert {command.split()[1] for command in commands} >= {
        "lint", "types", "imports", "test", "dist", "docs"
    }  # fmt: skip


def test_every_page_is_in_the_site_s_navigation() -> None:
    listed = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert pages <= listed


LICENSES = runpy.run_path(str(ROOT / "release/check_licenses.py"))


@pytest.mark.parametrize(
    ("licence", "allowed"),
    [
        ("MIT", True),
        ("Apache-2.0 AND Apache-2.0 WITH LLVM-exception AND BSD-3-Clause", True),
        ("Apache Software License; BSD License", True),
        ("MIT OR GPL-3.0-only", True),
        ("MIT AND GPL-3.0-only", False),
        ("MIT; GNU General Public License v3 (GPLv3)", False),
        ("UNKNOWN", False),
        ("", False),
    ],
)
def test_licences_of_all_parts_must_be_on_the_list(licence: str, allowed: bool) -> None:
    assert LICENSES["is_allowed"](licence) == allowed


PAGES = runpy.run_path(str(ROOT / "release/site_pages.py"))


@pytest.mark.parametrize(
    ("source", "page", "text", "expected"),
    [
        ("docs/run.md", "run.md", "[a](serve.md#b)", "[a](serve.md#b)"),
        ("docs/index.md", "index.md", "[R](../README.md#install)", "[R](start.md#install)"),
        ("README.md", "start.md", "![x](docs/figures/d.svg)", "![x](figures/d.svg)"),
        ("docs/log/2026-11.md", "log/2026-11.md", "[R](../../README.md)", "[R](../start.md)"),
        ("docs/study.md", "study.md", "[n](../examples/own_policy.ipynb)", "n"),
        ("docs/run.md", "run.md", "[x](https://a.example/b.md)", "[x](https://a.example/b.md)"),
        ("docs/run.md", "run.md", "[x](../none.md)", "[x](../none.md)"),
    ],
)
def test_links_of_a_git_host_become_those_of_the_site(
    source: str, page: str, text: str, expected: str
) -> None:
    link = PAGES["LINK"].fullmatch(text)
    assert PAGES["rewrite_link"](link, source, page) == expected


def test_lists_and_tables_are_separated_from_paragraphs() -> None:
    text = "A\n- b\n- c\n\n# D\n- e\nF\n| g |\n|---|\n| h |"
    separated = "A\n\n- b\n- c\n\n# D\n- e\nF\n\n| g |\n|---|\n| h |"
    assert PAGES["separate_blocks"](text) == separated


def test_every_command_has_a_page_with_its_options() -> None:
    pages = dict(PAGES["command_pages"]())
    assert "reference/cli/trace-record.md" in pages
    assert "| `--memory SIZE` | " in pages["reference/cli/run.md"]
    assert str(Path.home()) + "/" not in "".join(pages.values())
    assert all(page.startswith("# ") for page in pages.values())
