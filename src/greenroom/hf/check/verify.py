"""Prove that a model computes the same with its experts on disk as with all of them in memory.

Two claims are checked. With `kernels="eager"`: the logits and greedy tokens are bit-identical to
transformers' own `experts_implementation="eager"`. With the default kernels: the bits are those of
the same kernels with every expert in memory (of a run with this cache, where they do not fit),
whatever the cache's size, what is prefetched and when it arrives; and their distance to eager is at
most twice that of transformers' `grouped_mm` (to eager with the values as stored, where the model's
type cannot hold them: one_layer.py).
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
from greenroom.runtime.memory.system import available_bytes, release_memory

PROMPT = "Once upon a time, in a theatre by the sea, the actors waited behind the stage: "
ROOM = 1.3  # a whole model needs its bytes and some for activations

Say = Callable[[str], None]


@dataclass(slots=True)
class Verdict:
    """What was found. Differences are of logits, or of layers' outputs where `whole` is False.

    Logits differ by leaps where a router's close call falls the other way; so what the kernels
    promise is judged by layers on the same inputs: `layer_differences` to eager (`as_stored`: with
    weights that are not rounded), of our kernels and of grouped_mm, and `resolution`, one unit in
    the last place of the largest output.
    """

    entire_model: bool
    tokens_compared: int = 0
    max_logit_difference: float = 0.0
    grouped_mm_difference: float = 0.0
    kernels: str = ""
    layer_differences: tuple[float, float] = (0.0, 0.0)
    as_stored: bool = False
    resolution: float = 0.0
    checks: list[tuple[str, bool]] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        """All that must be the same is the same, bit for bit."""
        return all(passed for _, passed in self.checks)

    @property
    def near(self) -> bool:
        """The kernels that were judged are as close to eager as the default ones promise."""
        ours, grouped_mm = self.layer_differences
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
    say: Say = lambda line: None,
) -> Verdict:
    """Check a model with this cache; see the module. `say` is told each finding as it is made.

    `kernels` are those that are judged beside transformers' eager.
    `layers` compares layer by layer although the whole model would fit (None: as memory allows).
    """
    if tokens < 1:
        raise UsageError(f"--max-new-tokens must be at least 1, got {tokens}")

    checkpoint = find_checkpoint(source)
    if checkpoint.pack is not None:
        checkpoint.pack.check()
    skeleton = ModelSkeleton.of(checkpoint, dtype)
    slots_for(cache, skeleton.catalog)  # a mistake shows before the work begins
    size = skeleton.dense_bytes + skeleton.expanded_bytes
    whole = size * ROOM < available_bytes() if layers is None else not layers
    whole = whole and transformers_can_load(checkpoint)
    verdict = Verdict(whole)
    config = LoadConfig(
        cache=cache, dtype=dtype, kernels=kernels, no_guard=True, device="cpu", readers=2
    )
    ids = tokenizer_of(checkpoint)(prompt, return_tensors="pt")["input_ids"].long()
    trial = _Trial(source, skeleton, config, ids, tokens, say, verdict)
    if whole:
        trial.compare_with_transformers()
    else:
        say("the whole model is not loaded beside the cache: comparing layer by layer")
        trial.by_layer()
    trial.own_kernels()
    return verdict


def _how(config: LoadConfig) -> str:
    """How experts get to their slots in a run."""
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
    """The runs of one model; `config` is that of the kernels to be judged, with this cache."""

    source: str
    skeleton: ModelSkeleton
    config: LoadConfig
    ids: Tensor  # the prompt's, [1, T]
    tokens: int
    say: Say
    verdict: Verdict
    reference: Run | None = None  # transformers' eager, where the whole model fits
    layers: list[LayerCheck] = field(default_factory=list)

    def check(self, what: str, passed: bool) -> None:
        self.verdict.checks.append((what, passed))
        self.say(f"{'ok  ' if passed else 'FAIL'} {what}")

    @property
    def eager(self) -> LoadConfig:
        return replace(self.config, kernels="eager")

    def compare_with_transformers(self) -> None:
        """transformers' eager and grouped_mm with all in memory, then ours with eager kernels."""
        with streamed_model(self.source, self.eager) as model:
            ours, ours_with = greedy(model, self.ids, self.tokens), _slots(model)
            if adapter_of(model) is not None:  # transformers has no experts modules to compare with
                self.layers = list(compare_layers(self.skeleton, model, [self.ids]))
        model = load_reference_model(self.skeleton)
        self.reference = greedy(model, self.ids, self.tokens)
        self.layers = self.layers or list(
            compare_layers(self.skeleton, model, [self.ids], whole=True)
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

    def by_layer(self) -> None:
        """Each layer's output against transformers' eager, from the same inputs."""
        with streamed_model(self.source, self.eager) as model:
            follow = greedy(model, self.ids, min(self.tokens, 4)).tokens
            passes = [self.ids, *torch.tensor([follow]).split(1, 1)]
            name = f"eager kernels, {_slots(model)}"
            for layer in compare_layers(self.skeleton, model, passes):
                equal = f"{name}: {layer.name} equals transformers' eager, bit for bit"
                self.check(equal, layer.equal)
                self.layers.append(layer)
        self.verdict.tokens_compared = self.ids.shape[1] + len(follow)

    def own_kernels(self) -> None:
        """The same bits whatever the cache holds and whenever bytes arrive."""
        most = "100%" if self.verdict.entire_model else self.config.cache
        first, expected = self._logits(replace(self.config, cache=most), judged=True)
        experts = (
            "every expert in memory" if self.verdict.entire_model else f"{expected}, from disk"
        )
        for case in self._cases(most):
            logits, slots = self._logits(case)
            self.check(
                f"{self.verdict.kernels} kernels, {slots}, {_how(case)}: the same bits as with"
                f" {experts}",
                torch.equal(logits, first),
            )

    def _cases(self, reference: Any) -> list[LoadConfig]:
        """The runs that are compared with a first one, of the reference's cache."""
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
        """(logits with the kernels to be judged, the slots that there were)."""
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
        """How far the default kernels are from transformers' eager."""
        verdict = self.verdict
        ours = max(layer.distance(model) for layer in self.layers)
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
class Run:
    """Greedy tokens, and the logits [prompt + tokens - 1, V] that they came from."""

    tokens: list[int]
    logits: Tensor


@torch.inference_mode()
def greedy(model: PreTrainedModel, ids: Tensor, tokens: int) -> Run:
    """The likeliest token, `tokens` times, each in a pass of its own."""
    chosen: list[int] = []
    passes = Passes(model)
    rows = [passes(ids)]
    while True:
        chosen.append(int(rows[-1][-1].argmax()))
        if len(chosen) == tokens:
            return Run(chosen, torch.cat(rows))
        rows.append(passes(torch.tensor([chosen[-1:]])))


def pass_inputs(ids: Tensor, tokens: list[int]) -> list[Tensor]:
    """What the passes of `greedy` read until they have found these tokens."""
    return [ids, *torch.tensor([tokens[:-1]]).split(1, 1)]
