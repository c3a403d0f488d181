"""A library of kernels for aarch64, loaded into an emulated processor (package unicorn)."""

from __future__ import annotations

import struct
from itertools import count
from pathlib import Path

BASE, HEAP, STACK, STUBS = 0x1000_0000, 0x4000_0000, 0x7000_0000, 0x7F00_0000
MIB = 1 << 20
RETURN = 0xD65F03C0  # the instruction
ABSOLUTE, GLOBAL, JUMP, RELATIVE = 257, 1025, 1026, 1027  # kinds of relocations
FLOATING_POINT = 3 << 20  # in CPACR_EL1: vector instructions are allowed


class Emulated:
    """A library whose functions run in the emulator; memory is given by `place` alone."""

    def __init__(self, path: Path) -> None:
        import unicorn
        from unicorn import arm64_const

        self._registers = arm64_const
        self._cpu = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        enabled = self._cpu.reg_read(arm64_const.UC_ARM64_REG_CPACR_EL1) | FLOATING_POINT
        self._cpu.reg_write(arm64_const.UC_ARM64_REG_CPACR_EL1, enabled)
        for start, size in ((BASE, 16), (HEAP, 64), (STACK, 8), (STUBS, 1)):
            self._cpu.mem_map(start, size * MIB)
        self._next, self._stubs = HEAP, {}  # address of a stub -> name of its libc function
        self._file = path.read_bytes()
        self._symbols = self._load()
        self._cpu.hook_add(unicorn.UC_HOOK_CODE, self._libc, begin=STUBS, end=STUBS + MIB)

    def address(self, name: str) -> int:
        return self._symbols[name]

    def place(self, data: bytes) -> int:
        """Copy bytes into the emulator's memory, 64 bytes or more from all others."""
        address, self._next = self._next, self._next + (len(data) // 64 + 2) * 64
        self._cpu.mem_write(address, data)
        return address

    def take(self, address: int, nbytes: int) -> bytes:
        return bytes(self._cpu.mem_read(address, nbytes))

    def call(self, address: int, argument: int) -> int:
        """Call a function of one argument; return its result."""
        of = self._registers
        self._cpu.reg_write(of.UC_ARM64_REG_X0, argument)
        self._cpu.reg_write(of.UC_ARM64_REG_SP, STACK + 4 * MIB)
        self._cpu.reg_write(of.UC_ARM64_REG_LR, STUBS)
        self._cpu.emu_start(address, STUBS)
        return int(self._cpu.reg_read(of.UC_ARM64_REG_X0))

    def _load(self) -> dict[str, int]:
        """Write the file's segments, and fill in addresses; return those of the symbols."""
        file = self._file
        program, sections = struct.unpack_from("<2Q", file, 32)
        _, programs, _, tables = struct.unpack_from("<4H", file, 54)
        for n in range(programs):
            kind, _, offset, place, _, nbytes, _, _ = struct.unpack_from(
                "<2I6Q", file, program + 56 * n
            )
            if kind == 1:
                self._cpu.mem_write(BASE + place, file[offset : offset + nbytes])
        headers = [struct.unpack_from("<2I4Q2I2Q", file, sections + 64 * n) for n in range(tables)]
        table = next(h for h in headers if h[1] == 11)  # dynamic symbols
        strings, free = headers[table[6]][4], count(STUBS + 16, 16)
        symbols: list[tuple[str, int]] = []
        for at in range(table[4], table[4] + table[5], 24):
            name, _, _, section, value, _ = struct.unpack_from("<I2BH2Q", file, at)
            text = file[strings + name : file.index(b"\0", strings + name)].decode()
            if section == 0:  # a function of the C library
                value = next(free) - BASE
                self._stubs[BASE + value] = text
                self._cpu.mem_write(BASE + value, struct.pack("<I", RETURN))
            symbols.append((text, BASE + value))
        for header in (h for h in headers if h[1] == 4):
            for at in range(header[4], header[4] + header[5], 24):
                where, info, addend = struct.unpack_from("<2Qq", file, at)
                kind, symbol = info & 0xFFFFFFFF, info >> 32
                assert kind in (ABSOLUTE, GLOBAL, JUMP, RELATIVE), kind
                value = addend + (BASE if kind == RELATIVE else symbols[symbol][1])
                self._cpu.mem_write(BASE + where, struct.pack("<Q", value))
        return dict(symbols)

    def _libc(self, _cpu: object, address: int, _size: int, _data: object) -> None:
        """Do what a function of the C library does, before its stub returns."""
        if address == STUBS:
            return
        of = self._registers
        target, source, nbytes = (
            self._cpu.reg_read(each)
            for each in (of.UC_ARM64_REG_X0, of.UC_ARM64_REG_X1, of.UC_ARM64_REG_X2)
        )
        name = self._stubs[address]
        if name in ("memcpy", "memmove"):
            self._cpu.mem_write(target, self.take(source, nbytes))
        elif name == "memset":
            self._cpu.mem_write(target, bytes([source & 255]) * nbytes)
        else:
            raise NotImplementedError(name)
