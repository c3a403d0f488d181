"""Record which experts a loaded model's routers choose while it answers prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from greenroom.config import RecordConfig, SamplingConfig
from greenroom.core.layout import Catalog
from greenroom.errors import UsageError
from greenroom.hf.attach.predictors import ModelPredictors, build_predictors
from greenroom.hf.attach.shared import containers
from greenroom.hf.text.generate import answer, encode
from greenroom.runtime.kernels.dense.stored import stored_matrix, weight_matrix
from greenroom.runtime.kernels.dense.table import table_of
from greenroom.runtime.recording.forecasts import ForecastRecorder, distance_of, parse_predictors
from greenroom.runtime.recording.outputs import OutputProbe, check_kernels
from greenroom.runtime.recording.recorder import Recorder, SegmentSink
from greenroom.trace.journal import Journal, journal_path
from greenroom.trace.prompts import Prompt
from greenroom.trace.segments import Header


def record(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    path: Path,
    *,
    sampling: SamplingConfig,
    recording: RecordConfig,
    name: str,
    on_request: Callable[[int, int], None] = lambda done, tokens: None,
) -> int:
    """Answer every prompt, and write the routers' choices to the trace file `path`.

    Returns the number of tokens that this call recorded. Of an encoder-decoder model, only the
    decoder is recorded. The trace grows in a journal file in the folder of `path`. If an unfinished
    journal of the same arguments is there, it is continued. `on_request(done, tokens)` is called at
    the start with the number of prompts that the journal has, and after every prompt. Raises
    UsageError, before the first answer, if a prompt does not fit into the context.
    """
    setup, catalog = model.greenroom.setup, model.greenroom.setup.catalog
    context = setup.context
    lengths = _prompt_tokens(tokenizer, prompts, recording.raw, context)
    encoded = model.config.is_encoder_decoder
    skipped = _encoders(model, catalog) if encoded else 0
    predictors = build_predictors(
        model, catalog, parse_predictors(recording.predict) if recording.predict else [],
        file=setup.predictor, fingerprint=setup.fingerprint, inputs=recording.gate_inputs > 0,
    )  # fmt: skip
    about = {**_sizes(model), "fingerprint": setup.fingerprint}
    header = Header(
        predictors.shape.experts_per_layer[skipped:],
        recording.weights,
        recording.token_ids,
        recording.gate_inputs,
        {**_meta(name, prompts, sampling, recording), **about},
        {name: distance_of(each) for name, each in predictors.predictors.items()},
        recording.output_norms,
    )
    if recording.output_norms:
        check_kernels([model.get_submodule(name) for name in catalog.layers])
    journal = Journal(journal_path(path), header)
    try:
        on_request(journal.requests, 0)
        with recorder_of(model, catalog, journal, predictors, skipped) as recorder:
            for number in range(journal.requests, len(prompts)):
                prompt = prompts[number]
                prefill = 1 if encoded else lengths[number]  # the decoder's start token
                with recorder.request(number, prompt.label, prefill):
                    answer(
                        model, tokenizer, prompt.content, sampling, raw=recording.raw,
                        context=context,
                    )  # fmt: skip
                on_request(number + 1, recorder.tokens)
            journal.finish(path)
            return recorder.tokens
    finally:
        journal.close()


def _prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], raw: bool, context: int
) -> list[int]:
    """Return the number of tokens of each prompt; UsageError if one is too long."""
    lengths = [encode(tokenizer, prompt.content, raw).shape[1] for prompt in prompts]
    if (longest := max(lengths)) + 1 > context:
        raise UsageError(
            f"prompt {lengths.index(longest) + 1} has {longest} tokens, which leaves no room for an"
            f" answer in --context {context}: raise --context, or shorten the prompt"
        )
    return lengths


def recorder_of(
    model: PreTrainedModel,
    catalog: Catalog,
    sink: SegmentSink,
    predictors: ModelPredictors,
    skipped: int = 0,
) -> Recorder:
    """Make a recorder of the routers' and predictors' choices in a model's MoE layers.

    The first `skipped` layers are not recorded. The recorder writes to `sink`, such as a journal.
    """
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model
    modules = [model.get_submodule(name) for name in catalog.layers[skipped:]]
    forecasts = None
    if predictors.predictors:
        forecasts = ForecastRecorder(predictors.predictors, predictors.shape)
    outputs = None
    if sink.header.output_norms:
        outputs = OutputProbe(modules, [_neighbours(model, n) for n in catalog.layers[skipped:]])
    inputs = predictors.capture_inputs()
    return Recorder(modules, decoder.get_input_embeddings(), sink, 0, inputs, forecasts, outputs)


def _neighbours(model: PreTrainedModel, experts: str) -> list[nn.Module]:
    """Return the modules beside an experts module, and beside what contains it in its layer."""
    around = {experts, *containers(experts)}
    return [
        module
        for name in containers(experts)
        for child, module in model.get_submodule(name).named_children()
        if f"{name}.{child}" not in around
    ]


def _encoders(model: PreTrainedModel, catalog: Catalog) -> int:
    """Count the MoE layers in a model's encoder, which come first."""
    inside = {id(module) for module in model.get_encoder().modules()}
    return sum(id(model.get_submodule(name)) in inside for name in catalog.layers)


def _sizes(model: PreTrainedModel) -> dict[str, int]:
    """Return the mean bytes of an expert, and of a layer's other weights, for simulations.

    The input embedding does not count, since a token reads one row of it.
    """
    catalog = model.greenroom.setup.catalog
    inputs, head = model.get_input_embeddings(), model.get_output_embeddings()
    embedding = table_of(inputs) or weight_matrix(inputs)
    stored = {each for module in model.modules() if (each := stored_matrix(module)) is not None}
    dense = sum(matrix.nbytes for matrix in (*model.parameters(), *stored))
    if head is None or weight_matrix(head) is not embedding:
        dense -= embedding.nbytes
    return {
        "expert_bytes": catalog.all_experts_bytes // catalog.experts,
        "dense_bytes": dense // len(catalog.layers),
    }


def _meta(
    name: str, prompts: Sequence[Prompt], sampling: SamplingConfig, recording: RecordConfig
) -> dict[str, Any]:
    """Return a trace's metadata; a journal is continued only if all are equal."""
    contents = json.dumps([[prompt.content, prompt.label] for prompt in prompts])
    return {
        "model": name,
        "requests": len(prompts),
        "prompts_sha256": hashlib.sha256(contents.encode()).hexdigest(),
        "sampling": asdict(sampling),
        "raw": recording.raw,
    }
