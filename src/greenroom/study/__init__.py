"""Studies of expert caching in Python: traces and results as tables, plots, files for other tools.

    from greenroom import study

    trace = study.load("run.trace")
    results = study.simulate(trace, ["lru", "auto", "opt"], ["10%", "25%", "50%"])
    study.table(results).to_pandas()       # a data frame; study.table makes an Arrow table
    study.plot_misses(results)

Tables, plots and Parquet files need `pip install 'greenroom[study]'` (pyarrow, pandas, matplotlib).
docs/study.md has notebooks.
"""

from greenroom.core.policy import Policy, compiled
from greenroom.policies import policy
from greenroom.sim.simulation import simulate
from greenroom.study.oracle_general import save_oracle_general
from greenroom.study.parquet import load_parquet, save_parquet
from greenroom.study.plots import plot_experts, plot_misses
from greenroom.study.published import FORMATS, load_published
from greenroom.study.sweeps import sweep
from greenroom.study.tables import policies, table, tokens
from greenroom.trace import Trace, load, save

__all__ = [
    "FORMATS",
    "Policy",
    "Trace",
    "compiled",
    "load",
    "load_parquet",
    "load_published",
    "plot_experts",
    "plot_misses",
    "policies",
    "policy",
    "save",
    "save_oracle_general",
    "save_parquet",
    "simulate",
    "sweep",
    "table",
    "tokens",
]
