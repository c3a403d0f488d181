"""Packs as they lie on disk (docs/pack-format.md); how they are made: `hf.pack`.

format    the header, greenroom.json; header_file reads it, low: its low-precision copies
catalog   where experts lie, whole or cut in two; copies: with low-precision copies
reading   a pack as a checkpoint; checked: experts against their checksums (crc)
journal   what of a pack is done, while it is made
"""
