"""Import of routing recordings that others have published, in their own formats.

docs/trace-format.md has the sources, the folders and the licences.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.errors import GreenroomError, TraceError, UnknownName, UsageError
from greenroom.json_file import parse
from greenroom.study.libraries import load_library
from greenroom.trace import Trace
from greenroom.trace.npz import read_arrays
from greenroom.trace.trace import MOST_EXPERTS, smallest_ids, starts_of

LONGEST = 1 << 30  # bytes of a JSON file
EVENTS = ("layer_index", "requested_expert_ids", "router_weights", "token_id")  # of an npz file
SEQUENCE = 2048  # tokens of a sequence of FLAME-MoE's training


@dataclass(frozen=True)
class PublishedRequest:
    """One request of a published recording.

    experts:  ids within their layer, [tokens, layers, top_k]
    prompt:   how many of the first tokens are one forward pass; each other token is a pass
    weights:  gate weights, like `experts`, or None
    token_ids: vocabulary ids of the tokens, or None
    """

    experts: NDArray[Any]
    prompt: int = 0
    weights: NDArray[np.float16] | None = None
    token_ids: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class PublishedFormat:
    """One format of published routing recordings.

    source:  where the recording is
    model:   the recorded model; None: several
    experts: how many experts each layer has; None: the user says it
    files:   pattern of the files in the folder
    read:    returns the requests of one file
    """

    source: str
    model: str | None
    experts: int | None
    files: str
    read: Callable[[Path], Iterable[PublishedRequest]]


def load_published(
    name: str,
    folder: str | os.PathLike[str],
    *,
    files: Sequence[str] | None = None,
    experts: int | None = None,
    limit: int | None = None,
) -> Trace:
    """Read a published routing recording as a trace.

    name:    the format, one of `FORMATS`
    folder:  the published folder
    files:   paths below the folder, in this order; None: all that the format knows, sorted
    experts: experts of each layer, where the format does not say it
    limit:   stop after the request with this token

    Labels of requests are the files' folders. UnknownName for another format, UsageError where
    `experts` is missing or not needed, TraceError if a file is not in the format.
    """
    if name not in FORMATS:
        raise UnknownName("format", name, FORMATS)
    layout, folder = FORMATS[name], Path(folder)
    if layout.experts is None and experts is None:
        raise UsageError(f"format {name}: give experts, the number of experts of a layer")
    if layout.experts is not None and experts is not None:
        raise UsageError(f"format {name}: leave out experts, its layers have {layout.experts}")
    names = _files(layout, folder) if files is None else files
    if not names:
        raise TraceError(f"{folder}: there are no files {layout.files} of the format {name}")
    requests, labels, tokens = [], [], 0
    for file in names:
        for request in _read(layout, folder / file):
            requests.append(request)
            labels.append(Path(file).parent.as_posix().removeprefix("."))
            tokens += len(request.experts)
            if limit is not None and tokens >= limit:
                break
        if limit is not None and tokens >= limit:
            break
    meta = {"model": layout.model or folder.name, "provenance": layout.source}
    return _trace(requests, labels, experts or layout.experts or 0, meta, folder)


def _files(layout: PublishedFormat, folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.glob(layout.files))


def _read(layout: PublishedFormat, path: Path) -> Iterator[PublishedRequest]:
    """Read the requests of one file, and check the shapes of their arrays."""
    try:
        for request in layout.read(path):
            if request.experts.ndim != 3 or not request.experts.size:
                raise ValueError(f"the experts have the shape {list(request.experts.shape)}")
            yield request
    except GreenroomError:
        raise
    except Exception as error:  # a file of another format fails in a dozen ways
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise TraceError(f"{path}: not a recording of this format: {reason}") from error


def _trace(
    requests: Sequence[PublishedRequest],
    labels: Sequence[str],
    experts: int,
    meta: dict[str, Any],
    folder: Path,
) -> Trace:
    if not requests:
        raise TraceError(f"{folder}: the files have no requests")
    shapes = {request.experts.shape[1:] for request in requests}
    if len(shapes) > 1:
        layers = sorted(f"{a} layers, top-{b}" for a, b in shapes)
        raise TraceError(f"{folder}: the files are of several models: {'; '.join(layers)}")
    (shape,) = shapes
    lengths: list[int] = []
    prefill: list[bool] = []
    for request in requests:
        prompt = request.prompt
        lengths += [*([prompt] if prompt else []), *[1] * (len(request.experts) - prompt)]
        prefill += [*([True] if prompt else []), *[False] * (len(request.experts) - prompt)]

    def joined(field: str) -> Any:
        """Join an optional array of all requests; None if a request lacks it."""
        arrays = [getattr(request, field) for request in requests]
        return None if any(array is None for array in arrays) else np.concatenate(arrays)

    return Trace(
        experts=smallest_ids(joined("experts")),
        experts_per_layer=np.full(shape[0], experts, np.int64),
        request_starts=starts_of(np.array([len(request.experts) for request in requests])),
        pass_starts=starts_of(np.array(lengths)),
        pass_prefill=np.array(prefill, np.bool_),
        labels=tuple(labels),
        weights=joined("weights"),
        token_ids=joined("token_ids"),
        meta=meta,
    )


def _ids(values: Any) -> NDArray[Any]:
    """Convert expert ids to an array of the smallest type; ValueError for other numbers."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= MOST_EXPERTS:
        raise ValueError(f"expert ids must be whole numbers from 0 to {MOST_EXPERTS - 1}")
    return smallest_ids(array)


