"""The settings of every process, and the connect string.

`declarations.py` declares each setting with its default, unit and bounds; `settings.py` reads
settings from files, the environment and flags. `connect_string.py` parses the address of a cluster,
and `host_names.py` checks the hosts in it.
"""

from waltz_core.config.declarations import (
    CONFIG_TYPES_BY_KIND,
    ClientConfig,
    GatewayConfig,
    LocalConfig,
    ServerConfig,
    StorageConfig,
    TlsConfig,
    render_toml,
)

__all__ = [
    "CONFIG_TYPES_BY_KIND",
    "ClientConfig",
    "GatewayConfig",
    "LocalConfig",
    "ServerConfig",
    "StorageConfig",
    "TlsConfig",
    "render_toml",
]
