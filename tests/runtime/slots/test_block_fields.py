"""The order of fields: where bytes go, in any chunks, and which matrices have it."""

from __future__ import annotations

from itertools import pairwise
from math import gcd

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.layout import BLOCKS, Catalog, Copy, Extent, SlotLayout
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.host import in_place_copies
from greenroom.runtime.cuda.slots import DeviceSlots
from greenroom.runtime.slots.block_fields import (
    FIELDS,
    field_arrays,
    in_fields,
    join,
    layout_in_fields,
    separate,
)
from greenroom.runtime.slots.host import HostSlots
from greenroom.runtime.store.disk import Chunk


def random_bytes(nbytes: int) -> np.ndarray:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)


def in_order(encoding: str, data: np.ndarray) -> np.ndarray:
    """The bytes of a matrix in the order of fields, block by block."""
    blocks = data.reshape(-1, BLOCKS[encoding][1])
    return np.concatenate([blocks[:, at : at + n].ravel() for at, n in FIELDS[encoding]])


@pytest.mark.parametrize("encoding", FIELDS)
def test_fields_are_all_bytes_of_a_block_and_arrays_are_aligned(encoding):
    """Codes for loads of 16 bytes, whatever the number of blocks; others for those of words."""
    numbers = [at + i for at, n in FIELDS[encoding] for i in range(n)]
    assert sorted(numbers) == [*range(BLOCKS[encoding][1])]
    sizes = [n for _, n in FIELDS[encoding]]
    assert sizes[0] % 16 == 0
    assert all(sum(sizes[:i]) % gcd(n, 16) == 0 for i, n in enumerate(sizes))


def test_two_blocks_of_q4_0_by_hand():
    """Scales are the bytes 0, 1 and 100, 101; codes follow them."""
    data = torch.tensor([*range(18), *range(100, 118)], dtype=torch.uint8)
    matrix = torch.zeros_like(data)
    separate("q4_0", data, 0, matrix)
    assert matrix.tolist() == [*range(2, 18), *range(102, 118), 0, 1, 100, 101]
    codes, scales = field_arrays("q4_0", matrix)
    assert codes.shape == (2, 16)
    assert scales.tolist() == [[0, 1], [100, 101]]


