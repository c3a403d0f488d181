"""Reading packs, and their file format (docs/pack-format.md); `hf.pack` makes them.

format    the header, greenroom.json; header_file reads it; copies: low-precision copies
catalog   the byte ranges of experts: unsplit, split, or with low-precision copies
reading   a pack as a checkpoint; checked: a store that checks checksums (crc)
journal   the progress of an unfinished pack
"""
