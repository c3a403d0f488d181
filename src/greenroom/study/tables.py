"""Arrow tables of routing traces, eviction policies and simulation results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from greenroom.policies import POLICIES
from greenroom.study.libraries import load_library
from greenroom.trace import Trace
from greenroom.trace.tensors import number_labels

if TYPE_CHECKING:
    import pyarrow as pa


def table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Make an Arrow table of simulation results: a row for each policy, predictor and capacity.

    `rows` is what `simulate` returns, or several of them joined. The columns are the fields of
    `greenroom simulate --json`; a field that a result lacks is null.
    """
    pa = load_library("pyarrow", "tables")
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: [row.get(name) for row in rows] for name in names})


def policies() -> pa.Table:
    """Make an Arrow table of Greenroom's eviction policies.

    name:    as `simulate` takes it
    online:  whether a run can use it; others must know the whole trace
    weighs:  whether it reads gate weights and numbers of tokens
    options: names and default values, as they follow the name
    """
    pa = load_library("pyarrow", "tables")
    return pa.table({
        "name": list(POLICIES),
        "online": [not each.needs_trace for each in POLICIES.values()],
        "weighs": [each.weighs for each in POLICIES.values()],
        "options": [
            ",".join(f"{option.name}={option.default}" for option in each.options)
            for each in POLICIES.values()
        ],
    })  # fmt: skip


def tokens(trace: Trace) -> pa.Table:
    """Make an Arrow table of a routing trace: a row for each token and layer, in this order.

    request, label:    number and label of the request
    pass, prefill:     number of the forward pass, and whether it computes a part of the prompt
    token, layer:      numbers of the token and of the MoE layer
    token_id:          of the vocabulary, if recorded
    experts, weights:  the experts that the token used, and their gate weights, if recorded
    """
    pa = load_library("pyarrow", "tables")
    layers = trace.layers
    lengths = np.diff(trace.pass_starts)

    def per_row(values: NDArray[Any]) -> NDArray[Any]:
        """Repeat a value of each forward pass for its tokens and layers."""
        return np.repeat(np.repeat(values, lengths), layers)

    labels, numbers = number_labels(trace.labels)
    columns = {
        "request": per_row(trace.pass_requests.astype(np.int32)),
        "label": pa.DictionaryArray.from_arrays(per_row(numbers[trace.pass_requests]), labels),
        "pass": per_row(np.arange(trace.passes)),
        "prefill": per_row(trace.pass_prefill),
        "token": np.repeat(np.arange(trace.tokens), layers),
        "layer": np.tile(np.arange(layers, dtype=np.int32), trace.tokens),
    }
    if trace.token_ids is not None:
        columns["token_id"] = np.repeat(trace.token_ids, layers)
    for name, values in (("experts", trace.experts), ("weights", trace.weights)):
        if values is not None:
            flat = pa.array(np.ascontiguousarray(values).reshape(-1))
            columns[name] = pa.FixedSizeListArray.from_arrays(flat, trace.top_k)
    return pa.table(columns)
