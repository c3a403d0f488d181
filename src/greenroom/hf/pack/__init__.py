"""Making packs (docs/pack-format.md); packs as they are read: `checkpoint.pack`.

making       `pack`: expert by expert, in bounded memory, resumable
benches      the threads that make experts, and the file that they write
target       what a packed expert and its copy look like, and how they are made
quantise     compiled: plain weights to codes and scales
dense        the tensors that are not experts, copied as they are
"""
