"""Compiled code on disk: found again, compiled again where it is damaged, bounded, shared."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numba import types
from numba.core.bytecode import FunctionIdentity

from greenroom.core.compiling.compile_cache import entry_point, jit, read, trim, with_parts, write
from greenroom.core.compiling.compile_folder import folder


@pytest.fixture(autouse=True)
def compile_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of compiled code, in which nothing is yet."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    return folder()


def files(where: Path) -> list[str]:
    return sorted(path.name for path in where.iterdir()) if where.exists() else []


def power(exponent: int) -> Callable[[int], int]:
    def raised(x: int) -> int:
        return x**exponent

    return raised


def from_disk(function: Any, value: int, expected: int) -> bool:
    """Call a function that is compiled anew; was it found?"""
    compiled = jit(function)
    assert compiled(value) == expected
    return sum(compiled._cache_hits.values()) == 1


def test_compiled_code_is_found_on_disk(compile_folder: Path) -> None:
    assert not from_disk(power(2), 5, 25)
    (name,) = files(compile_folder)
    assert name.startswith("test_compile_cache.raised-")
    assert from_disk(power(2), 5, 25)
    assert not from_disk(power(3), 5, 125)  # another constant
    assert from_disk(power(3), 2, 8)
    assert from_disk(power(2), 5, 25)
    assert not from_disk(power(2), 2.5, 6.25)  # another type
    assert len(files(compile_folder)) == 3


def test_options_and_optimization_levels_have_separate_files(compile_folder: Path) -> None:
    first = jit(power(2))
    first(3)
    other = jit(power(2), error_model="numpy")
    other(3)
    assert not other._cache_hits
    assert len(files(compile_folder)) == 2


@pytest.mark.parametrize("damage", [b"", b"x", None])
def test_a_damaged_file_is_compiled_again(compile_folder: Path, damage: bytes | None) -> None:
    from_disk(power(2), 5, 25)
    path = compile_folder / files(compile_folder)[0]
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if damage is None else damage)
    assert not from_disk(power(2), 5, 25)
    assert from_disk(power(2), 5, 25)


@pytest.mark.parametrize("mode", [0o600, 0o620, 0o602])
@pytest.mark.parametrize("stranger", [False, True])
def test_code_that_another_user_could_have_written_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, stranger: bool
) -> None:
    path = tmp_path / "code"
    write(path, b"machine code")
    path.chmod(mode)
    if stranger:
        if os.getuid() == 0:
            os.chown(path, 54321, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert read(path) == (b"machine code" if mode == 0o600 and not stranger else None)


def test_an_unwritable_folder_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(file))
    assert not from_disk(power(2), 5, 25)
    assert not from_disk(power(2), 5, 25)
    assert file.read_bytes() == b""


def raised(x: int) -> int:
    return power(x)  # type: ignore[return-value] # with_parts puts another `power` here


def test_copies_with_other_globals_have_separate_files(compile_folder: Path) -> None:
    """Copies have one name and one signature; each call must reach its copy's global."""
    for expected in ([25, 125], [25, 125]):
        copies = [jit(with_parts(raised, {"power": jit(power(n))})) for n in (2, 3)]
        assert [compiled(5) for compiled in copies] == expected
    assert len(files(compile_folder)) == 4
    assert all(compiled._cache_hits for compiled in copies)


def test_symbols_are_unique_in_each_process() -> None:
    """Two processes that name different code alike would have a third one mistake it."""
    first, second = (FunctionIdentity.from_function(raised).unique_id for _ in range(2))
    source, target = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(target, str(FunctionIdentity.from_function(raised).unique_id).encode())
        os._exit(0)
    os.waitpid(child, 0)
    third = int(os.read(source, 100))
    fourth = FunctionIdentity.from_function(raised).unique_id
    assert len({first, second, third, fourth}) == 4
    os.close(source)
    os.close(target)


def test_an_entry_point_is_found_again(compile_folder: Path) -> None:
    def enter(pointer: Any) -> None:
        return

    for hits in (0, 1):
        code = entry_point(enter, types.void(types.voidptr))
        assert code.address
        assert code.cache_hits == hits
    assert len(files(compile_folder)) == 1


def test_a_reader_never_sees_an_incomplete_file(compile_folder: Path) -> None:
    """Threads that write and read one file at once: each reads nothing, or all of one write."""
    path, contents = compile_folder / "code.nbc", set[bytes | None]()
    data = [bytes([n]) * 200_000 for n in range(4)]

    def play(mine: bytes) -> None:
        for _ in range(20):
            write(path, mine)
            contents.add(read(path))

    threads = [threading.Thread(target=play, args=(each,)) for each in data]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert contents <= set(data)
    assert files(compile_folder) == ["code.nbc"]


def test_the_files_used_longest_ago_are_removed(compile_folder: Path) -> None:
    for n, name in enumerate("abcd"):
        write(compile_folder / name, b"x" * 68)  # 100 bytes with the checksum
        os.utime(compile_folder / name, (n, n))
    read(compile_folder / "a")
    trim(compile_folder, 400)
    assert files(compile_folder) == ["a", "b", "c", "d"]
    trim(compile_folder, 250)
    assert files(compile_folder) == ["a", "d"]
    trim(compile_folder, 0)
    assert files(compile_folder) == []


def test_the_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert folder() == tmp_path / "greenroom" / "compiled"
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert folder() == Path("/caches/greenroom/compiled")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert folder() == Path.home() / ".cache" / "greenroom" / "compiled"
