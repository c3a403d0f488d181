"""GGUF files as checkpoints.

checkpoint     a GGUF model as a checkpoint
architectures  the table of GGUF's architectures and those of transformers
config         reads a config and checks that it fits a GGUF file
origin         finds the config and the tokenizer of a GGUF model
header         the header of a GGUF model
metadata       makes a config from the metadata of a GGUF file
tokenizer      makes the tokenizer of the metadata split text as they say
"""

from greenroom.hf.checkpoint.gguf.checkpoint import GgufCheckpoint

__all__ = ["GgufCheckpoint"]
