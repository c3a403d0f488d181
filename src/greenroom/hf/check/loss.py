"""What inexact misses cost in quality: `verify --quality` measures it, runs that follow tell it.

Kept with what else is known of a model (plan/history/records.py), for the thresholds that it was
measured with. It is told with the share that was not exact then: a larger cache misses less, and
costs less.
"""

from __future__ import annotations

import logging
from datetime import date

from greenroom.config import LoadConfig
from greenroom.core.machine import name_of
from greenroom.errors import OutputError
from greenroom.hf.check.quality import Quality
from greenroom.hf.checkpoint.fingerprint import fingerprint
from greenroom.hf.checkpoint.resolve import find_checkpoint
from greenroom.hf.memory.setup import ModelSetup
from greenroom.plan.history import files
from greenroom.plan.history.records import Loss
from greenroom.runtime.measure.bandwidth import host_facts

log = logging.getLogger(__name__)


def store_loss(config: LoadConfig, found: Quality) -> None:
    """Leave a measurement to the runs that follow; where that fails it is said, and not lost."""
    if found.lesser is None:
        return
    digest, name = fingerprint(find_checkpoint(found.model)), name_of(host_facts())
    at = config.approximation()
    assert at is not None
    loss = Loss(
        at.precision, at.low, at.skip, at.substitute, found.lesser["inexact_share"] or 0.0,
        found.kl_mean, found.perplexity, found.original_perplexity, found.tokens,
        date.today().isoformat(),
    )  # fmt: skip
    try:
        files.update_records(digest, name, lambda records: records.with_loss(loss))
    except OutputError as error:
        log.warning("what was measured is not kept: %s", error)


def stored_loss(setup: ModelSetup) -> Loss | None:
    """What was measured with a run's thresholds; None where nothing was."""
    at = setup.approximation
    if at is None or not setup.fingerprint:
        return None
    records = files.load_records(setup.fingerprint, name_of(host_facts()))
    return records.loss(at.precision, at.low, at.skip, at.substitute)


def describe_loss(source: str, loss: Loss | None) -> str:
    """For people: the cost, or how to measure it."""
    if loss is None:
        return (
            "what this costs in quality was not measured with these thresholds: greenroom verify"
            f" {source} --quality TEXT, with the same options, does"
        )
    return (
        f"quality, as verify measured it on {loss.when} over {loss.tokens} tokens with"
        f" {loss.inexact:.1%} not exact: KL divergence {loss.kl:.3g} nats, perplexity"
        f" {loss.perplexity:.6g} beside {loss.exact_perplexity:.6g}"
    )
