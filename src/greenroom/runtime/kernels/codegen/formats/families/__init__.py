"""Encodings that compiled kernels read: one module for a family, one `Format` for an encoding."""

from __future__ import annotations

from greenroom.runtime.kernels.codegen.formats.families import groups, simple
from greenroom.runtime.kernels.codegen.formats.format import Format

FORMATS: dict[str, Format] = {
    name: form for family in (groups, simple) for name, form in family.FORMATS.items()
}

__all__ = ["FORMATS"]
