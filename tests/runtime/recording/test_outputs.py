"""Norms of experts' outputs and changes of tokens, beside transformers' own experts."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import greenroom
from greenroom.errors import TraceError, UsageError
from greenroom.hf.attach.predictors import build_predictors
from greenroom.hf.measure.recording import recorder_of
from greenroom.runtime.forward import BINDING
from greenroom.runtime.recording.outputs import check_kernels, token_changes
from greenroom.trace import Trace
from greenroom.trace.journal import Journal, read
from greenroom.trace.segments import Header
from tests.hf.check.test_parity import ids, streamed
from tests.models import cached_tiny, reference

SEVERAL, ONE = ids(1, 9), ids(1, 1)


def recorded(model: PreTrainedModel, path: Path, norms: bool = True) -> Trace:
    """A trace of two passes, of nine tokens and of one, without keys and values between them."""
    catalog = model.greenroom.setup.catalog
    predictors = build_predictors(model, catalog, [])
    header = Header(predictors.shape.experts_per_layer, weights=True, output_norms=norms)
    with (
        closing(Journal(path, header)) as journal,
        recorder_of(model, catalog, journal, predictors) as recorder,
        recorder.request(0, "", 9),
        torch.inference_mode(),
    ):
        for batch in (SEVERAL, ONE):
            model(input_ids=batch, use_cache=False)
    return read(path)


@torch.inference_mode()
def expected(model: PreTrainedModel, experts: str, norm: str) -> tuple[np.ndarray, np.ndarray]:
    """Norms and changes by transformers: every choice is computed alone, with a weight of 1.

    `experts` and `norm` are the ends of the names of the experts modules, and of the norms whose
    input is the hidden state before the experts.
    """
    states: list[torch.Tensor] = []
    calls: list[tuple[Any, torch.Tensor]] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args: states.append(args[0].flatten(0, -2)))
        for name, module in model.named_modules()
        if name.endswith(norm)
    ]
    modules = [module for name, module in model.named_modules() if name.endswith(experts)]
    hooks += [
        module.register_forward_hook(lambda _, args, out: calls.append((args, out)))
        for module in modules
    ]
    for batch in (SEVERAL, ONE):
        model(input_ids=batch, use_cache=False)
    for hook in hooks:
        hook.remove()
    norms, changes = [], []
    for ((x, index, weights), out), state, module in zip(calls, states, modules * 2, strict=True):
        one = torch.ones(1, 1, dtype=weights.dtype)
        norms.append(
            [
                [module(x[t, None], e[None, None], one).norm().item() for e in row]
                for t, row in enumerate(index)
            ]
        )
        after = state.double() + out.double()
        changes.append((1 - torch.cosine_similarity(state.double(), after, dim=-1)).tolist())
    both = []
    for each in (norms, changes):
        passes = each[: len(modules)], each[len(modules) :]
        both.append(np.concatenate([np.stack(each, 1) for each in passes]))
    return both[0], both[1]


@pytest.mark.parametrize("kernels", ["eager", "native"])
@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("olmoe", "post_attention_layernorm"),
        ("gpt_oss", "post_attention_layernorm"),
        ("qwen2_moe", "post_attention_layernorm"),
        pytest.param("gemma4_text", "pre_feedforward_layernorm_2", marks=pytest.mark.slow),
    ],
)
def test_outputs_are_those_of_transformers_experts(tmp_path, name, norm, kernels):
    """With slots for three experts: those of a step come in several groups."""
    folder = cached_tiny(name, dtype="float32")
    with streamed(folder, capacity=3, kernels=kernels) as model:
        before = [getattr(module, BINDING) for module in model.greenroom.bindings.modules]
        trace = recorded(model, tmp_path / "j")
        modules = model.greenroom.bindings.modules
        assert [getattr(module, BINDING) for module in modules] == before
    norms, changes = expected(reference(folder), ".experts", norm)
    assert changes.max() > 1e-4
    np.testing.assert_allclose(trace.output_norms, norms, rtol=1e-4)
    np.testing.assert_allclose(trace.token_changes, changes, rtol=1e-3, atol=1e-7)


def test_a_recording_with_norms_has_the_same_routing(tmp_path):
    with streamed(cached_tiny("olmoe", dtype="bfloat16"), capacity=5) as model:
        plain = recorded(model, tmp_path / "plain", norms=False)
        full = recorded(model, tmp_path / "full")
    assert plain.output_norms is None
    assert plain.token_changes is None
    np.testing.assert_array_equal(plain.experts, full.experts)
    np.testing.assert_array_equal(plain.weights, full.weights)


def test_the_change_of_a_token_by_hand():
    """A right angle is added, nothing, the same direction, and twice the opposite."""
    before = torch.tensor([[[1.0, 0], [2, 1], [3, 4], [1, 1]]])  # [batch, tokens, hidden]
    added = torch.tensor([[0.0, 1], [0, 0], [6, 8], [-2, -2]])
    found = token_changes(before, added).tolist()
    assert found == pytest.approx([1 - 0.5**0.5, 0, 0, 2], abs=1e-7)


def test_outputs_that_are_not_finite_end_the_recording(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "greenroom.runtime.recording.outputs.token_changes",
        lambda before, added: torch.full((len(added),), torch.nan),
    )
    with (
        streamed(cached_tiny("olmoe", dtype="float32"), capacity=5) as model,
        pytest.raises(TraceError, match="output is not finite: record without --output-norms"),
    ):
        recorded(model, tmp_path / "j")


def test_a_model_without_a_norm_before_its_experts_is_refused(tmp_path):
    with (
        streamed(cached_tiny("flex_olmo", dtype="float32"), capacity=5) as model,
        pytest.raises(TraceError, match="before the experts of MoE layer 0 was not found"),
    ):
        recorded(model, tmp_path / "j")


@pytest.mark.parametrize("options", [{"device": "fake,fake"}, {"skip_below": 0.1}])
def test_experts_in_parts_are_refused(options):
    model, _ = greenroom.load(
        str(cached_tiny("olmoe", dtype="bfloat16", tokenizer=True)), cache="50%", **options
    )
    try:
        with pytest.raises(UsageError, match="--output-norms needs experts that are computed"):
            check_kernels(model.greenroom.bindings.modules)
    finally:
        model.greenroom.detach()
