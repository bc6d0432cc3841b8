"""For all tests: time limits, groups for the test workers, and a check for unclosed resources."""

import os
import sys
from collections import Counter
from importlib.metadata import version

import pytest
from hypothesis import HealthCheck, settings

from tests import java_classes, ports
from tests.time_limits import TEST_TIMEOUT_S

# The machine may be busy, so a slow example is not a failure. pytest-timeout ends tests that hang.
settings.register_profile(
    "quick", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", parent=settings.get_profile("quick"), max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# Spark's workers must use this Python interpreter: others cannot import waltz_spark.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
java_classes.use_class_archives()
ports.use_worker_port_range()

# Tests that start processes, and tests that try many schedules. They take minutes on a busy
# machine. The time limit still ends tests that hang.
LONG_TEST_FOLDERS = ("integration", "fault", "chaos", "spark", "notebooks", "sim", "crash", "tools")
# The tests of a file share a cluster or a Spark.
FOLDERS_GROUPED_BY_FILE = ("integration", "fault", "chaos", "spark")
# The tests of a folder share the files that they have read or built.
FOLDERS_GROUPED_AS_ONE = ("tidy", "site")

_unclosed_resources: list[str] = []


def pytest_configure(config):
    """Accept that PySpark before 4.3 leaves its sockets of `collect` to the garbage collector."""
    if [int(part) for part in version("pyspark").split(".")[:2]] < [4, 3]:
        config.addinivalue_line("filterwarnings", "ignore:unclosed <socket:ResourceWarning")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `--dist loadgroup`, let tests that share a fixture or files run in one worker.

    The groups of pytest-xdist are suffixes of test IDs, and pytest 9.2 accepts no such suffixes.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415 - without it no one asks

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path, _, _ = nodeid.partition("::")
            folder = path.removeprefix("tests/").rpartition("/")[0]
            return (
                path
                if folder in FOLDERS_GROUPED_BY_FILE
                else folder
                if folder in FOLDERS_GROUPED_AS_ONE
                else nodeid
            )

    return GroupScheduling(config, log)


def pytest_collection_modifyitems(items):
    """Give long tests more time."""
    for item in items:
        if item.path.parent.name in LONG_TEST_FOLDERS:
            item.add_marker(pytest.mark.timeout(3 * TEST_TIMEOUT_S))


def pytest_warning_recorded(warning_message, nodeid):
    """Record connections that a test has left open; see filterwarnings in pyproject.toml."""
    if "unclosed resource <" in str(warning_message.message):
        _unclosed_resources.append(f"{nodeid or 'somewhere'}: {warning_message.message}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Fail the run if there are such connections."""
    if _unclosed_resources and session.exitstatus == 0:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter):
    """Print these connections, and the counts of the crash tests."""
    for line in _unclosed_resources:
        terminalreporter.write_line(f"left open by {line}")
    counts = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, count in getattr(report, "user_properties", ()):
                if name.startswith("crash: ") and getattr(report, "when", "") == "call":
                    counts[name.removeprefix("crash: ")] += count
    if counts:
        summary = ", ".join(f"{count:,} {name}" for name, count in counts.items())
        terminalreporter.write_line(f"crashes: {summary}")
