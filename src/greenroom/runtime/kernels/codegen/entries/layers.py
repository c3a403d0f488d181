"""Places of the arguments of `add_and_norm` and `run_stages` in arrays of int64."""

from __future__ import annotations

# Arguments of `add_and_norm`, after the cursor (native/norms.hpp).
N_X, N_Y, N_SUM, N_OUT, N_WEIGHT, N_COLUMNS, N_EPS, N_STYLE, N_MORE = range(1, 10)
NORM_ARGUMENTS = 10

# Number of arguments of `run_stages` (native/stages.cpp); stages may follow.
FIRST_STAGE = 3
