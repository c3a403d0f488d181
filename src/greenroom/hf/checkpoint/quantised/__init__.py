"""Quantised safetensors: codes and scales are combined into one encoded tensor.

A quantised checkpoint stores a matrix as codes and scales under separate names. This package
combines them to one `StoredTensor` with the name that the matrix has in an unquantised checkpoint.
So transformers' renamings and weight conversions apply to quantised checkpoints too. `methods` has
the table of quantisation methods; each family of methods has a module.
"""
