"""The file of a learned predictor."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from greenroom.errors import OutputError, PredictorError
from greenroom.plan.history.files import load_predictor, save_predictor

TENSORS = {"distance": np.array([2]), "0.up.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_predictor(tmp_path / "p", TENSORS, "abc", {"model": "mine"})
    return tmp_path / "p"


def test_comes_back_as_it_was(path: Path) -> None:
    back = load_predictor(path, "abc")
    assert back.keys() == TENSORS.keys()
    for name, array in TENSORS.items():
        assert back[name].dtype == array.dtype
        np.testing.assert_array_equal(back[name], array)
    assert os.listdir(path.parent) == ["p"]


def test_other_readers_open_it(path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    np.testing.assert_array_equal(
        safetensors.load_file(path)["0.up.weight"], TENSORS["0.up.weight"]
    )


def test_another_models_is_refused(path: Path) -> None:
    with pytest.raises(PredictorError, match=r"was trained for another model \(mine\)") as error:
        load_predictor(path, "abd")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_a_file_that_was_cut_off_is_refused(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(PredictorError, match=r"not a predictor, or ends inside|truncated"):
        load_predictor(path, "abc")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (b"greenroom.predictor", b"greenroom.different", "but is not a predictor"),
        (b'"version":"2"', b'"version":"1"', "version 1, but this Greenroom reads version 2"),
        (b'"shape":[2,3]', b'"shape":[2,4]', "its header is damaged"),
    ],
)
def test_a_file_that_says_something_else(
    path: Path, before: bytes, after: bytes, message: str
) -> None:
    data = path.read_bytes()
    assert before in data
    path.write_bytes(data.replace(before, after))
    with pytest.raises(PredictorError, match=message):
        load_predictor(path, "abc")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PredictorError, match="cannot be read: No such file"):
        load_predictor(tmp_path / "nothing", "abc")
    with pytest.raises(OutputError):
        save_predictor(tmp_path / "no" / "p", TENSORS, "abc", {})
