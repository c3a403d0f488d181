"""Every default and every check, once. The command line takes its defaults and help from here."""

from greenroom.config.amounts import (
    UNITS,
    Amount,
    show_bytes,
    write_bytes,
)
from greenroom.config.load import (
    LoadConfig,
)
from greenroom.config.option import (
    options_checked,
)
from greenroom.config.serve import (
    SamplingConfig,
    ServeConfig,
    bounded_temperature,
)
from greenroom.config.study import (
    ContestConfig,
    RecordConfig,
    TrainConfig,
)
from greenroom.config.synth import (
    SynthConfig,
    TopicsConfig,
    ZipfConfig,
)
from greenroom.config.values import (
    BUDGETS,
    CO_COMPUTE,
    DEVICES,
    KERNELS,
    KV,
    LOW_BELOW,
    LOW_SHARE,
    PRECISIONS,
    SCOPES,
    budgets_file,
    devices_of,
    scope_of,
    share_of,
    split_of,
    thresholds_of,
)

__all__ = [
    "BUDGETS",
    "CO_COMPUTE",
    "DEVICES",
    "KERNELS",
    "KV",
    "LOW_BELOW",
    "LOW_SHARE",
    "PRECISIONS",
    "SCOPES",
    "UNITS",
    "Amount",
    "ContestConfig",
    "LoadConfig",
    "RecordConfig",
    "SamplingConfig",
    "ServeConfig",
    "SynthConfig",
    "TopicsConfig",
    "TrainConfig",
    "ZipfConfig",
    "bounded_temperature",
    "budgets_file",
    "devices_of",
    "options_checked",
    "scope_of",
    "share_of",
    "show_bytes",
    "split_of",
    "thresholds_of",
    "write_bytes",
]
