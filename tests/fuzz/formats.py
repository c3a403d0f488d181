"""Every file format that Greenroom reads: valid files of it, and what reads them.

`split` takes a file apart into its JSON texts and other pieces; `join` puts changed pieces
together, with lengths and checksums right, so that a change reaches what is behind them.
"""

from __future__ import annotations

import json
import os
import warnings
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from greenroom.json_file import Malformed, parse

Pieces = tuple[list[bytes], list[bytes]]  # JSON texts, others


@dataclass(frozen=True)
class Format:
    """`make` writes valid files below a folder and returns their contents; `read` reads a file of
    which these are the bytes, in a folder of its own, and fails only by GreenroomError. `split` and
    `join` may fail by any error."""

    make: Callable[[], list[bytes]]
    read: Callable[[bytes, Path], Any]
    split: Callable[[bytes], Pieces] | None = None
    join: Callable[[Pieces], bytes] | None = None
    weight: int = 1  # its share of the time of all formats


def plain(data: bytes) -> Pieces:
    """A file that is one JSON text."""
    return [data], []


def plain_join(pieces: Pieces) -> bytes:
    return pieces[0][0]


def lines(data: bytes) -> Pieces:
    """A file with a JSON text on each line."""
    return data.split(b"\n"), []


def lines_join(pieces: Pieces) -> bytes:
    return b"\n".join(pieces[0])


def safetensors(data: bytes) -> Pieces:
    """The header, and the JSON texts that its metadata hold in strings; the data."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    inner = {k: v for k, v in header.get("__metadata__", {}).items() if v[:1] in ("{", "[")}
    for key in inner:
        header["__metadata__"][key] = ""
    order = json.dumps(list(inner)).encode()
    return [json.dumps(header).encode(), *(v.encode() for v in inner.values())], [
        data[8 + size :],
        order,
    ]


def safetensors_join(pieces: Pieces) -> bytes:
    (header, *inner), (data, order) = pieces
    for name, text in zip(json.loads(order), inner, strict=True):
        quoted = json.dumps(text.decode(errors="surrogatepass")).encode()
        header = header.replace(
            json.dumps(name).encode() + b': ""', json.dumps(name).encode() + b": " + quoted
        )
    return len(header).to_bytes(8, "little") + header + data


def records(data: bytes) -> Pieces:
    """A recording's journal: the JSON and the arrays of each record."""
    texts, arrays, at = [], [], 4
    while at < len(data):
        a, b = (int.from_bytes(data[at + i : at + i + 4], "little") for i in (0, 4))
        texts.append(data[at + 8 : at + 8 + a])
        arrays.append(data[at + 8 + a : at + 8 + a + b])
        at += 12 + a + b
    return texts, arrays


def records_join(pieces: Pieces) -> bytes:
    made = b"GRTJ"
    for text, data in zip(*pieces, strict=True):
        check = zlib.crc32(data, zlib.crc32(text)).to_bytes(4, "little")
        made += (
            len(text).to_bytes(4, "little") + len(data).to_bytes(4, "little") + text + data + check
        )
    return made


def members(data: bytes) -> Pieces:
    """The arrays of an npz, as files of NumPy's; their names come last."""
    with zipfile.ZipFile(BytesIO(data)) as archive:
        names = archive.namelist()
        return [], [*(archive.read(name) for name in names), json.dumps(names).encode()]


def members_join(pieces: Pieces) -> bytes:
    *contents, listed = pieces[1]
    names = parse(listed)
    if not isinstance(names, list) or not all(isinstance(n, str) and len(n) < 99 for n in names):
        raise Malformed("no names of members")
    made = BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        warnings.simplefilter("ignore")  # the same name twice is meant
        for name, content in zip(names, contents, strict=True):
            archive.writestr(name, content)
    return made.getvalue()


def saved(name: str, data: bytes, folder: Path) -> Path:
    """A file of these bytes."""
    path = folder / name
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return path


# ---- traces


def _trace() -> Any:
    from greenroom.trace import GateInputs, Prediction, Trace

    random = np.random.default_rng(1)
    experts = np.array([[random.permutation(n)[:2] for n in (4, 3)] for _ in range(10)], np.uint8)
    return Trace(
        experts,
        np.array([4, 3]),
        np.array([0, 7, 10]),
        np.array([0, 4, 5, 6, 7, 10]),
        np.array([True, False, False, False, True]),
        ("a", "b"),
        random.random(experts.shape).astype(np.float16),
        np.arange(10, dtype=np.int32),
        GateInputs(np.array([1, 5]), np.ones((2, 2, 3), np.float32)),
        {"last": Prediction(experts.copy(), 1)},
        {"model": "m", "expert_bytes": 4096, "fingerprint": "f"},
        np.ones(experts.shape, np.float32),
        np.ones((10, 2), np.float32),
    )


