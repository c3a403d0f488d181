"""`quant_method: gptq` and `awq`: integers in groups, in matrices [inputs, outputs].

A matrix NAME has the tensors NAME.qweight (codes), NAME.scales and NAME.qzeros; GPTQ's also
NAME.g_idx, the group of each input. What is plain in the file stays plain, whatever the config
says. Greenroom's matrices are [outputs, inputs]: bytes are arranged when a matrix is read
(runtime/slots/forms.py).
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import Any

from greenroom.core.layout import FLOATS
from greenroom.hf.checkpoint.header import StoredTensor
from greenroom.hf.checkpoint.quantised.parts import QuantisedCheckpoint, is_positive
from greenroom.json_file import printable

WORD = 32  # bits of an int32
GPTQ_BITS, AWQ_BITS = (4, 8), (4,)
MINUS_ONE = {"gptq": True, "gptq_v2": False}  # are zeros stored minus one?
AWQ_FORMS = ("gemm",)
SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")


def combine_gptq(checkpoint: QuantisedCheckpoint) -> None:
    """Combine codes, scales and zeros of GPTQ's format, with 4 or 8 bits."""
    settings = checkpoint.settings
    form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if form not in MINUS_ONE:
        raise checkpoint.unserved_error(f"GPTQ in the format {printable(form)}")
    ordered = settings.get("desc_act") or False
    if not isinstance(ordered, bool):
        raise checkpoint.setting_error("desc_act", ordered, "true or false")
    bits = _bits(checkpoint, "bits", GPTQ_BITS)
    for stem in _matrix_names(checkpoint):
        scales, groups, outputs = _scales(checkpoint, stem)
        zeros, own_bits = _zeros(checkpoint, stem, groups, outputs)
        if own_bits not in GPTQ_BITS:
            raise checkpoint.unserved_error(f"{stem} has codes of {own_bits} bits")
        if bits not in (own_bits, 0):
            raise _contradiction(checkpoint, stem, "bits", bits, own_bits)
        codes = _tensor(checkpoint, f"{stem}.qweight", "int32", (None, outputs))
        inputs = codes.shape[0] * WORD // own_bits
        size = _group_size(checkpoint, stem, "group_size", inputs, groups)
        matrix = replace(
            codes,
            shape=(outputs, inputs),
            codes=(outputs, codes.shape[0]),
            encoding=f"affine{own_bits}",
            form="transposed",
        )
        form_of_zeros = f"zeros{own_bits}" + "-minus-1" * MINUS_ONE[form]
        companions = [_transpose(scales), _zeros_of(zeros, outputs, form_of_zeros)]
        if ordered and groups > 1:
            index = _tensor(checkpoint, f"{stem}.g_idx", "int32", (inputs,))
            companions.append(replace(index, shape=(1, inputs), form=f"index-{groups}"))
            matrix = replace(matrix, encoding=f"indexed{own_bits}")
        elif inputs % groups:
            raise checkpoint.indivisible_error(f"{stem}.qweight", inputs, size)
        _finish(checkpoint, stem, matrix, companions)
    _check_rest(checkpoint)


