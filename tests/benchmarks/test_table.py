"""The smoke table has every script, and the checks of the output refuse wrong output."""

from __future__ import annotations

import pytest

from tests.benchmarks.harness import FOLDER, check_finite, check_json, check_table
from tests.benchmarks.table import ROWS


def scripts() -> set[str]:
    """The files that have a command line; `gpu_report` is one command with tests of its own."""
    return {
        path.relative_to(FOLDER).as_posix()
        for path in FOLDER.rglob("*.py")
        if 'if __name__ == "__main__":' in path.read_text() and path.parent.name != "gpu_report"
    }


def test_every_script_has_a_row() -> None:
    assert {row.script for row in ROWS} == scripts()


def test_every_script_is_in_the_readme() -> None:
    text = (FOLDER / "README.md").read_text()
    assert not [name for name in scripts() if name.rpartition("/")[2] not in text]


@pytest.mark.parametrize("text", ["| a | b |\n|---|---|\n| x | 1 |", "a  b\n-  -\nx  1\n\nmore"])
def test_a_table_with_its_columns_and_figures_is_accepted(text: str) -> None:
    check_table(text, ("a", "b"))


@pytest.mark.parametrize("text", ["| a | c |\n| x | 1 |", "| a | b |\n|---|---|\n", "a  b\nx  -"])
def test_a_table_without_its_columns_or_figures_is_refused(text: str) -> None:
    with pytest.raises(AssertionError):
        check_table(text, ("a", "b"))


@pytest.mark.parametrize("text", ["| nan |", "1.0 (nan to nan)", "x inf", "-inf", '{"a": NaN}'])
def test_text_with_an_infinite_or_undefined_figure_is_refused(text: str) -> None:
    with pytest.raises(AssertionError):
        check_finite(text)


@pytest.mark.parametrize("text", ["information about a nanosecond", "| 1e3 | a-inf-b |"])
def test_letters_of_nan_and_inf_within_a_word_are_accepted(text: str) -> None:
    check_finite(text)


def test_a_json_object_without_its_keys_is_refused() -> None:
    check_json('text\n{"a": 1, "b": 2}', ("a",))
    with pytest.raises(AssertionError):
        check_json('{"a": 1}', ("b",))
