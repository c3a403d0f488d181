"""Make packs (docs/pack-format.md); `checkpoint.pack` reads them.

packing      `pack`: expert by expert, in bounded memory, resumable
workers      the threads that encode and write experts
target       the layouts of packed experts and copies, and encoding them
quantise     compiled functions from weights to codes and scales
dense        the dense tensors, which are copied unchanged
"""
