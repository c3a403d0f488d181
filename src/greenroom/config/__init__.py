"""Every default and every check, once. The command line makes its options from here."""

from greenroom.amounts import UNITS, Amount, share_of, show_bytes, write_bytes
from greenroom.config.load import LoadConfig
from greenroom.config.serve import SamplingConfig, ServeConfig, bounded_temperature
from greenroom.config.simulate import ORDERS, PINS, BudgetsConfig, SimulateConfig
from greenroom.config.study import ContestConfig, RecordConfig, TrainConfig
from greenroom.config.synth import SynthConfig, TopicsConfig, ZipfConfig
from greenroom.config.values import devices_of
from greenroom.core.config.scheduler import SchedulerConfig
from greenroom.core.config.shares import BUDGETS, SCOPES, scope_of, split_of
from greenroom.option import GROUPS, INEXACT, changed, flag, options_checked, options_in

__all__ = [
    "BUDGETS",
    "GROUPS",
    "INEXACT",
    "ORDERS",
    "PINS",
    "SCOPES",
    "UNITS",
    "Amount",
    "BudgetsConfig",
    "ContestConfig",
    "LoadConfig",
    "RecordConfig",
    "SamplingConfig",
    "SchedulerConfig",
    "ServeConfig",
    "SimulateConfig",
    "SynthConfig",
    "TopicsConfig",
    "TrainConfig",
    "ZipfConfig",
    "bounded_temperature",
    "changed",
    "devices_of",
    "flag",
    "options_checked",
    "options_in",
    "scope_of",
    "share_of",
    "show_bytes",
    "split_of",
    "write_bytes",
]
