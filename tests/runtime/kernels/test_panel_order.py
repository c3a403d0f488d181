"""The order of panels: where bytes go, in any pieces, and which matrices have it."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.layout import BLOCKS, Catalog, Copy, Extent, SlotLayout
from greenroom.runtime.kernels.matrix import Format, format_symbol
from greenroom.runtime.kernels.native.library import Library
from greenroom.runtime.kernels.panel_order import Panels, has_panels, in_panels
from greenroom.runtime.slots.host import HostSlots
from tests.runtime.kernels.native.variants import LIBRARIES
from tests.runtime.kernels.panels import PANELS, arranged
from tests.runtime.kernels.walls import NAN, walled

ROWS = 39  # two panels and seven rows


def random_codes(encoding: str, rows: int = ROWS, blocks: int = 3) -> np.ndarray:
    width = blocks * BLOCKS[encoding][1]
    return np.random.default_rng(rows).integers(0, 256, (rows, width), np.uint8)


def run(of: Library, encoding: str, name: str, **fields: int) -> None:
    form = Format.from_address(of.address(format_symbol(encoding)))
    call = of.structure("OrderCall")(**fields)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(getattr(form, name))(ctypes.addressof(call))


def test_a_panel_of_q4_0_by_hand() -> None:
    """Every row has two blocks: byte b of block n is 64 n + b. In row 5 all bits are others."""
    row = [64 * n + b for n in range(2) for b in range(18)]
    rows = np.array([row] * 16, np.uint8)
    rows[5] = 255 - rows[5]
    panels = np.zeros_like(rows)
    Panels().arrange("q4_0", rows.reshape(-1), 0, panels.reshape(-1), 36)
    flat = panels.reshape(-1)
    assert flat[:4].tolist() == [0, 1, 0, 1]  # the scales of rows 0 and 1
    assert flat[10:12].tolist() == [255, 254]  # of row 5
    assert flat[32:40].tolist() == [2, 3, 4, 5] * 2  # the first four codes of rows 0 and 1
    assert flat[32 + 64 :][:4].tolist() == [6, 7, 8, 9]
    assert flat[16 * 18 :][:2].tolist() == [64, 65]  # the second blocks follow the first


@pytest.mark.parametrize("encoding", PANELS)
def test_matrices_are_arranged_and_restored_within_their_memory(encoding: str) -> None:
    codes = random_codes(encoding)
    want = arranged(codes, encoding).reshape(-1)
    for of in LIBRARIES:
        for at_end in (True, False):
            rows, panels = walled(codes.size, at_end), walled(codes.size, at_end)
            rows[:] = codes.reshape(-1)
            sizes = {"row_bytes": codes.shape[1], "panel_rows": ROWS // 16 * 16}
            sizes |= {"rows": rows.ctypes.data, "panels": panels.ctypes.data}
            run(of, encoding, "arrange", **sizes, start=0, stop=codes.size)
            assert (panels == want).all()
            for first, last in ((0, ROWS), (3, 20), (31, 34), (38, 39)):
                rows[:] = NAN
                part = {"start": first * codes.shape[1], "stop": last * codes.shape[1]}
                run(of, encoding, "restore", **sizes, **part)
                n = part["stop"] - part["start"]
                assert (rows[:n] == codes[first:last].reshape(-1)).all()
                assert (rows[n:] == NAN).all()


@pytest.mark.parametrize("encoding", PANELS)
@given(cuts=st.lists(st.integers(0, 1 << 20), max_size=5), order=st.randoms(use_true_random=False))
@settings(max_examples=20)
def test_bytes_find_their_places_in_any_pieces_and_order(encoding, cuts, order) -> None:
    codes = random_codes(encoding)
    data, panels = codes.reshape(-1), np.zeros(codes.size, np.uint8)
    ends = sorted({0, data.size, *(cut % data.size for cut in cuts)})
    pieces = list(pairwise(ends))
    order.shuffle(pieces)
    for start, stop in pieces:
        Panels().arrange(encoding, data[start:stop], start, panels, codes.shape[1])
    assert (panels == arranged(codes, encoding).reshape(-1)).all()
    assert (Panels().restore(encoding, panels, codes.shape[1]) == data).all()


def test_types_whose_products_are_those_of_integers_have_panels() -> None:
    assert {name for name in BLOCKS if has_panels(name)} == {*PANELS}
    assert not has_panels("plain")


def layout_of(rows: int = 32, second: str = "q6_k") -> SlotLayout:
    """Gate and up of the same type, a down projection of another, and something plain between."""
    return SlotLayout.pack(
        [
            ("gate_up_proj", (2 * rows, 18), "uint8"),
            ("bias", (24,), "bfloat16"),
            ("down_proj", (256, BLOCKS[second][1]), "uint8"),
        ],
        {"gate_up_proj": "q4_0", "down_proj": second},
        "bfloat16",
    )


def run_of(source: int, target: int, nbytes: int) -> Copy:
    return Copy(source, target, (1, nbytes), (nbytes, 1), (nbytes, 1), "uint8", "uint8")


def catalog_of(layout: SlotLayout, *copies: Copy) -> Catalog:
    length = sum(copy.nbytes for copy in copies)
    extent = Extent(0, 0, length, copies)
    return Catalog(("file",), ("layer",), (0, 2), (layout,), lambda layer, expert: (extent,))


def test_one_copy_of_a_slot_is_divided_at_its_matrices() -> None:
    layout = layout_of()
    catalog = in_panels(catalog_of(layout, run_of(100, 0, layout.nbytes)))
    (arranged_layout,) = catalog.layouts
    assert [spec.panels for spec in arranged_layout.tensors] == ["q4_0", "", "q6_k"]
    down = layout["down_proj"]
    (extent,) = catalog.extents(1)
    assert [(c.source, c.target, c.nbytes, c.panels, c.shape[1]) for c in extent.copies] == [
        (100, 0, 64 * 18, "q4_0", 18),
        (100 + 64 * 18, 64 * 18, 64, "", 64),
        (100 + down.offset, down.offset, down.nbytes, "q6_k", 210),
    ]
    assert catalog.layouts[0].weight("gate_up_proj").parts[0].panels == "q4_0"
    assert extent.divisible


def test_matrices_without_whole_panels_stay_in_rows() -> None:
    """Gate has 24 rows, up too; the down projection is of a type that is read in rows."""
    layout = layout_of(24, "iq3_s")
    gate, up = run_of(0, 0, 24 * 18), run_of(24 * 18, 24 * 18, 24 * 18)
    down = layout["down_proj"]
    copies = (gate, up, run_of(48 * 18, down.offset, down.nbytes))
    catalog = in_panels(catalog_of(layout, *copies))
    assert catalog.layouts == (layout,)
    assert catalog.extents(0)[0].copies == copies


def test_slots_of_any_chunks_have_panels_and_give_rows() -> None:
    layout = layout_of()
    catalog = in_panels(catalog_of(layout, run_of(0, 0, layout.nbytes)))
    (extent,), data = catalog.extents(0), np.random.default_rng(0).bytes(layout.nbytes)
    data = np.frombuffer(data, np.uint8)
    slots = HostSlots(2, layout.nbytes, panel_order=Panels())
    for start, stop in ((0, 500), (500, 20_000), (20_000, layout.nbytes)):
        slots.write(1, extent.copies, data[start:stop], start)
    for spec in catalog.layouts[0].tensors:
        stored = data[spec.offset :][: spec.nbytes].reshape(spec.shape[0], -1)
        memory = slots.bytes(1)[spec.offset :][: spec.nbytes].reshape(spec.shape[0], -1)
        assert (memory == (arranged(stored, spec.panels) if spec.panels else stored)).all()
        if spec.panels:
            assert slots.tensor(1, spec).numpy().tobytes() == stored.tobytes()


def test_rows_that_alternate_stay_in_rows_and_others_are_arranged() -> None:
    """Gate and up are interleaved row by row, as gpt-oss has them."""
    layout = layout_of()
    rows, down = (32, 18), layout["down_proj"]
    gate, up = (
        Copy(32 * 18 * n, 18 * n, rows, (18, 1), (36, 1), "uint8", "uint8") for n in range(2)
    )
    last = run_of(64 * 18, down.offset, down.nbytes)
    catalog = in_panels(catalog_of(layout, gate, up, last))
    assert [spec.panels for spec in catalog.layouts[0].tensors] == ["", "", "q6_k"]
    assert [copy.panels for copy in catalog.extents(0)[0].copies] == ["", "", "q6_k"]
    assert catalog.extents(0)[0].copies[:2] == (gate, up)
