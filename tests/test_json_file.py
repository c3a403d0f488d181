"""Files that name their format: what is read, and each way that one can be another."""

from __future__ import annotations

import json
import random

import pytest

from greenroom.errors import CheckpointError, ProfileError, UsageError
from greenroom.json_file import (
    DEEPEST,
    JsonObject,
    Malformed,
    integer,
    list_of,
    number,
    parse,
    read_json,
    read_object,
)


def read(path, error=UsageError):
    return read_json(path, "a-format", "holds no letters", "make letters", error)


def test_what_it_holds(tmp_path):
    path = tmp_path / "f.json"
    path.write_text(json.dumps({"format": "a-format", "a": [1]}))
    assert read(path).values == {"format": "a-format", "a": [1]}


@pytest.mark.parametrize("text", ['{"format": "b-format"}', "[]", "1", '"a-format"', "{}"])
def test_another_file_names_what_makes_such_files(tmp_path, text):
    path = tmp_path / "f.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"f\.json holds no letters: make letters makes such"):
        read(path)


@pytest.mark.parametrize("text", ["", "{", "a-format"])
def test_no_json(tmp_path, text):
    path = tmp_path / "f.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match="holds no letters: it is not JSON"):
        read(path, ProfileError)


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "f.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="holds no letters: it is not JSON"):
        read(path)


def test_no_such_file(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*f\.json: No such file"):
        read(tmp_path / "f.json")


REFUSED = {
    "[" * 200_000: "its brackets are not in pairs",
    '{"a":' * 200_000 + "1" + "}" * 200_000: "nested deeper than 64 levels",
    "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1): "nested deeper than 64 levels",
    "[" + "[]," * 3_000_000 + "1]": "more than 2097152 lists and objects",
    "[" + "[]," * 100 + "{]]": "its brackets are not in pairs",
    "[NaN]": "NaN is not a number",
    "[-Infinity]": "-Infinity is not a number",
    "[1e999]": "no float can represent the number",
    "[" + "9" * 400 + "]": "more than 64 digits",
    "[" + "9" * 5000 + "]": "more than 64 digits",
    '["\\ud800"]': "half of a surrogate pair",
    '{"a": 1, "a": 2}': "the name 'a' occurs twice in one object",
    b"\xef\xbb\xbf{}": "byte order mark",
    b'{"a": "\xff"}': "byte 7 is not UTF-8",
    b"x": "Expecting value",
}


@pytest.mark.parametrize("text", REFUSED, ids=[*REFUSED.values()])
def test_what_is_refused(text):
    with pytest.raises(Malformed) as caught:
        parse(text)
    assert REFUSED[text] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_a_size_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "f.json"
    path.write_text('{"a": "' + "x" * 100 + '"}')
    with pytest.raises(CheckpointError, match="larger than 50 bytes"):
        read_object(path, CheckpointError, 50)
    assert list(read_object(path, CheckpointError, 200)) == ["a"]


def test_what_is_taken():
    texts = [
        '["[[{", "\\\\", "\\"]"]',
        '["\\ud83d\\ude00"]',
        '["\\\\ud800"]',
        "[1e300]",
        str(10**30),
    ]
    for text in ("[" * DEEPEST + "]" * DEEPEST, *texts):
        assert parse(text) == json.loads(text)
    assert parse('{"a": 1, "a": 2}', unique=False) == {"a": 2}


def test_brackets_in_strings_are_none():
    """Random values of strings that are full of quotes, brackets and escapes come back."""
    rng = random.Random(1)

    def value(depth):
        kind = rng.random() if depth < DEEPEST - 1 else 0.0
        if kind < 0.5:
            return rng.choice([1, 'a"[]{}\\', "\\", '["{', '"', None, -1.5, "\u00e9"])
        if kind < 0.75:
            return [value(depth + 1) for _ in range(rng.randrange(4))]
        return {f"{rng.choice('[{}')}{i}": value(depth + 1) for i in range(rng.randrange(4))}

    for _ in range(300):
        document = [value(0) for _ in range(70)]
        assert parse(json.dumps(document)) == document
        assert parse(json.dumps(document, ensure_ascii=False, indent=1)) == document


def test_values_by_kind():
    document = JsonObject({"n": 3, "x": 0.5, "t": "a", "f": True, "l": [1, 2], "o": {"n": -1}})
    assert (
        document.integer("n"),
        document.number("x"),
        document.text("t"),
        document.flag("f"),
    ) == (
        3,
        0.5,
        "a",
        True,
    )
    assert document.name("t") == "a"
    assert document.list_of("l", integer) == (1, 2)
    assert document.number("n") == 3.0
    assert document.integer("none", 7) == 7
    assert "n" in document.object("o")
    for ask, message in {
        lambda: document.integer("none"): "none is missing",
        lambda: document.integer("f"): "f must be a whole number from 0 upwards, got True",
        lambda: document.integer("n", most=2): "n must be a whole number from 0 to 2, got 3",
        lambda: document.number("f"): "f must be a number from 0, got True",
        lambda: document.text("n"): "n must be text, got 3",
        lambda: document.name("n"): "n must be text, got 3",
        lambda: JsonObject({"t": "a\nb"}).name("t"): "t must be a name of 1 to 100 characters",
        lambda: JsonObject({"t": "a" * 101}).name("t"): "t must be a name of 1 to 100 characters",
        lambda: JsonObject({"t": ""}).name("t"): "t must be a name of 1 to 100 characters",
        lambda: document.flag("n"): "n must be true or false, got 3",
        lambda: document.object("l"): "l must be an object, got a list",
        lambda: document.object("o").integer(
            "n"
        ): "o.n must be a whole number from 0 upwards, got -1",
        lambda: document.list_of("t", integer): "t must be a list, got 'a'",
        lambda: document.list_of("l", list_of(number)): "l[0] must be a list, got 1",
        lambda: number(10**40, "x"): "x must be a number from 0 to 1e+30",
        lambda: JsonObject([]): "not an object, but a list",
    }.items():
        with pytest.raises(Malformed) as caught:
            ask()
        assert message in str(caught.value)