def _trace_files() -> list[bytes]:
    from greenroom.trace import save

    return _written(lambda path: save(_trace(), path))


def _journal_files() -> list[bytes]:
    from tests.trace.test_journal import SEGMENTS, segment, write

    made = _written(lambda path: write(path, SEGMENTS))
    return made + _written(
        lambda path: write(path, [*SEGMENTS, segment(2, [(2, False)], last=False)])
    )


def _npz_files() -> list[bytes]:
    from tests.trace.test_file import write_npz

    more = {"weights": np.ones((5, 2, 2)), "token_ids": np.arange(5)}
    return _written(lambda path: write_npz(path, **more)) + _written(
        lambda path: write_npz(path, phase=np.array("prefill"), labels=None)
    )


def _written(write: Callable[[Path], object], name: str = "file.npz") -> list[bytes]:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        write(Path(folder) / name)
        return [(Path(folder) / name).read_bytes()]


def read_trace(data: bytes, folder: Path) -> None:
    from greenroom.trace import load, stream

    path = saved("trace", data, folder)
    trace = load(path)
    trace.select([trace.requests - 1])
    trace.head(1)
    if trace.tokens < 1000:
        stream(trace, "runtime")
    if data[:4] == b"GRTJ":
        from greenroom.trace.journal import convert

        convert(path, folder / "converted")
        load(folder / "converted")


def _published(name: str) -> Callable[[], list[bytes]]:
    def make() -> list[bytes]:
        from tests.study.test_published import WRITERS

        return _written(WRITERS[name][0])

    return make


def read_published(name: str) -> Callable[[bytes, Path], None]:
    """A reader of a published recording that is one file."""

    def read(data: bytes, folder: Path) -> None:
        from greenroom.study import FORMATS, load_published

        file = saved("file.npz", data, folder).name
        experts = 4 if FORMATS[name].experts is None else None
        load_published(name, folder, files=[file], experts=experts)

    return read


def _parquet() -> list[bytes]:
    from greenroom.study import save_parquet

    return _written(lambda path: save_parquet(_trace(), path))


def read_parquet(data: bytes, folder: Path) -> None:
    from greenroom.study import load_parquet

    load_parquet(saved("trace.parquet", data, folder))


def _flame() -> list[bytes]:
    import pyarrow as pa
    from pyarrow import parquet

    rows = {"indices": [[0, 3], [2, 1], [1, 0]], "scores": [[0.5, 0.5], [0.25, 0.75], [0.0, 1.0]]}
    return _written(lambda path: parquet.write_table(pa.table(rows), path))


def read_flame(data: bytes, folder: Path) -> None:
    from greenroom.study import load_published

    for layer in (2, 3):
        saved(f"layer_{layer:02}.parquet", data, folder)
    load_published("flame-moe", folder)


# ---- JSON of our own


def _profile() -> list[bytes]:
    from tests.core.test_machine import MACHINE

    found = MACHINE.as_json()
    found["host"] = {"cpu": "x", "cores": 2, "memory_bytes": 2**33, "load": 0.1}
    return [json.dumps(found).encode()]


def read_profile(data: bytes, folder: Path) -> None:
    from greenroom.core.machine import Machine, machine_name

    machine = Machine.load(saved("machine.json", data, folder))
    machine_name(machine.host)
    machine.costs(3 << 20, 1 << 20)
    machine.as_json()


def _pins() -> list[bytes]:
    tasks = {
        name: {"experts": [[0, 3], [1]], "pattern": [[0.5, 0, 0, 0.5], [0, 1.0, 0]]}
        for name in ("coding", "prose")
    }
    return [json.dumps({"format": "greenroom-pins", "version": 1, "tasks": tasks}).encode()]


def read_pins(data: bytes, folder: Path) -> None:
    from greenroom.core.cache.pins import Pins

    pins = Pins.load(saved("pins.json", data, folder), [0, 4, 7])
    _ = pins.first
    pins.nearest(np.ones(7))
    pins.as_json()


def _budgets() -> list[bytes]:
    found = {"format": "greenroom-budgets", "version": 1, "slots": [2, 1], "split": [0.5, 1]}
    return [json.dumps(found).encode()]


def read_budgets(data: bytes, folder: Path) -> None:
    from greenroom.config import scope_of, split_of

    path = str(saved("budgets.json", data, folder))
    scope_of(path)
    split_of(path)


