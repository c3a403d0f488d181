"""The compiled quantisers against slow, obvious ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from greenroom.hf.pack import quantise

ROWS, COLUMNS = 8, 256


def weights(seed: int = 0, size: float = 0.02) -> np.ndarray:
    w = np.random.default_rng(seed).normal(size=(ROWS, COLUMNS)).astype(np.float32) * size
    w[1, :64] = 0
    w[2, 5] = 30 * size
    w[3, 64:128] *= 1e-4
    return w


def int8(w: np.ndarray, group: int = 64) -> tuple[np.ndarray, np.ndarray]:
    codes = np.empty(w.shape, np.int8)
    scales = np.empty((len(w), w.shape[1] // group), np.float32)
    assert quantise.int8(w, group, codes, scales)
    return codes, scales


def int4(w: np.ndarray, group: int = 32) -> tuple[np.ndarray, np.ndarray]:
    codes = np.empty((len(w), w.shape[1] // 2), np.uint8)
    scales = np.empty((len(w), w.shape[1] // group), np.float32)
    assert quantise.int4(w, group, codes, scales)
    values = np.stack((codes & 15, codes >> 4), -1).reshape(w.shape).astype(np.int8) - 8
    return values, scales


@pytest.mark.parametrize("group", [64, 16])
def test_nested(group: int) -> None:
    """Both planes are the nearest code under the scale; the upper one is the nearest sixteenth."""
    w = weights()
    high, low = (np.empty((ROWS, COLUMNS // 2), np.uint8) for _ in range(2))
    scales = np.empty((ROWS, COLUMNS // group), np.float32)
    assert quantise.nested(w, group, high, low, scales)
    h, rest = (np.stack((p & 15, p >> 4), -1).reshape(w.shape).astype(int) - 8 for p in (high, low))
    codes, scale = 16 * h + rest, scales.repeat(group, 1) / 16
    assert np.abs(codes).max() == 119
    assert np.abs(h).max() == 7
    assert (rest.min(), rest.max()) == (-8, 7)
    assert (np.abs(w - codes * scale) <= scale / 2 + 1e-9).all()
    largest = np.abs(w).reshape(ROWS, -1, group).max(-1)
    assert (scales / 16 * 119 >= largest).all()
    normal = scales / 16 >= 2.0**-14
    assert (scales[normal] / 16 * 119 <= largest[normal] * (1 + 1 / 16)).all()
    bits = scales[normal].view(np.int32) & ((1 << 19) - 1)
    assert not bits.any()  # five significant bits
    assert (scales == scales.astype(np.float16)).all()
    w[0, 0] = np.inf
    assert not quantise.nested(w, group, high, low, scales)


@pytest.mark.parametrize("group", [64, 16])
def test_int8(group: int) -> None:
    w = weights()
    codes, scales = int8(w, group)
    groups = w.reshape(ROWS, -1, group)
    wanted = (np.abs(groups).max(-1) / 127).astype(np.float16).astype(np.float32)
    assert np.array_equal(scales, wanted)
    over = np.divide(1, wanted, out=np.zeros_like(wanted), where=wanted > 0)
    slow = np.clip(np.rint(groups * over[..., None]), -127, 127)
    assert np.abs(codes.reshape(slow.shape) - slow).max() <= 1  # a tie may fall either way
    assert (codes.reshape(slow.shape) == slow).mean() > 0.999
    gaps = np.abs(codes.reshape(slow.shape) * scales[..., None] - groups)
    coarse = 127 * 2.0**-25  # where a scale is among the smallest float16
    assert (gaps <= scales[..., None] * 0.6 + coarse).all()


@pytest.mark.parametrize("group", [32, 8])
@pytest.mark.parametrize("size", [0.02, 1e-5, 3e-7, 50.0])
def test_int4(group: int, size: float) -> None:
    w = weights(size=size)
    codes, scales = int4(w, group)
    assert np.array_equal(scales, scales.astype(np.float16).astype(np.float32))
    groups = w.reshape(ROWS, -1, group)
    made = codes.reshape(groups.shape) * scales[..., None]
    error = ((made - groups) ** 2).sum(-1)
    # No worse than the plain way: the largest weight at -8, a scale of any float16.
    at = np.abs(groups).argmax(-1)[..., None]
    plain = (np.take_along_axis(groups, at, -1) / -8).astype(np.float16).astype(np.float32)
    q = np.clip(
        np.rint(np.divide(groups, plain, out=np.zeros_like(groups), where=plain != 0)), -8, 7
    )
    theirs = ((q * plain - groups) ** 2).sum(-1)
    assert error.sum() <= theirs.sum() * 1.01
    zero = (groups == 0).all(-1)
    assert (scales[zero] == 0).all()
    assert (codes.reshape(groups.shape)[zero] == 0).all()


def test_int4_is_exact_in_bfloat16() -> None:
    """What the compiled kernels make use of."""
    codes, scales = int4(weights())
    product = torch.from_numpy(codes.reshape(ROWS, -1, 32) * scales[..., None])
    assert torch.equal(product.bfloat16().float(), product)


@pytest.mark.parametrize(("down", "across"), [(4, 128), (8, 256), (1, 32)])
def test_fp8_equals_torch(down: int, across: int) -> None:
    w = weights()
    codes = np.empty(w.shape, np.uint8)
    scales = np.empty((ROWS // down, COLUMNS // across), np.float32)
    assert quantise.fp8(w, down, across, codes, scales)
    blocks = torch.from_numpy(w).view(ROWS // down, down, COLUMNS // across, across)
    wanted = blocks.abs().amax((1, 3)) / 448
    assert torch.equal(torch.from_numpy(scales), wanted)
    over = torch.where(wanted > 0, 1 / wanted, 0)[:, None, :, None]
    slow = (blocks * over).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert np.array_equal(codes, slow.view(ROWS, COLUMNS).numpy())


def test_every_e4m3_value_and_tie() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = values[values.isfinite()]
    between = (finite[:-1] + finite[1:]) / 2
    every = torch.cat((finite, between, between * (1 + 1e-6), between * (1 - 1e-6)))
    for x in every.tolist():
        wanted = torch.tensor(x).to(torch.float8_e4m3fn).view(torch.uint8).item()
        assert quantise._e4m3(np.float32(x)) == wanted, x


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_found(odd: float) -> None:
    w = weights()
    w[5, 77] = odd
    scales = np.empty((ROWS, 8), np.float32)
    assert not quantise.int8(w, 32, np.empty(w.shape, np.int8), scales)
    assert not quantise.int4(w, 32, np.empty((ROWS, COLUMNS // 2), np.uint8), scales)
    assert not quantise.fp8(w, 1, 32, np.empty(w.shape, np.uint8), scales)
