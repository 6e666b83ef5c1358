"""Run `python -m gnmr`, which is the command `gnmr`."""

import sys

from gnmr.lab.cli import main

sys.exit(main())
