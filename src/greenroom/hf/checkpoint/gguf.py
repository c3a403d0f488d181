"""GGUF files as checkpoints: config and tokenizer by transformers' own GGUF mapping.

Experts stay where they are, in the blocks that they are stored in. Everything else is expanded as
transformers expands it, by gguf's own code. What the mapping does not say of the config is said by
the file's metadata (the experts' width).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.integrations.gguf import (
    GGUF_CONFIG_ARCHS,
    get_gguf_config,
)
from transformers.modeling_gguf_pytorch_utils import (
    load_gguf_checkpoint,
)

from greenroom.core.layout import PLAIN
from greenroom.errors import UnsupportedModel
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.gguf_file import read_gguf
from greenroom.hf.checkpoint.library_errors import check_layers, wrap_library_errors
from greenroom.json_file import printable

# Architectures whose experts are compared with transformers' own in the tests.
SERVED = ("gpt-oss", "minimax-m2", "qwen2moe", "qwen35moe", "qwen3moe")
LEFT_OUT = {  # metadata that transformers' mapping leaves out -> the config's name for it
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
}


@dataclass(frozen=True)
class GgufCheckpoint(Checkpoint):
    """A GGUF file, or its parts. `folder` is the (first) file; `tensors` have GGUF's names."""

    @classmethod
    def open(cls, path: str | PathLike[str]) -> GgufCheckpoint:
        """Read the headers. Raises NotAModel, UnsupportedModel or CheckpointError."""
        if find_spec("gguf") is None:
            raise UnsupportedModel(
                f"{path}: GGUF files need the package gguf: pip install 'greenroom[gguf]'"
            )
        paths, metadata, tensors = read_gguf(Path(path).absolute())
        made = cls(paths[0], metadata, tuple(map(str, paths)), tensors, dict(tensors))
        if made.architecture not in SERVED:
            raise UnsupportedModel(
                f"{path}: a GGUF file of the architecture {printable(made.architecture)}:"
                f" {', '.join(SERVED)} are served"
            )
        return made

    @property
    def architecture(self) -> str:
        return str(self.config["general.architecture"])

    @property
    def mapped(self) -> bool:
        """Whether transformers has a mapping of names and values for it, and not of names alone."""
        return self.architecture in GGUF_CONFIG_ARCHS

    @property
    def source(self) -> dict[str, Any]:
        """What transformers' `from_pretrained` methods are to be called with."""
        return {
            "pretrained_model_name_or_path": self.folder.parent,
            "gguf_file": self.folder.name,
            "local_files_only": True,
        }

    @contextmanager
    def read_by_transformers(self) -> Iterator[None]:
        """transformers takes a scaling of rotary embeddings from the wrong bytes of the file, an
        array, which NumPy from 2.4 on makes no number of. So it is not shown any; see `_scaling`.
        """
        import gguf

        class Reader(gguf.GGUFReader):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                for key in [key for key in self.fields if ".rope.scaling." in key]:
                    del self.fields[key]

        own = gguf.GGUFReader
        gguf.GGUFReader = Reader
        try:
            yield
        finally:
            gguf.GGUFReader = own

    def hf_config(self) -> PreTrainedConfig:
        """transformers' config of the model, with what its mapping leaves out."""
        check_layers(self.config, len(self.tensors), str(self.folder))
        with wrap_library_errors(f"{self.folder}: its metadata is no config"):
            if self.mapped:
                values = get_gguf_config(self.config, tuple(self.tensors))
            else:
                with self.read_by_transformers():
                    values = load_gguf_checkpoint(str(self.folder))["config"]
            values |= {"rope_scaling": scaling} if (scaling := self._scaling()) else {}
            config = AutoConfig.for_model(**values)
        for key, name in LEFT_OUT.items():
            value = self.config.get(f"{self.architecture}.{key}")
            if value is not None and hasattr(config, name):
                setattr(config, name, value)
        return config

    def _scaling(self) -> dict[str, Any] | None:
        """How rotary embeddings are stretched; transformers' mapping takes other bytes for it."""
        prefix = f"{self.architecture}.rope.scaling."
        kind = self.config.get(f"{prefix}type", "none")
        if kind == "none":
            return None
        if kind != "yarn" or self.mapped:
            raise UnsupportedModel(f"{self.folder}: rotary embeddings are stretched by {kind}")
        return {
            "rope_type": "yarn",
            "rope_theta": self.config.get(f"{self.architecture}.rope.freq_base", 1e4),
            "factor": self.config[f"{prefix}factor"],
            "original_max_position_embeddings": self.config[f"{prefix}original_context_length"],
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": self.architecture != "gpt-oss",
        }

    def dtype(self) -> str:
        """What to compute in: the halves that the weights are stored in, else bfloat16."""
        kinds = {(s.encoding, s.dtype) for s in self.tensors.values() if len(s.shape) > 1}
        if any(encoding != PLAIN for encoding, _ in kinds) or (PLAIN, "bfloat16") in kinds:
            return "bfloat16"
        return "float16" if (PLAIN, "float16") in kinds else "float32"
