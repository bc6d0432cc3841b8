"""The health check of the image: exit with 0 if the container's daemon answers /livez."""

import os
import sys
import urllib.request

_TIMEOUT_S = 4


def _is_alive(port: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=_TIMEOUT_S):
            return True
    except OSError:
        return False


# A container runs one daemon, so only one of these ports answers.
_PORTS = [os.environ[f"WALTZ_{kind}_HTTP_PORT"] for kind in ("SERVER", "STORAGE", "GATEWAY")]
sys.exit(not any(map(_is_alive, _PORTS)))
