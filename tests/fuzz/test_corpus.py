"""Every file that is damaged or hostile is read, or refused by one error in one line."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.check import fault, limits
from tests.fuzz.fuzzer import FORMATS, Fuzzer, begin
from tests.fuzz.kept import CORPUS
from tests.fuzz.mutate import RAW

ROUNDS = 40  # changed files of a format in `make check`; `make fuzz` reads as many as there is time
SLOW = {"config": 10, "gguf": 8, "pack": 15, "plans": 20, "tokenizer": 15, "tokenizer-config": 10}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing waits for a disk; warnings about damaged caches are not shown."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", FORMATS)
def test_valid_files_are_read(name: str) -> None:
    begin(name)


@pytest.mark.parametrize("name", FORMATS)
def test_the_kept_corpus(name: str, tmp_path: Path) -> None:
    begin(name)
    for path in sorted((CORPUS / name).glob("*")):
        check(name, path.read_bytes(), tmp_path, path.name)


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.split])
def test_json_that_ends_parsers(name: str, tmp_path: Path) -> None:
    """200,000 brackets, numbers of 400 digits, Infinity ...: in place of each JSON text of a file,
    and of the first value in it."""
    form = FORMATS[name]
    assert form.split
    assert form.join
    begin(name)
    seed = form.make()[0]
    for which, raw in RAW.items():
        texts, others = form.split(seed)
        for i, text in enumerate(texts):
            head, colon, rest = text.partition(b":")
            inside = head + colon + raw.encode() + b"," + rest.partition(b",")[2]
            for made in (raw.encode(), inside):
                whole = form.join(([*texts[:i], made, *texts[i + 1 :]], others))
                check(name, whole, tmp_path, f"{which} in text {i}")


@pytest.mark.parametrize("name", FORMATS)
def test_changed_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fuzzer = Fuzzer(name, failures=tmp_path)
    fuzzer.run(600.0, SLOW.get(name, ROUNDS))
    assert fuzzer.number == SLOW.get(name, ROUNDS)
    assert not fuzzer.failed, capsys.readouterr().out


def check(name: str, data: bytes, folder: Path, what: str) -> None:
    with limits():
        found = fault(FORMATS[name].read, data, folder)
    assert found is None, f"{name}, {what}: {found}"