def _halves(values: Any) -> NDArray[np.float16]:
    """Convert gate weights to float16; beyond its range they are infinite."""
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float64).astype(np.float16)


def _moe_beyond(path: Path) -> Iterable[PublishedRequest]:
    """Read a CSV file of MoE-Beyond: a row for each layer and token, layers counted from 1."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    layers: dict[int, list[Any]] = {}
    for row in rows:
        layers.setdefault(int(row["Layer ID"]), []).append(parse(row["Activated Expert IDs"]))
    experts = _ids([layers[layer] for layer in sorted(layers)]).transpose(1, 0, 2)
    yield PublishedRequest(np.ascontiguousarray(experts), prompt=len(experts))


def _fingerprinting(path: Path) -> Iterable[PublishedRequest]:
    """Read an example of GPT-OSS-MoE-ExpertFingerprinting: routing of each generated token."""
    passes = [next(iter(each.values())) for each in _json(path)["router_data"]]

    def by_layer(field: str) -> list[list[Any]]:
        return [[each[f"layer_{layer}"][field] for layer in range(len(each))] for each in passes]

    weights = _halves(by_layer("selected_probs"))
    yield PublishedRequest(_ids(by_layer("selected_experts")), weights=weights)


def _residency(path: Path) -> Iterable[PublishedRequest]:
    """Read a sequence of the OLMoE residency study: an event for each token and layer."""
    arrays = read_arrays(path, EVENTS)
    layer, ids = arrays["layer_index"], _ids(arrays["requested_expert_ids"])
    if layer.dtype.kind not in "iu" or not 0 <= layer.max() < layer.size or ids.ndim != 2:
        raise ValueError("the events have no layers or no experts")
    layers, top_k = int(layer.max()) + 1, ids.shape[1]
    if not np.array_equal(layer, np.tile(np.arange(layers), layer.size // layers)):
        raise ValueError("the events are not one for each token and layer")
    yield PublishedRequest(
        ids.reshape(-1, layers, top_k),
        weights=_halves(arrays["router_weights"]).reshape(-1, layers, top_k),
        token_ids=arrays["token_id"][::layers].astype(np.int32),
    )


def _expert_selection(path: Path) -> Iterable[PublishedRequest]:
    """Read a request of MoE_expert_selection_trace: the prompt's pass, then one for each token.

    A pass is an object: layers by number, each null (a dense layer), [tokens][top_k], or an object
    with this as `selected_experts`.
    """
    passes = []
    for each in _json(path):
        layers = {int(name): value for name, value in each.items() if value is not None}
        chosen = [layers[layer] for layer in sorted(layers)]
        chosen = [v["selected_experts"] if isinstance(v, dict) else v for v in chosen]
        passes.append(_ids(chosen).transpose(1, 0, 2))
    if any(len(each) != 1 for each in passes[1:]):
        raise ValueError("a pass after the first one has several tokens")
    yield PublishedRequest(np.concatenate(passes), prompt=len(passes[0]))


def _flame(path: Path) -> Iterable[PublishedRequest]:
    """Read a checkpoint of FLAME-MoE-Traces, of which `path` is the first layer's file.

    The other layers are the other files of its folder. Each 2,048 tokens are one request.
    """
    reader = load_library("pyarrow.parquet", "Parquet files")
    columns = ["indices", "scores"]
    layers = [
        reader.ParquetFile(each).iter_batches(SEQUENCE, columns=columns)
        for each in sorted(path.parent.glob("layer_*.parquet"))
    ]
    for batches in zip(*layers, strict=True):
        ids, scores = ([_rows(batch.column(c)) for batch in batches] for c in columns)
        experts = _ids(np.stack(ids, axis=1))
        weights = _halves(np.stack(scores, axis=1))
        yield PublishedRequest(experts, prompt=len(experts), weights=weights)


def _rows(column: Any) -> NDArray[Any]:
    """Return a column of lists of one length as an array [rows, length]."""
    flat: NDArray[Any] = column.flatten().to_numpy(zero_copy_only=False)
    return flat.reshape(len(column), -1)


def _json(path: Path) -> Any:
    return parse(path.read_bytes(), LONGEST)


FORMATS: dict[str, PublishedFormat] = {
    "moe-beyond": PublishedFormat(
        "github.com/ngavhane/moe-beyond", "DeepSeek-V2-Lite-Chat", 64, "**/prompt_*_data.csv",
        _moe_beyond,
    ),
    "expert-fingerprinting": PublishedFormat(
        "github.com/AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting", "gpt-oss-20b", 32,
        "**/*_examples.json", _fingerprinting,
    ),
    "olmoe-residency": PublishedFormat(
        "github.com/helloimrizy-pages/opt, stage3_residency/traces", "OLMoE-1B-7B-0924", 64,
        "**/sequence_*.npz", _residency,
    ),
    "expert-selection": PublishedFormat(
        "huggingface.co/datasets/core12345/MoE_expert_selection_trace", None, None, "**/*.json",
        _expert_selection,
    ),
    "flame-moe": PublishedFormat(
        "huggingface.co/datasets/CMU-FLAME/FLAME-MoE-Traces", "FLAME-MoE", 64,
        "layer_02.parquet", _flame,
    ),
}  # fmt: skip
