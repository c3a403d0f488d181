"""Checkpoints on disk: safetensors folders, GGUF files and packs.

A pack is a model in Greenroom's own file format, made by `greenroom pack`. Opening a checkpoint
reads only headers. The modules are:

resolve         finds the checkpoint that a user names
names           names of models: hub ids with quantisations, suggestions for mistyped names
hub             downloads from the Hugging Face hub, and its local cache
remote          headers of models on the hub, read without a download
checkpoint      a folder of safetensors files as a checkpoint
header          the headers of safetensors files
quantised       codes and scales of quantised safetensors, combined to one tensor
read            reads and decodes complete tensors
gguf            a GGUF file as a checkpoint; gguf_file reads the headers
pack            a pack as a checkpoint
fingerprint     a digest of a model's config, tensor names and shapes
source          the files of a loaded model, and whether they changed
tokenizer       loads a checkpoint's tokenizer
library_errors  turns errors of other libraries into one-line errors
"""
