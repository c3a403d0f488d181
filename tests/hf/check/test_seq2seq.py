"""Encoder-decoder models: loaded, asked, verified, recorded; predictors stay away from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import greenroom
from greenroom.config import RecordConfig, SamplingConfig
from greenroom.errors import TraceError, UsageError
from greenroom.hf.check.verify import verify
from greenroom.hf.measure.recording import record
from greenroom.hf.text.generate import answer
from greenroom.trace.file import load as load_trace
from greenroom.trace.prompts import Prompt
from tests.models import SEQ2SEQ, cached_tiny, reference

GREEDY = SamplingConfig(max_new_tokens=5, temperature=0)
TEXT = "The green room is where"


def folder(name: str) -> Path:
    return cached_tiny(name, dtype="bfloat16", tokenizer=True, eos_token_id=None)


@pytest.mark.parametrize("name", sorted(SEQ2SEQ))
def test_the_answer_is_transformers_own(name):
    source = folder(name)
    model, tokenizer = greenroom.load(str(source), cache="25%", kernels="eager")
    try:
        reply = answer(model, tokenizer, TEXT, GREEDY, context=64)
        stats = model.greenroom.stats()
    finally:
        model.greenroom.detach()
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        theirs = reference(source).generate(ids, max_new_tokens=5, do_sample=False)
    assert reply.token_ids == theirs[0, 1:].tolist()
    assert reply.prompt_tokens == ids.shape[1]
    # The encoder's layers and the answer's first token are one pass, as a prompt is.
    assert stats.passes == 5
    assert stats.prefetch["predictor"] == "off"


@pytest.mark.parametrize("name", sorted(SEQ2SEQ))
@pytest.mark.parametrize("layers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_verify_accepts_an_encoder_decoder(name, layers):
    verdict = verify(str(folder(name)), "25%", tokens=3, prompt=TEXT, layers=layers)
    assert verdict.checks
    assert verdict.identical
    assert verdict.near


def test_a_trace_is_of_the_decoder(tmp_path):
    source = folder("switch_transformers")
    path = tmp_path / "run.trace"
    model, tokenizer = greenroom.load(str(source), cache="25%", kernels="eager")
    try:
        prompts = [Prompt(TEXT, "one"), Prompt("Another", "two")]
        options = {"sampling": GREEDY, "name": "switch"}
        record(model, tokenizer, prompts, path, recording=RecordConfig(token_ids=True), **options)
    finally:
        model.greenroom.detach()
    trace = load_trace(path)
    assert trace.experts.shape == (10, 2, 1)
    assert trace.pass_prefill.sum() == 2
    assert len(trace.pass_starts) == 11
    assert trace.token_ids[0] == 0


def test_a_recording_that_cannot_be_made_is_refused(tmp_path):
    model, tokenizer = greenroom.load(str(folder("nllb-moe")), cache="25%", kernels="eager")
    try:
        with pytest.raises(TraceError, match="an expert twice"):
            record(
                model, tokenizer, [Prompt(TEXT, "one")], tmp_path / "run.trace",
                recording=RecordConfig(), sampling=GREEDY, name="nllb",
            )  # fmt: skip
    finally:
        model.greenroom.detach()


def test_predictors_are_refused_by_name():
    with pytest.raises(UsageError, match="encoder-decoder"):
        greenroom.load(str(folder("switch_transformers")), cache="25%", prefetch="markov")
