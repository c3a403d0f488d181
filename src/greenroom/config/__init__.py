"""Every default and every check, once. The command line makes its options from here."""

from greenroom.config.amounts import UNITS, Amount, show_bytes, write_bytes
from greenroom.config.load import LoadConfig
from greenroom.config.option import changed, flag, options_checked, options_in
from greenroom.config.scheduler import GROUPS, INEXACT, SchedulerConfig
from greenroom.config.serve import SamplingConfig, ServeConfig, bounded_temperature
from greenroom.config.simulate import ORDERS, PINS, BudgetsConfig, SimulateConfig
from greenroom.config.study import ContestConfig, RecordConfig, TrainConfig
from greenroom.config.synth import SynthConfig, TopicsConfig, ZipfConfig
from greenroom.config.values import (
    BUDGETS,
    LOW_SHARE,
    SCOPES,
    devices_of,
    scope_of,
    share_of,
    split_of,
    thresholds_of,
)

__all__ = [
    "BUDGETS",
    "GROUPS",
    "INEXACT",
    "LOW_SHARE",
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
    "thresholds_of",
    "write_bytes",
]
