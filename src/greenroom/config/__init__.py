"""Options of all commands: their defaults, checks and help texts."""

from greenroom.amounts import UNITS, Amount, format_amount, parse_share, show_bytes
from greenroom.config.load import LoadConfig
from greenroom.config.serve import (
    LOOKUP,
    MTP,
    OFF,
    SamplingConfig,
    ServeConfig,
    SpeculationConfig,
    bounded_temperature,
)
from greenroom.config.simulate import ORDERS, PINS, BudgetsConfig, SimulateConfig
from greenroom.config.study import (
    BenchmarkConfig,
    RecordConfig,
    TrainConfig,
    TrainPolicyConfig,
    ViewConfig,
)
from greenroom.config.synth import SynthConfig, TopicsConfig, ZipfConfig
from greenroom.config.values import parse_device
from greenroom.core.config.scheduler import SchedulerConfig
from greenroom.core.config.shares import BUDGETS, SCOPES, scope_of, split_of
from greenroom.option import GROUPS, INEXACT, changed_options, check_keywords, flag, options_in

__all__ = [
    "BUDGETS",
    "GROUPS",
    "INEXACT",
    "LOOKUP",
    "MTP",
    "OFF",
    "ORDERS",
    "PINS",
    "SCOPES",
    "UNITS",
    "Amount",
    "BenchmarkConfig",
    "BudgetsConfig",
    "LoadConfig",
    "RecordConfig",
    "SamplingConfig",
    "SchedulerConfig",
    "ServeConfig",
    "SimulateConfig",
    "SpeculationConfig",
    "SynthConfig",
    "TopicsConfig",
    "TrainConfig",
    "TrainPolicyConfig",
    "ViewConfig",
    "ZipfConfig",
    "bounded_temperature",
    "changed_options",
    "check_keywords",
    "flag",
    "format_amount",
    "options_in",
    "parse_device",
    "parse_share",
    "scope_of",
    "show_bytes",
    "split_of",
]
