"""Making of packs: models in Greenroom's own file format (docs/pack-format.md).

packing   `pack` makes a pack expert by expert, in bounded memory; an interrupted call can continue
workers   the threads that encode and write experts
target    the layouts and the encoding of packed experts and their low-precision copies
quantise  compiled functions that quantise weights to codes and scales
dense     the tensors outside the experts, which are copied unchanged

`greenroom.hf.checkpoint.pack` reads packs.
"""
