"""Verify that a model with streamed experts computes the same bits as one in memory.

Three claims are checked:

- With `kernels="eager"`, logits and greedy tokens are bit-identical to those of transformers with
  `experts_implementation="eager"`.
- The kernels to be judged give the same bits for every cache size, with and without prefetching,
  and in every order in which experts arrive. The run that others are compared with has every expert
  in memory; if the model does not fit, its cache has the size that the caller gives.
- The layer outputs of these kernels differ from those of the eager forward at most twice as much as
  those of transformers' `grouped_mm` (one_layer.py has the details). Kernels that round inputs to 8
  bits are judged by `precise`, the same products with inputs of 15 bits; and what their outputs
  lose may be at most 3 % of them, by norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from greenroom.config import LoadConfig
from greenroom.errors import UsageError
from greenroom.hf.adapters import adapter_of
from greenroom.hf.check.one_layer import LayerCheck, compare_layers, distance
from greenroom.hf.check.passes import Passes, logits_of, streamed_model
from greenroom.hf.checkpoint.resolve import find_checkpoint
from greenroom.hf.checkpoint.tokenizer import tokenizer_of
from greenroom.hf.memory.slots import slots_for
from greenroom.hf.model.implementation import set_experts_implementation
from greenroom.hf.model.reference import load_reference_model, transformers_can_load
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.hf.variants.index import adapters_of
from greenroom.runtime.memory.system import available_bytes, release_memory

PROMPT = "Once upon a time, in a theatre by the sea, the actors waited behind the stage: "
EIGHT_BITS_SHARE = 0.03  # of a layer's output that inputs of 8 bits may change; 0.007 is usual
ROOM = 1.3  # times its bytes: an entire model needs memory for activations too

Report = Callable[[str], None]


@dataclass(slots=True)
class Verdict:
    """Result of `verify`: all comparisons with transformers, and the largest differences.

    entire_model: whether transformers' model was loaded; otherwise single layers were compared
    max_logit_difference, grouped_mm_difference: largest difference of the judged kernels, and of
        transformers' grouped_mm, from transformers' eager: of logits, or of layer outputs if the
        entire model was not loaded
    kernels: the kernels that were judged
    layer_differences: largest difference from eager of the outputs of layers with equal inputs, for
        the judged kernels and for grouped_mm. The kernels are judged by layers, since a router with
        nearly equal scores makes logits differ by a lot
    eight_bits: if the judged kernels round inputs to 8 bits: the largest difference of their layer
        outputs, and the share of a layer's output that is lost. `layer_differences` is then that of
        the same products with inputs of 15 bits
    as_stored: whether the eager layers had weights as stored, not rounded to the model's dtype
    resolution: one unit in the last place of the largest layer output
    checks: each comparison that must be bit-identical, and whether it passed
    """

    entire_model: bool
    tokens_compared: int = 0
    max_logit_difference: float = 0.0
    grouped_mm_difference: float = 0.0
    kernels: str = ""
    layer_differences: tuple[float, float] = (0.0, 0.0)
    eight_bits: tuple[float, float] | None = None
    as_stored: bool = False
    resolution: float = 0.0
    checks: list[tuple[str, bool]] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        """Return whether all outputs that must be equal bit for bit are equal."""
        return all(passed for _, passed in self.checks)

    @property
    def near(self) -> bool:
        """Return whether kernels differ from eager at most twice as much as grouped_mm."""
        ours, grouped_mm = self.layer_differences
        if self.eight_bits is not None and self.eight_bits[1] > EIGHT_BITS_SHARE:
            return False
        return ours <= max(2 * grouped_mm, self.resolution)


def verify(
    source: str,
    cache: str | int = "10%",
    *,
    tokens: int = 24,
    prompt: str = PROMPT,
    dtype: str = "auto",
    kernels: str = "auto",
    layers: bool | None = None,
    config: str | None = None,
    adapter: str | tuple[str, ...] | None = None,
    say: Report = lambda line: None,
) -> Verdict:
    """Verify that a model with streamed experts computes the same bits as transformers.

    source:  folder or hub id of the model
    cache:   size of the expert cache, as for `load`
    tokens:  number of tokens that are decoded greedily after `prompt`
    kernels: the kernels that are judged against transformers' eager
    layers:  True to compare layer by layer, False to load the entire model with transformers, None
             to load it if it fits into memory
    config:  folder, file or hub id with the config of a GGUF file
    adapter: folder with changed experts; the comparison is layer by layer then
    say:     called with a line for each comparison

    Raises UsageError for wrong options. Differences are no error: see `Verdict`.
    """
    if tokens < 1:
        raise UsageError(f"--max-new-tokens must be at least 1, got {tokens}")

    checkpoint = find_checkpoint(source, config)
    if checkpoint.pack is not None:
        checkpoint.pack.check()
    with_adapter = LoadConfig(adapter=adapter)
    skeleton = ModelSkeleton.of(checkpoint, dtype, adapters=adapters_of(with_adapter))
    slots_for(cache, skeleton.catalog)  # an error comes before the work begins
    size = skeleton.dense_bytes + skeleton.expanded_bytes
    entire = size * ROOM < available_bytes() if layers is None else not layers
    entire = entire and adapter is None and transformers_can_load(skeleton)
    verdict = Verdict(entire)
    options = LoadConfig(
        cache=cache, dtype=dtype, kernels=kernels, no_guard=True, device="cpu", readers=2,
        config=config, adapter=adapter,
    )  # fmt: skip
    ids = tokenizer_of(checkpoint)(prompt, return_tensors="pt")["input_ids"].long()
    trial = _Trial(source, skeleton, options, ids, tokens, say, verdict)
    if entire:
        trial.compare_with_transformers()
    else:
        say("the entire model is not loaded into memory: comparing layer by layer")
        trial.compare_layers()
    trial.compare_kernels()
    return verdict


def _describe_reads(config: LoadConfig) -> str:
    """Describe how a run reads its experts, for the line of a comparison."""
    threads = f"{config.readers} thread{'s' * (config.readers != 1)}"
    fake = config.device == "fake"
    parts = [f"read in random order by {threads}" if fake else "read from disk"]
    if config.prefetch == "off":
        parts.append("no prefetching")
    if config.split != "off":
        parts.append(f"experts split at {config.split}")
    return ", ".join(parts)


def _slots(model: PreTrainedModel) -> str:
    count = model.greenroom.capacity
    return f"{count} slot{'s' * (count != 1)}"


@dataclass
class _Trial:
    """Runs of one model; `config` has the cache and the kernels to be judged."""

    source: str
    skeleton: ModelSkeleton
    config: LoadConfig
    ids: Tensor  # of the prompt, [1, T]
    tokens: int
    say: Report
    verdict: Verdict
    reference: GreedyRun | None = None  # transformers' eager, where the entire model fits
    layers: list[LayerCheck] = field(default_factory=list)

    def check(self, what: str, passed: bool) -> None:
        self.verdict.checks.append((what, passed))
        self.say(f"{'ok  ' if passed else 'FAIL'} {what}")

    @property
    def eager(self) -> LoadConfig:
        return replace(self.config, kernels="eager")

    def compare_with_transformers(self) -> None:
        """Compare streamed eager kernels with transformers' eager and grouped_mm in memory."""
        with streamed_model(self.source, self.eager) as model:
            ours, ours_with = greedy(model, self.ids, self.tokens), _slots(model)
            if adapter_of(model) is not None:  # transformers has no experts modules to compare with
                self.layers = list(compare_layers(self.skeleton, model, [self.ids]))
        model = load_reference_model(self.skeleton)
        self.reference = greedy(model, self.ids, self.tokens)
        self.layers = self.layers or list(
            compare_layers(self.skeleton, model, [self.ids], in_memory=True)
        )
        if adapter_of(self.skeleton.model) is None:
            set_experts_implementation(
                "grouped_mm", *map(model.get_submodule, self.skeleton.catalog.layers)
            )
            logits = logits_of(model, pass_inputs(self.ids, self.reference.tokens))
            grouped = distance(logits, self.reference.logits)
        else:  # transformers computes these by eager alone
            grouped = max(layer.grouped_mm for layer in self.layers)
        del model
        release_memory()
        self.verdict.tokens_compared = self.ids.shape[1] + self.tokens
        self.verdict.grouped_mm_difference = grouped
        name = f"eager kernels, {ours_with}"
        self.check(
            f"{name}: {self.tokens} greedy tokens equal transformers' eager",
            ours.tokens == self.reference.tokens,
        )
        self.check(
            f"{name}: logits equal transformers' eager, bit for bit",
            torch.equal(ours.logits, self.reference.logits),
        )

    def compare_layers(self) -> None:
        """Compare each layer's output with transformers' eager, from the same inputs."""
        with streamed_model(self.source, self.eager) as model:
            follow = greedy(model, self.ids, min(self.tokens, 4)).tokens
            passes = [self.ids, *torch.tensor([follow]).split(1, 1)]
            name = f"eager kernels, {_slots(model)}"
            for layer in compare_layers(self.skeleton, model, passes):
                equal = f"{name}: {layer.name} equals transformers' eager, bit for bit"
                self.check(equal, layer.equal)
                self.layers.append(layer)
        self.verdict.tokens_compared = self.ids.shape[1] + len(follow)

    def compare_kernels(self) -> None:
        """Compare the judged kernels' bits over cache sizes, prefetching and orders of arrival."""
        most = "100%" if self.verdict.entire_model else self.config.cache
        first, expected = self._logits(replace(self.config, cache=most), judged=True)
        experts = (
            "every expert in memory" if self.verdict.entire_model else f"{expected}, from disk"
        )
        for case in self._cases(most):
            logits, slots = self._logits(case)
            self.check(
                f"{self.verdict.kernels} kernels, {slots}, {_describe_reads(case)}:"
                f" the same bits as with {experts}",
                torch.equal(logits, first),
            )

    def _cases(self, reference: Any) -> list[LoadConfig]:
        """Return the configs of the runs compared with the first, whose cache is `reference`."""
        case, catalog = partial(replace, self.config), self.skeleton.catalog
        caches: tuple[Any, ...] = "50%", catalog.slot_bytes, self.config.cache
        sizes = {slots_for(each, catalog): each for each in caches}
        sizes.pop(slots_for(reference, catalog), None)
        cases = [case(cache=size) for size in sizes.values()]
        cases += [case(device="fake", readers=readers) for readers in (1, 4)]
        cases.append(case(prefetch="off"))
        if any(layout.segments for layout in catalog.layouts):
            cases.append(case(cache="50%", split="0.25"))
            cases.append(case(cache="50%", device="fake", readers=4, split="0.5"))
        return cases

    def _logits(self, config: LoadConfig, judged: bool = False) -> tuple[Tensor, str]:
        """Compute logits with the kernels to be judged; return the number of slots as text too."""
        with streamed_model(self.source, config) as model:
            self.verdict.kernels = model.greenroom.stats().kernels
            if self.reference is not None:
                logits = logits_of(model, pass_inputs(self.ids, self.reference.tokens))
            else:
                logits = greedy(model, self.ids, self.tokens).logits
            if judged:
                self._judge(model, logits)
            return logits, _slots(model)

    def _judge(self, model: PreTrainedModel, logits: Tensor) -> None:
        """Measure the judged kernels' distance to transformers' eager."""
        verdict = self.verdict
        ours = max(layer.distance(model) for layer in self.layers)
        if model.greenroom.bindings.has_eight_bit_inputs:
            share = max(layer.share(model) for layer in self.layers)
            verdict.eight_bits = ours, share
            with streamed_model(self.source, replace(self.config, kernels="precise")) as precise:
                ours = max(layer.distance(precise) for layer in self.layers)
        grouped_mm = max(layer.grouped_mm for layer in self.layers)
        verdict.layer_differences = ours, grouped_mm
        verdict.as_stored = any(layer.reference is not layer.expected for layer in self.layers)
        largest = max(float(out.abs().max()) for layer in self.layers for out in layer.expected)
        verdict.resolution = torch.finfo(self.layers[0].expected[0].dtype).eps * largest
        if self.reference is not None:
            verdict.max_logit_difference = distance(logits, self.reference.logits)
        else:
            verdict.max_logit_difference, verdict.grouped_mm_difference = ours, grouped_mm


@dataclass(frozen=True, slots=True)
class GreedyRun:
    """Greedily decoded tokens, and the logits after the prompt and each earlier token.

    logits: [tokens of the prompt + decoded tokens - 1, vocabulary]
    """

    tokens: list[int]
    logits: Tensor


@torch.inference_mode()
def greedy(model: PreTrainedModel, ids: Tensor, tokens: int) -> GreedyRun:
    """Return the result of greedily decoding `tokens` tokens after a prompt.

    `ids` are the prompt's token ids [1, tokens of the prompt].
    """
    chosen: list[int] = []
    passes = Passes(model)
    rows = [passes(ids)]
    while True:
        chosen.append(int(rows[-1][-1].argmax()))
        if len(chosen) == tokens:
            return GreedyRun(chosen, torch.cat(rows))
        rows.append(passes(torch.tensor([chosen[-1:]])))


def pass_inputs(ids: Tensor, tokens: list[int]) -> list[Tensor]:
    """Return the token ids that enter each forward pass of `greedy`.

    `ids` are the prompt's token ids [1, tokens of the prompt], and `tokens` the decoded tokens.
    """
    return [ids, *torch.tensor([tokens[:-1]]).split(1, 1)]
