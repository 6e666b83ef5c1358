import sys

from gnmr.commands import main

sys.exit(main())
