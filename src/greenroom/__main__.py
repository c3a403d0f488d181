"""Run the command line by `python -m greenroom`."""

import sys

from greenroom.cli import main

sys.exit(main())
