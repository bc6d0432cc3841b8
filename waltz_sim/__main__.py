"""The entry point of `python -m waltz_sim`."""

import sys

from waltz_sim.cli import main

sys.exit(main())
