"""A log of 1,500 segments needs few descriptors and little memory."""

import subprocess
import sys

import pytest

from tests.unit.storage.logs import forge_log


@pytest.mark.parametrize("dirty", [False, True], ids=["clean", "unclean"])
def test_many_segments_are_opened_and_read_with_64_descriptors_and_60_mib(tmp_path, dirty):
    forge_log(tmp_path, 1_500, dirty=dirty)
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.unit.storage.logs import open_and_read_all\n"
        "print(*open_and_read_all(Path(sys.argv[1]), 64, 48))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    last, opened_mib, read_mib = map(int, result.stdout.split())
    assert last == 2_999
    assert opened_mib < 60
    assert read_mib < 60