def _plans() -> list[bytes]:
    settings = [
        {"capacity": 64, "options": {"policy": "lru", "prefetch": "off", "scope": "2,1"},
         "by": by, "tpot": 0.1, "plain": 0.2, "when": "2026-01-01"}
        for by in ("tune", "quick")
    ]  # fmt: skip
    run = {"seconds": 0.1, "stall": 0.05, "fetched": 2.0, "carried": 1e9, "busy": 1.0}
    loss = dict.fromkeys(("low", "skip", "substitute", "inexact", "kl"), 0.1)
    loss |= {
        "precision": "int4",
        "perplexity": 9.0,
        "exact_perplexity": 8.0,
        "tokens": 7,
        "when": "",
    }
    entry = {"runs": [run], "settings": settings, "loads": [10**9], "losses": [loss]}
    found = {"format": "greenroom-kept", "version": 1, "machines": {"one": entry}}
    return [json.dumps(found).encode()]


def read_plans(data: bytes, folder: Path) -> None:
    """A cache: whatever cannot be read is as if it were not there."""
    from greenroom.plan.history.files import load_records, records_path, update_records

    with _cache(folder):
        path = records_path("abc")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        known = _quietly(lambda: load_records("abc", "one"))
        _quietly(lambda: known.nearest(64))
        update_records("abc", "two", lambda _: known)


def _quietly(call: Callable[[], Any]) -> Any:
    """What must not fail, not even by an error of ours."""
    from greenroom.errors import GreenroomError

    try:
        return call()
    except GreenroomError as error:
        raise AssertionError("a damaged cache must be ignored") from error


class _cache:  # noqa: N801
    """The user's cache folder is this one, and is switched on."""

    def __init__(self, folder: Path) -> None:
        self.wanted = {"XDG_CACHE_HOME": str(folder), "GREENROOM_LEARNED": "on"}

    def __enter__(self) -> None:
        self.before = {name: os.environ.get(name) for name in self.wanted}
        os.environ.update(self.wanted)

    def __exit__(self, *_: object) -> None:
        for name, value in self.before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _prompts() -> list[bytes]:
    rows: list[Any] = [
        {"prompt": "Once", "label": "a"},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
    ]
    return ["\n".join(map(json.dumps, rows)).encode()]


def read_prompts(data: bytes, folder: Path) -> None:
    from greenroom.trace.prompts import read_prompts

    read_prompts(saved("prompts.jsonl", data, folder))
    read_prompts(saved("prompts.txt", data, folder))


# ---- learned


def _predictor() -> list[bytes]:
    from greenroom.plan.history.files import save_predictor

    tensors: dict[str, Any] = {"distance": np.ones(1, np.int64)}
    for layer, experts in ((1, 4), (2, 3)):
        tensors |= {
            f"{layer}.up.weight": np.ones((8, 6), np.float32),
            f"{layer}.up.bias": np.ones(8, np.float32),
            f"{layer}.down.weight": np.ones((experts, 8), np.float32),
            f"{layer}.down.bias": np.ones(experts, np.float32),
        }
    return _written(lambda path: save_predictor(path, tensors, "f", {"model": "m"}))


def read_predictor(data: bytes, folder: Path) -> None:
    from greenroom.core.predictor import Shape
    from greenroom.plan.history.files import load_predictor
    from greenroom.predictors.learned import networks_of

    tensors = load_predictor(saved("predictor", data, folder), "f")
    networks_of(tensors, Shape((4, 4, 3), 2))


def _learned() -> list[bytes]:
    from safetensors.numpy import save

    from greenroom.plan.history.files import LIMIT, ROUTING, checksum
    from greenroom.plan.history.routing import RoutingHistory

    state = {
        "experts": np.zeros((2, 2, 1), np.int64),
        "lengths": np.array([1, 1]),
        "requests": np.array([0, 1]),
        "prompts": np.array([1, 0], np.uint8),
    }
    made = RoutingHistory(np.array([1, 0]), np.ones(7), {"recent": state, "popularity": {}})
    arrays = dict(made.arrays(LIMIT))
    words = {"format": ROUTING.name, "version": str(ROUTING.version), "fingerprint": "abc"}
    return [save(arrays, {**words, "crc32": checksum(arrays)})]


def learned_join(pieces: Pieces) -> bytes:
    """With the checksum of what the changed header says, where that can be read at all."""
    from greenroom.plan.history.files import checksum
    from greenroom.trace.container import DTYPES

    unfit = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
    with suppress(*unfit):
        header, arrays = json.loads(pieces[0][0]), {}
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                raw = np.frombuffer(pieces[1][0][begin:end], DTYPES[entry["dtype"]])
                arrays[name] = raw.reshape(entry["shape"])
        header["__metadata__"]["crc32"] = checksum(arrays)
        pieces = [json.dumps(header).encode(), *pieces[0][1:]], pieces[1]
    return safetensors_join(pieces)


