"""Models on the Hugging Face hub, and those in its local cache.

errors         errors of the hub and the network, in one line each
quantisations  the quantisations of a GGUF repository, and the files that a name selects
repository     a repository's files, sizes and checksums, asked of the hub
transfer       downloads of large files: in parts, resumed, checked by SHA-256
download       a model's files, downloaded or found in the cache
cached         models in the local cache: complete and incomplete ones, and their removal
"""
