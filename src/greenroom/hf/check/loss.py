"""Store and look up the quality loss of approximate misses that `verify --quality` measured.

A cache miss is approximate if the missing expert is left out, or if its low-precision copy or
another expert is computed instead. The loss is stored with a model's other records
(plan/history/records.py), for the thresholds that it was measured with, and later runs print it.
The share of expert requests that were not exact is stored too, since a larger cache misses less and
so loses less.
"""

from __future__ import annotations

import logging
from datetime import date

from greenroom.config import LoadConfig
from greenroom.core.machine import machine_name
from greenroom.errors import OutputError
from greenroom.hf.check.quality import Quality
from greenroom.hf.checkpoint.fingerprint import fingerprint
from greenroom.hf.checkpoint.resolve import find_checkpoint
from greenroom.hf.memory.setup import ModelSetup
from greenroom.plan.history import files
from greenroom.plan.history.records import Loss
from greenroom.runtime.measure.bandwidth import host_facts

log = logging.getLogger(__name__)


def store_loss(config: LoadConfig, quality: Quality) -> None:
    """Store the measured quality loss of approximate cache misses for later runs.

    Nothing is stored if `quality` was measured without approximate misses, or if anything besides
    thresholds of gate weights selected them. If the file cannot be written, a warning is logged.
    """
    at = config.approximation()
    if quality.approximated is None or at is None or at.other:
        return
    digest, name = fingerprint(find_checkpoint(quality.model)), machine_name(host_facts())
    loss = Loss(
        at.precision, at.low, at.skip, at.substitute, quality.approximated["inexact_share"] or 0.0,
        quality.kl_mean, quality.perplexity, quality.original_perplexity, quality.tokens,
        date.today().isoformat(), at.bias,
    )  # fmt: skip
    try:
        files.update_records(digest, name, lambda records: records.with_loss(loss))
    except OutputError as error:
        log.warning("the measured quality loss was not stored for later runs: %s", error)


def stored_loss(setup: ModelSetup) -> Loss | None:
    """Return the quality loss measured with a run's options for approximate cache misses.

    The result is None if the options approximate no misses, if anything besides thresholds of gate
    weights selects them, or if no loss was measured with these options.
    """
    at = setup.approximation
    if at is None or at.other or not setup.fingerprint:
        return None
    records = files.load_records(setup.fingerprint, machine_name(host_facts()))
    return records.loss(at.precision, at.low, at.skip, at.substitute, at.bias)


def describe_loss(source: str, loss: Loss | None) -> str:
    """Describe approximate cache misses' quality loss, or name the command that measures it."""
    if loss is None:
        return (
            "answers are inexact, and their quality loss was not measured: to measure it, run"
            f" `greenroom verify {source} --quality FILE` with the same options"
        )
    return (
        f"quality, measured by `greenroom verify` on {loss.when} over {loss.tokens} tokens with"
        f" {loss.inexact:.1%} of expert requests not exact: KL divergence {loss.kl:.3g} nats,"
        f" perplexity {loss.perplexity:.6g}, with exact experts {loss.exact_perplexity:.6g}"
    )