def read_learned(data: bytes, folder: Path) -> None:
    """A cache too."""
    from greenroom.plan.history.files import load_routing, routing_path
    from greenroom.plan.history.recent import recent_trace

    with _cache(folder):
        path = routing_path("abc")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        known = _quietly(lambda: load_routing("abc"))
        if known is not None:
            _quietly(lambda: known.hot_set([0, 4, 7], 3))
            _quietly(lambda: recent_trace(known, [4, 3]))


# ---- timelines


def _timelines() -> list[bytes]:
    from greenroom.core.events import ComputeGroup, StartChunk
    from greenroom.runtime.driver.timeline import Timeline

    timeline = Timeline(experts_per_layer=(4, 3))
    at = timeline.origin
    for piece, layer in ((1, 0), (5, 1)):
        chunk = StartChunk(0, piece, layer, 0, 0, -1, layer == 0, -1, True)
        timeline.add_chunk("disk -> host", chunk, at, at + 0.1)
        timeline.add_stall(layer, "miss", at, at + 0.1)
        timeline.add_group(layer, ComputeGroup(np.array([piece]), np.array([layer])), at + 0.1)
    timeline.add_span("passes", "prompt", at, at + 0.2)
    timeline.add_span("passes", "token", at + 0.2, at + 0.3)
    return _written(timeline.save)


def read_timeline(data: bytes, folder: Path) -> None:
    from greenroom.server.page.timeline_frames import timeline_frames

    json.dumps(timeline_frames(saved("timeline.json", data, folder), "run"), allow_nan=False)


# ---- the prompt cache


def _segments() -> list[bytes]:
    from tempfile import TemporaryDirectory

    from greenroom.server.engine.prompts.segment import write_segment
    from tests.server.engine.prompts.conftest import make_segment

    made = []
    with TemporaryDirectory() as folder:
        for ids, begin, parent in ((range(20), 0, ""), (range(32), 64, "ab" * 16)):
            segment, data = make_segment(ids, begin, parent)
            write_segment(Path(folder), segment, data)
            made.append((Path(folder) / segment.file_name).read_bytes())
    return made


def read_prompt_segment(data: bytes, folder: Path) -> None:
    """Under the name that the file should have by its own header, where that can be read at all."""
    import hashlib

    from greenroom.server.engine.prompts.segment import read_data, read_segment

    name = f"{'0' * 16}-{0:08d}-{'0' * 32}.safetensors"
    with suppress(ArithmeticError, LookupError, ValueError, TypeError, RecursionError):
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        meta, count = header["__metadata__"], header["ids"]["shape"][0]
        digest = hashlib.blake2b(data[: 8 + size + 4 * count], digest_size=16).hexdigest()
        if str(meta["key"])[:16].isalnum():
            name = f"{str(meta['key'])[:16]}-{int(meta['begin']):08d}-{digest}.safetensors"[:200]
    path = saved(name, data, folder)
    try:
        read_data(path, read_segment(path), np.empty(1 << 16, np.uint8), lambda: None)
    finally:
        path.unlink()


OWN = {
    "trace": Format(_trace_files, read_trace, safetensors, safetensors_join),
    "journal": Format(_journal_files, read_trace, records, records_join),
    "npz": Format(_npz_files, read_trace, members, members_join),
    "parquet": Format(_parquet, read_parquet),
    "published-parquet": Format(_flame, read_flame),
    "profile": Format(_profile, read_profile, plain, plain_join),
    "pins": Format(_pins, read_pins, plain, plain_join),
    "budgets": Format(_budgets, read_budgets, plain, plain_join),
    "plans": Format(_plans, read_plans, plain, plain_join),
    "prompts": Format(_prompts, read_prompts, lines, lines_join),
    "predictor": Format(_predictor, read_predictor, safetensors, safetensors_join),
    "learned": Format(_learned, read_learned, safetensors, learned_join),
    "timeline": Format(_timelines, read_timeline, plain, plain_join),
    "segment": Format(_segments, read_prompt_segment, safetensors, safetensors_join),
    "published-csv": Format(_published("moe-beyond"), read_published("moe-beyond")),
    "published-npz": Format(
        _published("olmoe-residency"), read_published("olmoe-residency"), members, members_join
    ),
    **{
        f"published-{name}": Format(_published(name), read_published(name), plain, plain_join)
        for name in ("expert-fingerprinting", "expert-selection")
    },
}
