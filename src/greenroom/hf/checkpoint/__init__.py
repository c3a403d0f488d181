"""Checkpoints on disk: folders of safetensors, GGUF files and packs; only headers are read.

resolve         finds the checkpoint that a user names; names: suggestions; hub: downloads
checkpoint      a folder of safetensors; header, quantised, read: its tensors
gguf            a GGUF file as a checkpoint; gguf_file: its headers
pack            reading packs
fingerprint     a digest of a model; source: the files of a loaded model; tokenizer
library_errors  errors of libraries that read a model's files
"""
