"""Key of a model's keys and values: a digest of everything that their bits depend on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from greenroom import __version__
from greenroom.config import ServeConfig
from greenroom.runtime.kernels.native.library import library, missing_reason
from greenroom.runtime.measure.bandwidth import host_facts
from greenroom.server.engine.prompts.segment import VERSION

SAMPLES = 32  # of each weight file
SAMPLE_BYTES = 4096


def model_key(model: Any, config: ServeConfig, tokens: int) -> str:
    """Return the key of a loaded model's keys and values, in hexadecimal.

    The key changes with the weight files (their sizes, times and samples of their content), the
    model's config, types and kernels, the versions of libraries, the processors and their threads,
    and with the division of prompts into chunks. `tokens` is the number of tokens in a segment.
    """
    setup, bindings = model.greenroom.setup, model.greenroom.bindings
    files = setup.source.stamps.paths if setup.source is not None else ()
    host = host_facts()
    facts = {
        "format": VERSION,
        "segment": tokens,
        "fingerprint": setup.fingerprint,
        "config": model.config.to_json_string(use_diff=False),
        "files": [_file_facts(path) for path in files],
        "dtype": str(model.dtype),
        "keys_values": setup.keys_values.kind.name,
        "kernels": bindings.kernel_description,
        "library": "" if missing_reason() else library().source_digest + library().variant,
        "attention": model.config._attn_implementation,
        "versions": [__version__, torch.__version__, transformers.__version__],
        "processor": [host["cpu"], host["instructions"], torch.backends.cpu.get_cpu_capability()],
        "threads": torch.get_num_threads(),
        "devices": _device_names(setup),
        "scheduler": repr(setup.approximation),
        "co_compute": setup.config.uses_host(),
        "batch_invariant": config.batch_invariant,
        "prefill_chunk": config.prefill_chunk,
        "prompt_block": setup.prompt_block,
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _file_facts(path: str) -> list[Any]:
    """Return a weight file's name, size, time of change, and a digest of samples of its content.

    Two trainings of one model may have files of equal sizes and times: an archive may set the time.
    """
    stat, digest = os.stat(path), hashlib.blake2b(digest_size=16)
    with open(path, "rb", buffering=0) as file:
        for i in range(SAMPLES):
            file.seek(stat.st_size * i // SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
    return [Path(path).name, stat.st_size, stat.st_mtime_ns, digest.hexdigest()]


def _device_names(setup: Any) -> Sequence[str]:
    if not setup.cuda:
        return ["fake" if setup.fake else "cpu"]
    return [torch.cuda.get_device_name(number) for number in setup.devices]