def combine_awq(checkpoint: QuantisedCheckpoint) -> None:
    """Combine codes, scales and zeros of AWQ's format, with 4 bits."""
    settings = checkpoint.settings
    form = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if form not in AWQ_FORMS:
        raise checkpoint.unserved_error(f"AWQ in the version {printable(form)}")
    key = "bits" if "bits" in settings else "w_bit"
    if _bits(checkpoint, key, AWQ_BITS) == 0:
        raise checkpoint.setting_error(key, settings.get(key), "4")
    group_key = "group_size" if "group_size" in settings else "q_group_size"
    for stem in _matrix_names(checkpoint):
        scales, groups, outputs = _scales(checkpoint, stem)
        zeros, bits = _zeros(checkpoint, stem, groups, outputs)
        if bits != AWQ_BITS[0]:
            raise _contradiction(checkpoint, stem, key, AWQ_BITS[0], bits)
        codes = _tensor(checkpoint, f"{stem}.qweight", "int32", (None, outputs * bits // WORD))
        inputs = codes.shape[0]
        size = _group_size(checkpoint, stem, group_key, inputs, groups)
        if inputs % groups or inputs % 8:
            raise checkpoint.indivisible_error(f"{stem}.qweight", inputs, lcm(size, 8))
        matrix = replace(
            codes,
            shape=(outputs, inputs),
            codes=(outputs, inputs * bits // WORD),
            encoding=f"affine{bits}",
            form="awq",
        )
        _finish(
            checkpoint, stem, matrix, [_transpose(scales), _zeros_of(zeros, outputs, "zeros4-awq")]
        )
    _check_rest(checkpoint)


def _matrix_names(checkpoint: QuantisedCheckpoint) -> list[str]:
    """Return the names of all quantised matrices."""
    return [
        name.removesuffix(".qweight") for name in checkpoint.tensors if name.endswith(".qweight")
    ]


def _bits(checkpoint: QuantisedCheckpoint, key: str, served: tuple[int, ...]) -> int:
    """Return the config's bits of a code; 0 if its table `dynamic` may give others to matrices."""
    bits = checkpoint.settings.get(key)
    if not is_positive(bits):
        raise checkpoint.setting_error(key, bits, "a positive number")
    if checkpoint.settings.get("dynamic"):
        return 0
    if bits not in served:
        raise checkpoint.unserved_error(f"codes of {bits} bits")
    return int(bits)


def _tensor(
    checkpoint: QuantisedCheckpoint, name: str, dtype: str, shape: tuple[int | None, ...]
) -> StoredTensor:
    """Return a part of a quantised matrix; None in `shape` is any length.

    Raises CheckpointError if the tensor is missing, empty, or of another dtype or shape.
    """
    tensor = checkpoint.tensors.get(name)
    if tensor is None:
        stem, _, part = name.rpartition(".")
        raise checkpoint.error(f"{stem} is quantised, but its tensor {name} ({part}) is missing")
    if tensor.dtype != dtype:
        raise checkpoint.error(f"{name} has dtype {tensor.dtype}, but must have {dtype}")
    fits = len(tensor.shape) == len(shape) and all(
        want in (None, n) for want, n in zip(shape, tensor.shape, strict=True)
    )
    if not fits or 0 in tensor.shape:
        right = ", ".join("any" if n is None else str(n) for n in shape)
        raise checkpoint.error(
            f"{name} has shape {list(tensor.shape)}, but must have shape [{right}] to fit its"
            " matrix, without an axis of length 0"
        )
    return tensor


def _scales(checkpoint: QuantisedCheckpoint, stem: str) -> tuple[StoredTensor, int, int]:
    """Return a matrix's scales, and the numbers of its groups and outputs."""
    name = f"{stem}.scales"
    stored = checkpoint.tensors.get(name)
    if stored is not None and stored.dtype not in FLOATS:
        raise checkpoint.error(
            f"the scales {name} have dtype {stored.dtype}, but must have one of {', '.join(FLOATS)}"
        )
    scales = _tensor(checkpoint, name, stored.dtype if stored else "", (None, None))
    return scales, scales.shape[0], scales.shape[1]


def _zeros(
    checkpoint: QuantisedCheckpoint, stem: str, groups: int, outputs: int
) -> tuple[StoredTensor, int]:
    """Return a matrix's zeros, and the bits of a code, which the zeros show."""
    name = f"{stem}.qzeros"
    zeros = _tensor(checkpoint, name, "int32", (groups, None))
    bits, odd = divmod(zeros.shape[1] * WORD, outputs)
    if odd or not 1 <= bits <= 8:
        raise checkpoint.error(
            f"{name} has shape {list(zeros.shape)}, which does not fit {outputs} outputs with"
            " zeros of 1 to 8 bits"
        )
    return zeros, bits


def _group_size(
    checkpoint: QuantisedCheckpoint, stem: str, key: str, inputs: int, groups: int
) -> int:
    """Return the config's group size; check that a matrix has as many groups."""
    size: Any = checkpoint.settings.get(key, -1)
    if size in (-1, None) and not isinstance(size, bool):
        size = inputs
    if not is_positive(size):
        raise checkpoint.setting_error(key, size, "a positive number, or -1")
    if -(-inputs // size) != groups and not checkpoint.settings.get("dynamic"):
        raise _contradiction(checkpoint, stem, key, size, f"{groups} groups of {inputs} inputs")
    return int(size)


def _contradiction(
    checkpoint: QuantisedCheckpoint, stem: str, key: str, setting: int, stored: object
) -> Exception:
    return checkpoint.error(
        f"the config says {key} {setting}, but {stem} is stored with {stored}: download the model"
        " again"
    )


def _transpose(scales: StoredTensor) -> StoredTensor:
    return replace(scales, shape=scales.shape[::-1], form="transposed")


def _zeros_of(zeros: StoredTensor, outputs: int, form: str) -> StoredTensor:
    return replace(zeros, dtype="uint8", shape=(outputs, zeros.shape[0]), form=form)


def _finish(
    checkpoint: QuantisedCheckpoint,
    stem: str,
    matrix: StoredTensor,
    companions: list[StoredTensor],
) -> None:
    """Replace a matrix's parts by one encoded tensor."""
    for suffix in SUFFIXES:
        checkpoint.combined.pop(f"{stem}.{suffix}", None)
    checkpoint.combined[f"{stem}.weight"] = replace(matrix, companions=tuple(companions))


def _check_rest(checkpoint: QuantisedCheckpoint) -> None:
    """Check that no scales or zeros are left whose codes are missing."""
    for name in checkpoint.combined:
        stem, _, suffix = name.rpartition(".")
        if suffix in ("qzeros", "scales"):
            raise checkpoint.error(
                f"{stem} has the tensor {name}, but its codes {stem}.qweight are missing"
            )
