"""Checkpoints on disk: folders of safetensors, GGUF files and packs; only headers are read.

resolve     from what a user names to a checkpoint; names: what was meant; hub: downloads
checkpoint  a folder of safetensors; header, quantised, read: its tensors
gguf        a GGUF file as a checkpoint; gguf_file: its headers
pack        packs as they are read
fingerprint, source, tokenizer  what else is told of a checkpoint; foreign: others' errors
"""