@pytest.mark.parametrize("encoding", FIELDS)
@given(cuts=st.lists(st.integers(0, 1 << 20), max_size=5), order=st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_bytes_find_their_places_in_any_pieces_and_order(encoding, cuts, order):
    data = random_bytes(6 * BLOCKS[encoding][1])
    matrix = torch.zeros(data.size, dtype=torch.uint8)
    ends = sorted({0, data.size, *(cut % data.size for cut in cuts)})
    pieces = list(pairwise(ends))
    order.shuffle(pieces)
    for start, stop in pieces:
        separate(encoding, torch.from_numpy(data)[start:stop], start, matrix)
    assert (matrix.numpy() == in_order(encoding, data)).all()
    assert (join(encoding, matrix).numpy() == data).all()


def layout_of(second: str) -> SlotLayout:
    """Gate and up in Q4_0, a bias, and a down projection in another encoding."""
    width = 256 // BLOCKS[second][0] * BLOCKS[second][1]
    tensors = [
        ("gate_up_proj", (64, 8 * 18), "uint8"),
        ("bias", (24,), "bfloat16"),
        ("down_proj", (48, width), "uint8"),
    ]
    return SlotLayout.pack(tensors, {"gate_up_proj": "q4_0", "down_proj": second}, "bfloat16")


def run_of(nbytes: int) -> Copy:
    return Copy(0, 0, (1, nbytes), (nbytes, 1), (nbytes, 1), "uint8", "uint8")


def catalog_of(layout: SlotLayout, *copies: Copy) -> Catalog:
    extent = Extent(0, 0, sum(copy.nbytes for copy in copies), copies)
    return Catalog(("file",), ("layer",), (0, 2), (layout,), lambda layer, expert: (extent,))


@pytest.mark.parametrize("encoding", FIELDS)
def test_a_device_separates_what_arrives_and_a_host_does_not(encoding):
    layout = layout_of(encoding)
    catalog = in_fields(catalog_of(layout, run_of(layout.nbytes)))
    (marked,), (extent,) = catalog.layouts, catalog.extents(0)
    assert [spec.fields for spec in marked.tensors] == ["q4_0", "", encoding]
    assert marked.nbytes == layout.nbytes
    assert extent.divisible
    data = random_bytes(layout.nbytes)
    device, host = DeviceSlots(Engine(), 1, layout.nbytes, 1), HostSlots(1, layout.nbytes)
    for slots in (device, host):
        for start, stop in ((0, 4000), (4000, 4001), (4001, layout.nbytes)):
            slots.write(0, extent.copies, data[start:stop], start)
    assert (host.bytes(0) == data).all()
    for spec in marked.tensors:
        stored = data[spec.offset :][: spec.nbytes]
        memory = device.bytes(0)[spec.offset :][: spec.nbytes].numpy()
        assert (memory == (in_order(spec.fields, stored) if spec.fields else stored)).all()
        both = (slots.tensor(0, spec).view(torch.uint8) for slots in (device, host))
        assert torch.equal(*both)  # bytes: some numbers may be NaN


def test_a_slot_of_the_host_is_separated_on_its_way_to_a_device():
    layout = layout_of("q6_k")
    catalog = in_fields(catalog_of(layout, run_of(layout.nbytes)))
    (marked,), (extent,) = catalog.layouts, catalog.extents(0)
    data = random_bytes(layout.nbytes)
    device = DeviceSlots(Engine(), 1, layout.nbytes, 1)
    for start in range(0, layout.nbytes, 5000):
        chunk = Chunk(extent, start, min(5000, layout.nbytes - start))
        device.write(0, in_place_copies(chunk), data, 0)
    for spec in marked.tensors:
        raw = device.tensor(0, spec).view(torch.uint8).reshape(-1)
        assert (raw.numpy() == data[spec.offset :][: spec.nbytes]).all()


@pytest.mark.parametrize("encoding", FIELDS)
def test_rows_in_turns_are_separated_too(encoding):
    """Gate and up, one after the other in the file and row by row in the slot."""
    inputs, nbytes = BLOCKS[encoding]
    rows, width = 6, 256 // inputs * nbytes
    layout = SlotLayout.pack(
        [("gate_up_proj", (2 * rows, width), "uint8")], {"gate_up_proj": encoding}, "bfloat16"
    )
    n = rows * width
    copies = [
        Copy(i * n, i * width, (rows, width), (width, 1), (2 * width, 1), "uint8", "uint8")
        for i in (0, 1)
    ]
    catalog = in_fields(catalog_of(layout, *copies))
    (extent,), (spec,) = catalog.extents(0), catalog.layouts[0].tensors
    assert spec.fields == encoding
    data = random_bytes(2 * n)
    want = torch.from_numpy(data.reshape(2, rows, width)).transpose(0, 1).reshape(2 * rows, width)
    device = DeviceSlots(Engine(), 1, layout.nbytes, 1)
    device.write(0, extent.copies, data, 0)
    assert torch.equal(device.tensor(0, spec), want)
    again = DeviceSlots(Engine(), 1, layout.nbytes, 1)
    chunk = Chunk(extent, 0, extent.length)
    again.write(0, in_place_copies(chunk), want.numpy().reshape(-1), 0)
    assert torch.equal(again.bytes(0)[: 2 * n], device.bytes(0)[: 2 * n])


def test_other_matrices_stay_in_the_order_of_files():
    layout = layout_of("q4_k")
    assert [spec.fields for spec in layout_in_fields(layout).tensors] == ["q4_0", "", ""]
    odd = SlotLayout.pack(
        [("down_proj", (8, 17), "uint8")], {"down_proj": "gguf_mxfp4"}, "bfloat16"
    )
    assert not layout_in_fields(odd)["down_proj"].fields
    columns = Copy(0, 0, (64, 18), (18, 1), (8 * 18, 1), "uint8", "uint8")  # a block of each row
    marked = layout_in_fields(layout, [columns])
    assert not marked["gate_up_proj"].fields
