"""The library of compiled kernels: which one is loaded, and the structures of its arguments."""

from __future__ import annotations

import ctypes
import re
import shutil
from pathlib import Path

import pytest

from greenroom.errors import UnknownName, UsageError
from greenroom.runtime.kernels.native import library as module
from greenroom.runtime.kernels.native.library import (
    CHOICE,
    FOLDER,
    SOURCES,
    VARIANTS,
    Library,
    MissingKernels,
    digest_of,
    library,
    missing_reason,
)

BUILT = sorted(FOLDER.glob("greenroom-*.so"))


@pytest.fixture
def weak(fresh_library, monkeypatch):
    """A processor that lacks the instructions of every library."""
    monkeypatch.setattr(Library, "runs_here", False)


def test_the_fastest_library_that_runs_here_is_loaded(fresh_library):
    runs = [path.stem for path in BUILT if Library(path).runs_here]
    names = [name for name in VARIANTS if f"greenroom-{name}" in runs]
    assert library().variant == names[0]
    assert missing_reason() == ""


def test_a_slower_library_is_loaded_where_the_fastest_does_not_run(fresh_library, monkeypatch):
    fastest = library().variant
    library.cache_clear()
    monkeypatch.setattr(Library, "runs_here", property(lambda self: self.variant != fastest))
    if len(BUILT) == 1:
        pytest.skip("one library is all there is for this kind of machine")
    assert library().variant != fastest


@pytest.mark.parametrize("path", BUILT, ids=lambda path: path.stem)
def test_the_user_chooses_a_library(fresh_library, monkeypatch, path):
    chosen = Library(path)
    monkeypatch.setenv(CHOICE, chosen.variant)
    if chosen.runs_here:
        assert library().variant == chosen.variant
    else:
        with pytest.raises(UsageError, match="lacks the instructions"):
            library()


def test_a_wrong_variant_is_refused_by_name(fresh_library, monkeypatch):
    monkeypatch.setenv(CHOICE, "sse2")
    with pytest.raises(
        UnknownName, match="GREENROOM_SIMD 'sse2': choose one of avx512, avx2, neon"
    ):
        library()
    with pytest.raises(UnknownName):
        missing_reason()


def test_a_choice_that_was_not_built(no_kernels, monkeypatch):
    monkeypatch.setenv(CHOICE, "neon")
    with pytest.raises(UsageError, match=r"GREENROOM_SIMD=neon: .*greenroom-neon.so was not built"):
        missing_reason()


def test_a_choice_that_does_not_run_here(weak, monkeypatch):
    monkeypatch.setenv(CHOICE, Library(BUILT[0]).variant)
    with pytest.raises(UsageError, match=r"GREENROOM_SIMD=.*: this processor lacks"):
        missing_reason()


def test_nothing_was_built(no_kernels):
    with pytest.raises(MissingKernels, match=r"were not built: .*make native.*--kernels eager"):
        library()
    assert missing_reason() == "compiled kernels were not built"


def test_nothing_runs_here(weak):
    names = [name for name in VARIANTS if FOLDER / f"greenroom-{name}.so" in BUILT]
    assert missing_reason() == f"this processor has no {' or '.join(names)}"


def test_a_damaged_library(fresh_library, monkeypatch, tmp_path):
    (tmp_path / "greenroom-avx2.so").write_bytes(b"damaged" * 100)
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    with pytest.raises(UsageError, match=r"cannot be loaded \(.*greenroom-avx2.so"):
        library()


def test_an_old_library_is_noticed(fresh_library, monkeypatch, tmp_path):
    """Its digest is that of the sources; an installed package has no sources to compare."""
    for path in BUILT:
        assert Library(path).source_digest == digest_of(SOURCES)
    changed = tmp_path / "native"
    shutil.copytree(SOURCES, changed)
    with (changed / "formats/row.hpp").open("a") as file:
        file.write("// One line more.\n")
    monkeypatch.setattr(module, "SOURCES", changed)
    with pytest.raises(UsageError, match=r"older than .*native: run `make native`"):
        library()
    monkeypatch.setattr(module, "SOURCES", tmp_path / "none")
    assert library().variant


def structures(path: Path) -> list[str]:
    """Names of the structures that a library describes."""
    return sorted(set(re.findall(rb"\0fields_of_(\w+)", path.read_bytes())))


@pytest.mark.parametrize("path", BUILT, ids=lambda path: path.stem)
def test_python_and_cpp_agree_on_every_structure(path):
    """In names, types and size; C++ says how many bytes a structure has."""
    opened, names = Library(path), structures(path)
    assert b"RowsCall" in names
    for name in map(bytes.decode, names):
        kind = opened.structure(name)
        nbytes = ctypes.c_int64.from_address(opened.address(f"bytes_of_{name}")).value
        assert ctypes.sizeof(kind) == nbytes > 0, name


def test_all_libraries_describe_the_same_structures():
    assert len({tuple(structures(path)) for path in BUILT}) == 1


def test_a_structure_that_does_not_exist():
    with pytest.raises(AttributeError, match="no structure Nothing"):
        library().structure("Nothing")


def test_declarations_by_hand():
    """The preprocessor has removed comments and joined lines."""
    fields = library().fields(
        "int64_t rows, columns; float scale; const float* const* inputs, *out, bias;"
        " int32_t sizes[2][3]; uint8_t *places[4]; const Layout* layouts; Layout own[2];"
    )
    layout = library().structure("Layout")
    assert fields == [
        ("rows", ctypes.c_int64), ("columns", ctypes.c_int64), ("scale", ctypes.c_float),
        ("inputs", ctypes.c_void_p), ("out", ctypes.c_void_p), ("bias", ctypes.c_float),
        ("sizes", ctypes.c_int32 * 3 * 2), ("places", ctypes.c_void_p * 4),
        ("layouts", ctypes.c_void_p), ("own", layout * 2),
    ]  # fmt: skip


@pytest.mark.parametrize("wrong", ["int64_t", "double x", "float x[N]", "uint8_t x"])
def test_a_declaration_that_python_cannot_read(wrong):
    with pytest.raises((ValueError, AttributeError)):
        library().fields(wrong)
