"""`python -m waltz_core` is `waltz-core`."""

import sys

from waltz_core.cli.main import main

sys.exit(main())
