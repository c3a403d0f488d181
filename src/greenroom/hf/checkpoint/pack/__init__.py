"""Reading of packs: models in Greenroom's own file format (docs/pack-format.md).

`greenroom pack` makes packs; its code is in `greenroom.hf.pack`. The modules here are:

format       the header of a pack, greenroom.json
header_file  reads and checks greenroom.json
copies       low-precision copies of experts
catalog      the byte ranges of a pack's experts
reading      a pack as a checkpoint
checked      a disk store that checks each expert's checksum; crc: CRC-32 of joined bytes
journal      the progress of an unfinished pack
"""
