"""The command line in this process, and a tiny model."""

from tests.cli.conftest import cli as cli
from tests.cli.conftest import folder as folder
