"""Packs: checkpoints whose experts lie in files of Greenroom's own (docs/pack-format.md).

format     the header, greenroom.json, and the catalog that it is to a reader
low        low-precision copies: where they lie, how they are made; copies: their catalog
reading    a pack as a checkpoint; checked: experts against their checksums
making     `pack`: expert by expert, in bounded memory, resumable
benches    the threads that make experts; data: the file that they write
target     what a packed expert looks like, and how it is made of one in a slot
quantise   compiled: plain weights to codes and scales
dense      the tensors that are not experts, copied as they are; dense_gguf: those of GGUF files
journal    what of a pack is done, while it is made
"""
