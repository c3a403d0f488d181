"""Make the config of a model from the metadata of its GGUF file.

build   makes the config by the tables
models  the table of architectures
keys    the table of keys that are common to architectures
kinds   chooses the architecture of transformers where GGUF has one name for several
reader  reads values of the metadata
layers  values that are computed from other values, from arrays and from tensor names
rope    parameters of rotary position embeddings
"""

from greenroom.hf.checkpoint.gguf.metadata.build import config_from_metadata, makes_config
from greenroom.hf.checkpoint.gguf.metadata.models import MODELS

__all__ = ["MODELS", "config_from_metadata", "makes_config"]
