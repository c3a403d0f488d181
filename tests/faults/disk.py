"""What a disk may hold after a power cut: changes of files, and which of them are certain.

    changes = read_log(path)                  # recorded by shim.cpp, in order
    for disk in states(changes, Disk.of(folder, name), Random(0)): disk.write(folder)

A change is certain once `fsync` of its file has returned; a name also by `fsync` of its folder.
Before that it may be on the disk or not, in any combination with others, and a write may be torn.
File systems promise more than that, each something else.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path
from random import Random
from typing import NamedTuple

HEAD = struct.Struct("<cQII")
EXHAUSTIVE = 6  # changes that may be missing, up to which all combinations are tried
DRAWN = 12  # combinations of more
NEVER = 1 << 60


class Change(NamedTuple):
    """A change of a file.

    what: w (write), t (set the size), c (create), r (rename), u (remove), d (make a folder),
          h (link), l (symbolic link), s (sync), f (lock)
    size: the offset of a write, the new size of `t`
    data: what is written; the new name of `r`, the other name of `h`, the target of `l`
    """

    what: str
    path: str
    size: int
    data: bytes


def read_log(path: Path) -> list[Change]:
    data, at, found = path.read_bytes(), 0, list[Change]()
    while at < len(data):
        what, size, name, length = HEAD.unpack_from(data, at)
        at += HEAD.size
        text = data[at : at + name].decode()
        at += name
        found.append(Change(what.decode(), text, size, data[at : at + length]))
        at += length
    return found


@dataclass
class Disk:
    """Names and contents: `names` maps paths to files, folders (None) or targets of links."""

    names: dict[str, bytearray | str | None] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, name: str) -> Disk:
        """The files below a folder, under another name for it."""
        disk = cls({name: None})
        for path in sorted(folder.rglob("*")):
            target = os.readlink(path) if path.is_symlink() else None
            content = None if path.is_dir() else bytearray(path.read_bytes())
            disk.names[f"{name}/{path.relative_to(folder)}"] = target or content
        return disk

    def apply(self, change: Change, torn: bool = False) -> None:
        """Make a change, or nothing where what it needs is missing."""
        what, path, size, data = change
        names = self.names
        if what in "cdl" and os.path.dirname(path) in names and path not in names:
            names[path] = {"c": bytearray(), "d": None, "l": data.decode()}[what]
        elif what in "wt" and isinstance(content := names.get(path), bytearray):
            if what == "t":
                content[:] = content[:size].ljust(size, b"\0")
                return
            data = data[: len(data) // 2] if torn else data
            content[:] = content.ljust(size, b"\0")
            content[size : size + len(data)] = data
        elif what == "u":
            names.pop(path, None)
        elif what == "h" and data.decode() in names:
            names[path] = names[data.decode()]
        elif what == "r" and path in names and os.path.dirname(data.decode()) in names:
            for name in [each for each in names if each == path or each.startswith(f"{path}/")]:
                names[data.decode() + name[len(path) :]] = names.pop(name)

    def digest(self) -> str:
        parts = hashlib.sha256()
        for name, content in sorted(self.names.items()):
            parts.update(repr((name, content)).encode())
        return parts.hexdigest()

    def write(self, folder: Path) -> None:
        """Let a folder have the disk's files below it."""
        shutil.rmtree(folder)
        for name, content in sorted(self.names.items()):
            if name != str(folder) and not name.startswith(f"{folder}/"):
                continue
            if content is None:
                os.makedirs(name, exist_ok=True)
            elif isinstance(content, str):
                os.symlink(content, name)
            else:
                Path(name).write_bytes(content)


def certain_from(changes: Sequence[Change]) -> list[int]:
    """For each change the number of the sync after which it is certain."""
    files: dict[str, int] = {}  # path -> number of its file, which a rename does not change
    of: list[int] = []
    for number, (what, path, _, data) in enumerate(changes):
        if what == "c":
            files[path] = number
        of.append(files.get(path, -1 - hash(path) % NEVER))
        if what == "r":
            for name in [each for each in files if each == path or each.startswith(f"{path}/")]:
                files[data.decode() + name[len(path) :]] = files.pop(name)
    found = []
    for number, (what, path, _, data) in enumerate(changes):
        ends = {os.path.dirname(path)}
        if what == "r":
            ends.add(os.path.dirname(data.decode()))
        after = (
            later
            for later in range(number + 1, len(changes))
            if changes[later].what == "s"
            and (
                (what in "wtc" and of[later] == of[number])
                or (what in "crudhl" and changes[later].path in ends)
            )
        )
        found.append(next(after, NEVER))
    return found


def states(changes: Sequence[Change], begin: Disk, random: Random) -> Iterator[Disk]:
    """Every disk that a power cut may leave, at every change; of many combinations, some."""
    certain, seen = certain_from(changes), set[str]()
    for cut in range(len(changes) + 1):
        unsure = [i for i in range(cut) if certain[i] >= cut and changes[i].what not in "sf"]
        for there in chosen(unsure, random):
            for torn in (False, True):
                if torn and not (there and changes[there[-1]].what == "w"):
                    continue
                disk = deepcopy(begin)
                for i in range(cut):
                    if certain[i] < cut or i in there:
                        disk.apply(changes[i], torn and i == there[-1])
                if (digest := disk.digest()) not in seen:
                    seen.add(digest)
                    yield disk


def chosen(unsure: list[int], random: Random) -> Iterator[list[int]]:
    """Combinations of the changes that may be on the disk."""
    if len(unsure) <= EXHAUSTIVE:
        sizes = range(len(unsure) + 1)
        yield from map(list, chain.from_iterable(combinations(unsure, n) for n in sizes))
        return
    yield []
    yield unsure
    yield unsure[:-1]  # in order
    yield unsure[1:]
    for _ in range(DRAWN):
        yield [i for i in unsure if random.random() < 0.5]
