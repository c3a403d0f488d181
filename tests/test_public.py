"""The package as Python sees it: names, types, options."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from importlib import metadata
from pathlib import Path

import pytest

import greenroom
from greenroom.config import LoadConfig
from greenroom.errors import GreenroomError, UnknownOption

USER = """
import greenroom
reveal_type(greenroom.load)
greenroom.load("demo", cach="25%")
greenroom.load("demo", context="many")
found = greenroom.simulate("x.trace", ["lru"], ["25%"])
reveal_type(found.curves())
"""


def test_dir_lists_what_is_public():
    assert dir(greenroom) == sorted([*greenroom.__all__, "__version__"])
    for name in greenroom.__all__:
        assert getattr(greenroom, name) is not None


def test_the_version_is_the_installed_one_s(monkeypatch):
    assert greenroom.__version__ == metadata.version("greenroom")

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert greenroom.__version__ == "0+unknown"


def test_load_takes_the_options_of_the_command_line_with_the_same_defaults():
    mine = list(inspect.signature(greenroom.load).parameters.values())[1:]
    load_fields = {field.name: (field.type, field.default) for field in fields(LoadConfig)}
    assert {each.name: (each.annotation, each.default) for each in mine} == load_fields


def test_load_s_help_has_every_option():
    text = inspect.getdoc(greenroom.load) or ""
    named = [line.partition(":")[0] for line in text.splitlines() if ":" in line]
    named = [name.strip() for each in named for name in each.split(",")]
    assert {field.name for field in fields(LoadConfig)} <= set(named)


@pytest.mark.parametrize(
    ("option", "hint"),
    [("cach", "did you mean 'cache'?"), ("zzz", "it takes model, memory, cache")],
)
def test_an_option_that_does_not_exist_is_one_line(option, hint):
    with pytest.raises(UnknownOption) as caught:
        greenroom.load("demo", **{option: "25%"})
    message = str(caught.value)
    assert message.startswith(f"load() has no option {option!r}: {hint}")
    assert isinstance(caught.value, TypeError | GreenroomError)
    assert "\n" not in message


def test_types_are_declared():
    assert (Path(greenroom.__file__).parent / "py.typed").is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_user_s_type_checker_sees_them(tmp_path: Path):
    (tmp_path / "user.py").write_text(USER)
    root = Path(greenroom.__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml"), "user.py",
         "--follow-imports", "silent"],
        cwd=tmp_path, env={"MYPYPATH": str(root / "src"), "PATH": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    message = ran.stdout
    assert "read_limit: Union[str, int, None]" in message.replace(
        "str | int | None", "Union[str, int, None]"
    )
    assert 'Unexpected keyword argument "cach"' in message
    assert 'Argument "context" to "load" has incompatible type "str"' in message
    assert "dict[str, tuple[list[int], list[float]]]" in message
