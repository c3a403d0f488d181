"""Index of a checkpoint's experts: where the bytes of each expert lie on disk.

conversions       the checkpoint tensors of each model parameter
gguf_conversions  the same for GGUF files
experts           the experts modules of a model
catalog           makes the index, in three steps:
columns           the checkpoint tensors of each expert
blocks            where each element of these tensors goes in the model's parameters
extents           the byte ranges to read, and the copies from them to memory
"""
