"""Time limits of tests. A passing test never reaches them, even on a loaded machine."""

import os

from waltz_core.config import ClientConfig

# After this time, a test assumes that a condition will never hold, or that a process hangs.
TEST_TIMEOUT_S = 600
# A client with this time limit for its requests and its start.
PATIENT_CLIENT = ClientConfig(
    request_timeout_ms=1000 * TEST_TIMEOUT_S,
    zookeeper_connect_timeout_ms=1000 * TEST_TIMEOUT_S,
)


def machine_slowdown() -> float:
    """Return the factor by which this machine is slower than an idle one: the load for each core.

    The factor is for the few limits that the product guarantees, such as the failover time.
    """
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
