"""Run `python -m gnmr`, which is the command `gnmr`."""

import sys

from gnmr.cli import main

sys.exit(main())
