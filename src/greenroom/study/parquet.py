"""Routing traces as Parquet files, for data frames and databases."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.errors import TraceError
from greenroom.json_file import JsonObject, Malformed, integer, parse
from greenroom.study.libraries import load_library
from greenroom.study.tables import tokens
from greenroom.trace import Trace
from greenroom.trace.container import atomic_file
from greenroom.trace.tensors import checked_meta
from greenroom.trace.trace import smallest_ids

KEY = b"greenroom.trace"  # of the metadata
NEEDED = ("request", "label", "pass", "prefill", "experts")


def save_parquet(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a routing trace as a Parquet file: the table of `tokens`.

    The file's metadata have the number of experts of each layer, and the trace's own. Output norms,
    inputs of gates and predictions are left out. VersionError without pyarrow, OutputError if the
    file cannot be written.
    """
    writer = load_library("pyarrow.parquet", "Parquet files")
    facts = {"experts_per_layer": trace.experts_per_layer.tolist(), "meta": trace.meta}
    table = tokens(trace).replace_schema_metadata({KEY: json.dumps(facts)})
    with atomic_file(Path(path)) as file:
        writer.write_table(table, file)


def load_parquet(path: str | os.PathLike[str]) -> Trace:
    """Read a routing trace from a Parquet file of `save_parquet`.

    VersionError without pyarrow. TraceError if the file cannot be read, or has no such trace.
    """
    reader = load_library("pyarrow.parquet", "Parquet files")
    try:
        table = reader.read_table(path)
        facts = JsonObject(parse((table.schema.metadata or {}).get(KEY, b"null")))
        most = np.array(facts.list_of("experts_per_layer", integer), np.int64)
        if missing := [name for name in NEEDED if name not in table.column_names]:
            raise Malformed(f"the columns {', '.join(missing)} are missing")
        return _trace(table, most, checked_meta(facts.object("meta", {})))
    except MemoryError:
        raise
    except Exception as error:  # a damaged file fails in a dozen ways
        reason = " ".join(str(error).split())[:200]
        raise TraceError(f"{path}: not a routing trace in Parquet: {reason}") from error


def _trace(table: Any, most: NDArray[np.int64], meta: dict[str, Any]) -> Trace:
    """Build a trace from the rows of a Parquet file, a row for each token and layer."""
    layers = most.size
    if not layers or table.num_rows % layers:
        raise Malformed(f"{table.num_rows} rows are not a row for each token and {layers} layers")

    def by_token(name: str) -> NDArray[Any]:
        """Return a column's value of each token."""
        values: NDArray[Any] = table.column(name).combine_chunks().to_numpy(zero_copy_only=False)
        return values[::layers]

    def by_rank(name: str) -> NDArray[Any]:
        """Return a column of lists, [tokens, layers, top_k]."""
        column = table.column(name).combine_chunks()
        flat = column.flatten().to_numpy(zero_copy_only=False)
        ranks: NDArray[Any] = flat.reshape(-1, layers, flat.size // max(table.num_rows, 1))
        return ranks

    requests, passes = _starts(by_token("request")), _starts(by_token("pass"))
    labels = by_token("label")
    names = table.column_names
    return Trace(
        experts=smallest_ids(by_rank("experts")),
        experts_per_layer=most,
        request_starts=requests,
        pass_starts=passes,
        pass_prefill=by_token("prefill")[passes[:-1]].astype(np.bool_),
        labels=tuple(str(labels[start]) for start, _ in pairwise(requests.tolist())),
        weights=by_rank("weights").astype(np.float16) if "weights" in names else None,
        token_ids=by_token("token_id").astype(np.int32) if "token_id" in names else None,
        meta=meta,
    )


def _starts(numbers: NDArray[Any]) -> NDArray[np.int64]:
    """Return where runs of one number begin, then the number of values."""
    changes = np.flatnonzero(np.diff(numbers)) + 1
    return np.concatenate([[0], changes, [numbers.size]]).astype(np.int64)
