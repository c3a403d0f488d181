"""Index of a checkpoint: the catalog with the byte ranges of every expert.

conversions  the tensors of each parameter; gguf_conversions: the same for GGUF's names
experts      the experts modules of a model
catalog      the catalog, of a pack too; columns, blocks, extents: its steps
"""
