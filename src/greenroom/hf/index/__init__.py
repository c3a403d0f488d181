"""From a checkpoint's tensors to the byte ranges of each expert: the catalog.

routes    which tensor becomes which parameter; gguf_routes: the same for GGUF's names
experts   which of a model's modules are experts
catalog   where every expert lies, in a pack too; columns, blocks, extents: its steps
"""
