import sys

from gnmr.cli import main

sys.exit(main())
