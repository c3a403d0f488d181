"""Files that name their format: what is read, and each way that one can be another."""

from __future__ import annotations

import json

import pytest

from greenroom.errors import ProfileError, UsageError
from greenroom.json_file import read_json


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
