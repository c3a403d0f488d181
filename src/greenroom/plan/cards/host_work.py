"""Time of the host for each token on a GPU, in seconds: constants of predictions.

They are times of the thread that computes, as `benchmarks/gpu_host_work.py` measures them with a
CPU in the GPU's place and stubs for launches (docs/planning.md has the commands and its table). A
change of that table is a change of this file. What goes on while the device computes later layers
(`deferred`) is not counted.
"""

from __future__ import annotations

LAYER = 0.66e-3  # of a layer outside of its experts, kernel by kernel (column `rest`)
HIT = 0.05e-3  # of a layer's experts that are all in slots (`hits`)
MISS = 0.08e-3  # further time of a layer that waits for experts (`misses` less `hits`)
SHARED_MISS = 0.5e-3  # the same with `--co-compute auto`
FETCH = 0.0  # further time for each of these experts: less than runs differ
HOP = 0.5e-3  # for each other GPU than the first that computes experts of a layer
# Where the model's decoder can be graphs, on one GPU, and nothing is predicted:
PIECE = 0.03e-3  # of a layer in pieces, in place of LAYER and HIT (`rest` and `hits`)
# Where every expert has a slot and the model's decoder can be one CUDA graph (`graph`):
GRAPH_TOKEN = 0.12e-3  # of a token
GRAPH_LAYER = 0.6e-6  # further time of each layer
