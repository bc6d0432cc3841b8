"""Time limits of tests: a passing test never reaches them, also on a loaded machine."""

import os

# After this a condition counts as one that never comes, and a process as one that hangs.
HANG_S = 600


def slowness() -> float:
    """Return the factor by which this machine is slower than an idle one: the load for each core.

    For the few limits that the product promises, such as the gap of a fail-over.
    """
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
