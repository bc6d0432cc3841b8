"""All settings of all processes: default, unit, bounds, and the cost of unsuitable values.

This file is the complete list of settings: no other module declares settings. A state machine gets
only the values that it needs, never a config object. `settings.py` loads, checks and writes
settings.

Rules:
    1. A name ends with its unit. A port 0 means "any free port", but an `http_port` 0 means "no
       port".
    2. Sizes that are part of a format are not settings; they are declared with the format.
    3. The sentence of a setting states the cost of too small and too large values.

`make docs` generates the samples in `conf/` from this file; a test compares them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from waltz_core.config.host_names import check_host
from waltz_core.config.settings import Config, nearest_name_hint, render_settings, setting
from waltz_core.errors import BadConfig

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
PORT_MAX = 65_535
DURATION_MS_MAX = 24 * 60 * 60 * 1000
NO_GROUP = -1
BALANCE_MODES = ("count", "load")
TLS_MODES = ("", "on", "off")
TLS_VERIFY_MODES = ("name", "chain", "nothing")
TLS_TRANSITIONS = ("", "accept", "dial")
ACCESS_MODES = ("off", "report", "on")
LOG_FORMATS = ("text", "json")


def _connect_setting() -> Any:  # noqa: ANN401 - see `setting`
    return setting(
        "",
        "The hosts of ZooKeeper, followed by the root of the cluster. All processes of a "
        "cluster use the same value.",
        example="127.0.0.1:2181/waltz/local",
    )


def _port_setting(default: int, doc: str) -> Any:  # noqa: ANN401 - see `setting`
    return setting(default, doc, minimum=0, maximum=PORT_MAX)


def _group_setting(doc: str) -> Any:  # noqa: ANN401 - see `setting`
    return setting(NO_GROUP, doc, minimum=NO_GROUP, maximum=(1 << 31) - 1)


def _bytes_setting(default: int, doc: str, *, minimum: int = KIB, maximum: int = 1024 * GIB) -> Any:  # noqa: ANN401 - see `setting`
    return setting(default, doc, minimum=minimum, maximum=maximum)


def _ms_setting(default: int, doc: str, *, minimum: int = 1) -> Any:  # noqa: ANN401 - see `setting`
    return setting(default, doc, minimum=minimum, maximum=DURATION_MS_MAX)


def _zookeeper_connect_timeout_setting(default: int) -> Any:  # noqa: ANN401 - see `setting`
    return _ms_setting(
        default,
        "Time for which a starting process waits for ZooKeeper: it tries to connect, and repeats "
        "requests without an answer. A client also waits at most this time for each later "
        "answer. If it is too long, the process reports a wrong address late.",
    )


@dataclass(frozen=True, kw_only=True)
class ZooKeeperConfig(Config):
    """The settings for the connection to ZooKeeper, which all daemons and clients have."""

    connect: str = _connect_setting()
    zookeeper_connect_timeout_ms: int = _zookeeper_connect_timeout_setting(10_000)
    zookeeper_session_timeout_ms: int = _ms_setting(
        4_000,
        "ZooKeeper ends the session of this process after this time without a heartbeat. If "
        "it is too short, a short pause of the machine moves partitions. If it is too long, "
        "the partitions of a dead server are unavailable for longer.",
        minimum=500,
    )
    zookeeper_request_timeout_ms: int = _ms_setting(
        10_000,
        "Time that one request to ZooKeeper may take. After this time, the process treats "
        "ZooKeeper as unavailable.",
    )


@dataclass(frozen=True, kw_only=True)
class TlsConfig(Config):
    """The TLS settings of a process: its certificate, and how it verifies its peers."""

    kind: ClassVar[str] = "tls"

    tls: str = setting(
        "",
        'Whether connections use TLS 1.2 or 1.3: "on" or "off". If it is empty, ?tls= '
        "in `connect` decides; without ?tls=, TLS is off. All processes of a cluster use the "
        "same value.",
    )
    tls_certificate: str = setting(
        "",
        "A PEM file with the certificate of this process, followed by its chain of issuers. "
        "A daemon must have a certificate; a client presents it if the peer requests one.",
    )
    tls_key: str = setting(
        "",
        "A PEM file with the private key of the certificate. If it is empty, the key is in "
        "the file of `tls_certificate`.",
    )
    tls_authorities: str = setting(
        "",
        "A PEM file with the certificate authorities that this process trusts. If it is empty, "
        "the process trusts the authorities of the operating system.",
    )
    tls_verify: str = setting(
        "",
        'How the certificate of the peer is verified: "name" (its authority and its host name), '
        '"chain" (only its authority) or "nothing". If it is empty, "name" applies. Exception: '
        '"nothing" applies if the connect string has ?tls=unverified and `tls_authorities` is '
        "empty.",
    )

    def validate(self) -> None:
        """Raise BadConfig if the values of different settings contradict each other."""
        self._check_one_of("tls", TLS_MODES)
        if self.tls_verify:
            self._check_one_of("tls_verify", TLS_VERIFY_MODES)
        if self.tls_key and not self.tls_certificate:
            raise BadConfig("setting tls_key requires setting tls_certificate, which is not set")
        super().validate()


def _tls_require_certificate_setting(*, default: bool) -> Any:  # noqa: ANN401 - see `setting`
    return setting(
        default,
        "Whether the daemon requires a certificate of each peer that connects with TLS. One of "
        "`tls_authorities` must have signed the certificate.",
    )


def _access_setting() -> Any:  # noqa: ANN401 - see `setting`
    return setting(
        "off",
        'Whether the daemon checks the permissions of its peers: "off", "report" or "on". "on" '
        'rejects requests for which the peer has no permission, "report" only logs them. Both '
        "need TLS. The principal of a connection comes from its token, or from its certificate "
        "if it has no token. The daemon rejects invalid tokens, and certificates that none of "
        "`tls_authorities` has signed.",
    )


def _tls_transition_setting() -> Any:  # noqa: ANN401 - see `setting`
    return setting(
        "",
        'For the switch of a running cluster to TLS; requires `tls`. With "accept" or "dial", '
        "the ports accept TLS and plain TCP; over plain TCP, peers have no certificate. With "
        '"accept", the daemon itself connects to other processes with plain TCP; with "dial", it '
        "connects with TLS. If it is empty, the daemon uses only TLS.",
    )


def _insecure_network_setting() -> Any:  # noqa: ANN401 - see `setting`
    return setting(
        False,  # noqa: FBT003 - the name explains it
        "Whether the daemon may listen on a non-loopback address without protection, that is, if "
        '`tls` or `access` is not "on", or if `tls_transition` is set. If true, every host that '
        "can connect may be able to read and write, so set it only in a private network.",
    )


def _http_host_setting() -> Any:  # noqa: ANN401 - see `setting`
    return setting(
        "127.0.0.1",
        "The address of the HTTP pages at `http_port`. The pages have no access control: "
        "every host that can connect may read metrics and addresses.",
    )


def _principal_pattern_setting() -> Any:  # noqa: ANN401 - see `setting`
    return setting(
        "CN=(.+)",
        "A regular expression that finds the principal in the certificate of a client. It must "
        "match one whole name of the certificate: `CN=..`, `SUBJECT=..` (RFC 4514), `URI=..` or "
        "`DNS=..`. Its first group is the name of the principal.",
    )


def _audit_log_setting() -> Any:  # noqa: ANN401 - see `setting`
    return setting(
        "",
        "The file of the audit log, to which the daemon writes administrative requests, denied "
        "requests and revisions of the permissions as lines of JSON. If the file cannot be "
        "written, the daemon rejects administrative requests. On SIGHUP, the daemon opens the "
        "file again. The audit log requires `access`. If it is empty, there is no audit log.",
    )


def _handshake_burst_max_setting() -> Any:  # noqa: ANN401 - see `setting`
    return setting(
        2_000,
        "Number of TLS handshakes that one host may begin at once. The daemon closes further "
        "connections of this host. If it is too small, peers with many partitions connect slowly "
        "after a restart. If it is too large, a hostile host delays the requests of other hosts.",
        minimum=10,
        maximum=1_000_000,
    )


def _handshakes_per_s_max_setting() -> Any:  # noqa: ANN401 - see `setting`
    return setting(
        100,
        "Number of TLS handshakes per second that one host may begin after its burst of "
        "`handshake_burst_max`. Clients with the same IP address share this limit. Values that "
        "are too small or too large have the same effects as for `handshake_burst_max`.",
        minimum=1,
        maximum=1_000_000,
    )


def _check_audit_log(audit_log: str, access: str) -> None:
    """Raise BadConfig for an audit log without access control."""
    if audit_log and access == "off":
        raise BadConfig(
            'setting audit_log requires access = "report" or access = "on", found "off"'
        )


def _check_hosts(listen_host: str, advertised_host: str, http_host: str) -> None:
    """Raise BadConfig for a host that is invalid, or to which other machines cannot connect."""
    # An IPv6 address may be in brackets.
    unbracketed_host = advertised_host.removeprefix("[").removesuffix("]")
    host_settings = {
        "listen_host": listen_host,
        "advertised_host": unbracketed_host,
        "http_host": http_host,
    }
    for name, host in host_settings.items():
        if not host:
            continue
        try:
            check_host(host)
        except ValueError as error:
            raise BadConfig(
                f"setting {name}: {host!r} is not a valid host name: {error}. Hint: use the "
                "name or the IP address of this machine."
            ) from error
    if listen_host in ("", "0.0.0.0", "::") and not advertised_host:  # noqa: S104
        raise BadConfig(
            "setting advertised_host is required, because other machines cannot connect to "
            f"listen_host {listen_host!r}. Hint: set advertised_host to the name or the "
            "address of this machine."
        )


@dataclass(frozen=True, kw_only=True)
class LogConfig(Config):
    """The settings of the log lines of a daemon."""

    log_format: str = setting(
        "text",
        'The format of log lines: "text", or "json" for one JSON object per line. With the option '
        "`--logging`, the formatters of its file apply instead.",
    )

    def validate(self) -> None:
        """Raise BadConfig if the format is unknown."""
        self._check_one_of("log_format", LOG_FORMATS)
        super().validate()


@dataclass(frozen=True, kw_only=True)
class StorageConfig(LogConfig, TlsConfig, ZooKeeperConfig):
    """The settings of a storage."""

    kind: ClassVar[str] = "storage"

    # A daemon waits longer than a client, because no user waits for the daemon, and its log states
    # why it waits.
    zookeeper_connect_timeout_ms: int = _zookeeper_connect_timeout_setting(60_000)
    directory: str = setting(
        "",
        "The directory of the storage's files. It belongs permanently to one storage of one "
        "cluster.",
        example="data/storage",
    )
    listen_host: str = setting(
        "127.0.0.1",
        'The address at which the storage listens. "0.0.0.0" means all addresses, and requires '
        "`advertised_host`.",
    )
    port: int = _port_setting(15_280, "Port for servers and readers; 0 uses any free port.")
    advertised_host: str = setting(
        "",
        "The host name under which servers connect to the storage. It is part of the storage's "
        "identity. If it is empty, the storage uses `listen_host`.",
    )
    admin_port: int = _port_setting(
        15_281, "Port for administration requests; 0 uses any free port."
    )
    http_host: str = _http_host_setting()
    http_port: int = _port_setting(
        0, "Port of the HTTP pages /livez, /readyz, /health and /metrics; 0 disables them."
    )
    segment_bytes_max: int = _bytes_setting(
        1_000_000_000,
        "Size of a segment file. When a segment exceeds this size, the storage begins the next "
        "one. If it is too small, there are many files and indexes. If it is too large, checks "
        "at the start and copies of a segment take long.",
        minimum=4 * KIB,
        maximum=2_000_000_000,
    )
    open_files_max: int = setting(
        64,
        "Number of files that the storage keeps open, over all partitions; a segment has three "
        "files. If it is too small, the storage reopens files often when appends and reads "
        "alternate between many partitions. If it is too large, the process reaches the "
        "operating system's limit on open files, which also applies to connections. Files with "
        "unsynced writes stay open even over the limit, at most three for each partition.",
        minimum=8,
        maximum=65_536,
    )
    page_cache_bytes_max: int = _bytes_setting(
        16 * MIB,
        "Number of recently appended bytes of each file that stay in the page cache after a "
        "sync. The storage drops older pages from the cache. If it is too small, readers that "
        "lag a little read from the disk. If it is too large, pages that no reader uses fill the "
        "memory, and newer pages are evicted.",
        minimum=0,
    )
    reserve_bytes: int = _bytes_setting(
        64 * MIB,
        "Disk space that the storage allocates in advance. When the disk is full, the "
        "storage releases this space, so that truncation, repair and writes of low-water "
        "marks still work. If it is too small, a full disk also stops repair.",
        minimum=0,
        maximum=64 * GIB,
    )
    scrub_bytes_per_s: int = _bytes_setting(
        4 * MIB,
        "Rate at which the storage scrubs its logs, over all partitions: it reads old records "
        "again to find silent corruption while other replicas can still repair it. If it is too "
        "low, the scrub of a terabyte takes weeks. If it is too high, reads and syncs wait for "
        "the scrub. 0: no scrub.",
        minimum=0,
        maximum=4 * GIB,
    )
    scrub_interval_ms: int = _ms_setting(
        DURATION_MS_MAX,
        "Minimum time between the starts of two scrubs of the same log. If it is too short, "
        "the storage reads a small log all day without need.",
        minimum=0,
    )
    trust_fsync: bool = setting(
        True,  # noqa: FBT003 - the name explains it
        "Whether the disk keeps data that it has reported as synced, even if the power fails. If "
        "false, every replica is suspect after an unclean stop of the storage, until a store "
        "session has repaired it.",
    )
    writer_thread_count: int = setting(
        4,
        "Number of threads that write and sync files. Each partition uses at most one of them at "
        "a time. If it is too small, partitions wait for each other's syncs. If it is too large, "
        "the threads contend for the disk.",
        minimum=1,
        maximum=64,
    )
    queue_bytes_max: int = _bytes_setting(
        64 * MIB,
        "Bytes of appends that may wait for a writer thread, over all partitions. Over the "
        "limit, the storage stops reading from connections. Reads for clients have a "
        "separate limit of the same size. If it is too small, each sync covers few appends. "
        "If it is too large, memory use and latency grow.",
        minimum=32 * MIB,
    )
    archive_url: str = setting(
        "",
        "The URL to which this storage archives its partitions, such as file:///srv/archive "
        "or s3://bucket/folder. All storages of a cluster use the same value. A copy of the "
        "cluster has the same cluster key and would delete the files, so it needs another "
        "archive. If it is empty, nothing is archived.",
    )
    archive_object_bytes: int = _bytes_setting(
        64 * MIB,
        "Size of the records in one object of the archive. If it is too small, there are many "
        "objects, and reads of the archive are slow. If it is too large, memory use grows, "
        "because the storage keeps an object in memory until it is written and verified.",
        maximum=GIB,
    )
    archive_age_ms: int = _ms_setting(
        600_000,
        "Maximum age of a transaction that is not archived. When a transaction is older, the "
        "storage writes an object, even one smaller than `archive_object_bytes`. If it is too "
        "short, there are many small objects. If it is too long, the archive lags when appends "
        "are rare.",
        minimum=0,
    )
    archive_bytes_per_s: int = _bytes_setting(
        0,
        "Rate at which this storage reads logs for the archive, writes objects and reads "
        "them back, over all partitions. If it is too low, the archive lags and the disk "
        "fills. If it is too high, appends and reads wait for the disk or the network. 0: no "
        "limit.",
        minimum=0,
        maximum=4 * GIB,
    )
    local_retention_bytes: int = _bytes_setting(
        0,
        "Maximum size of all logs of the storage. Above this size, the storage removes its "
        "oldest segments, if they are archived. If it is too small, reads of older transactions "
        "wait for the archive. If it is too large, the disk fills. 0: no limit.",
        minimum=0,
    )
    local_retention_ms: int = setting(
        0,
        "Maximum age of transactions in the logs of the storage. The storage removes an archived "
        "segment when all transactions of the segment are older. If this age is too short, reads "
        "of older transactions wait for the archive. If it is too long, the disk fills. 0: no "
        "limit.",
        minimum=0,
        maximum=100 * 365 * DURATION_MS_MAX,
    )
    connections_max: int = setting(
        10_000,
        "Maximum number of connections; the storage rejects further ones. Servers need one "
        "connection for each partition, and a second one while a partition moves.",
        minimum=4,
        maximum=100_000,
    )

    tls_require_certificate: bool = _tls_require_certificate_setting(default=True)
    tls_transition: str = _tls_transition_setting()
    insecure_network: bool = _insecure_network_setting()
    access: str = _access_setting()
    principal_pattern: str = _principal_pattern_setting()
    audit_log: str = _audit_log_setting()
    handshake_burst_max: int = _handshake_burst_max_setting()
    handshakes_per_s_max: int = _handshakes_per_s_max_setting()

    def validate(self) -> None:
        """Raise BadConfig if the values of different settings contradict each other."""
        _check_hosts(self.listen_host, self.advertised_host, self.http_host)
        super().validate()
        self._check_one_of("access", ACCESS_MODES)
        self._check_one_of("tls_transition", TLS_TRANSITIONS)
        if self.tls_transition and self.access == "on":
            raise BadConfig(
                'setting tls_transition must be empty with access = "on", because access '
                f"control requires TLS; found {self.tls_transition!r}"
            )
        _check_audit_log(self.audit_log, self.access)
        self._check_ports_differ("port", "admin_port", "http_port")


@dataclass(frozen=True, kw_only=True)
class ServerConfig(LogConfig, TlsConfig, ZooKeeperConfig):
    """Server settings; `partition_...` applies per partition, `connection_...` per connection."""

    kind: ClassVar[str] = "server"

    # A daemon waits longer than a client, because no user waits for the daemon, and its log states
    # why it waits.
    zookeeper_connect_timeout_ms: int = _zookeeper_connect_timeout_setting(60_000)
    listen_host: str = setting(
        "127.0.0.1",
        'The address at which the server listens. "0.0.0.0" means all addresses, and requires '
        "`advertised_host`.",
    )
    port: int = _port_setting(15_180, "Port for clients; 0 uses any free port.")
    advertised_host: str = setting(
        "",
        "The host name under which clients connect to the server. If it is empty, the server "
        "uses `listen_host`.",
    )
    advertised_port: int = _port_setting(
        0, "The port under which clients connect to the server. If it is 0, the server uses `port`."
    )
    http_host: str = _http_host_setting()
    http_port: int = _port_setting(
        0, "Port of the HTTP pages /livez, /readyz, /health and /metrics; 0 disables them."
    )
    lock_slot_count: int = setting(
        1_048_573,
        "Number of slots in the lock table of a partition, 8 bytes each; preferably a prime "
        "number. If it is too small, different locks share slots more often, so the server "
        "rejects appends of lagging clients although there is no conflict. If it is too large, the "
        "server needs more memory, and moves of partitions take longer.",
        minimum=101,
        maximum=134_217_689,
    )
    lock_table_bytes_max: int = _bytes_setting(
        256 * MIB,
        "Maximum memory of the lock tables of all partitions. Over the limit, the server "
        "makes all tables smaller.",
        minimum=MIB,
    )
    lock_load_count_max: int = setting(
        1_000_000,
        "Number of recent transactions whose locks a new owner of a partition loads from the "
        "storages. It loads at most 8 MiB of locks. If it is too small, the new owner rejects "
        "appends of lagging clients although there is no conflict. If it is too large, moves of "
        "partitions take longer. 0: the new owner loads no locks.",
        minimum=0,
        maximum=100_000_000,
    )
    feed_cache_bytes: int = _bytes_setting(
        64 * MIB,
        "Memory for the headers of recent transactions, over all partitions. If it is too small, "
        "the server must read from storages to serve feeds that lag only a little.",
        minimum=MIB,
    )
    transaction_cache_bytes: int = _bytes_setting(
        128 * MIB,
        "Memory for recent transactions with their data, over all partitions. If it is too "
        "small, reads of recent data need the disks of the storages.",
        minimum=MIB,
    )
    memory_bytes_max: int = _bytes_setting(
        GIB,
        "Maximum memory of all buffers, caches and tables of this server. Over the limit, "
        "the server rejects appends as overloaded and stops reading from connections.",
        minimum=64 * MIB,
    )
    connections_max: int = setting(
        10_000,
        "Maximum number of connections; the server rejects further ones.",
        minimum=4,
        maximum=100_000,
    )
    connection_in_flight_bytes_max: int = _bytes_setting(
        64 * MIB,
        "Maximum bytes of unanswered requests of one connection. Over the limit, the server "
        "stops reading from this connection.",
        minimum=16 * MIB,
    )
    connection_in_flight_count_max: int = setting(
        1_024,
        "Maximum number of unanswered appends and append batches of one connection. Over "
        "the limit, the server stops reading from this connection.",
        minimum=1,
        maximum=1_000_000,
    )
    write_buffer_bytes_max: int = _bytes_setting(
        MIB,
        "Maximum bytes of answers that one client has not read yet. Over the limit, the "
        "server pauses the client's feed and requests until the client has read some.",
        minimum=64 * KIB,
    )
    partition_queue_bytes_max: int = _bytes_setting(
        32 * MIB,
        "Maximum bytes of appends to one partition that wait for their lock check. Over the "
        "limit, the server rejects appends as overloaded.",
        minimum=16 * MIB,
    )
    partition_in_flight_bytes_max: int = _bytes_setting(
        4 * MIB,
        "Maximum bytes of uncommitted records of a partition: the server has sent them to the "
        "replicas, but no quorum has synced them yet. If it is too small, the disks idle between "
        "syncs. If it is too large, latency grows, and the server needs more memory for each "
        "replica.",
        minimum=64 * KIB,
    )
    partition_in_flight_batches_max: int = setting(
        64,
        "Maximum number of uncommitted batches of a partition: the server has sent them to the "
        "replicas, but no quorum has synced them yet.",
        minimum=1,
        maximum=65_536,
    )
    small_requests_first: bool = setting(
        True,  # noqa: FBT003 - the name explains it
        "Whether the server splits large batches and pauses between the parts while clients "
        "send small requests. A small request then takes at most twice as long as without "
        "large batches. If false, the client that sends the most data gets the largest share.",
    )
    batch_rows_max: int = setting(
        16_384,
        "Maximum number of rows in one append batch of a client. If it is too large, "
        "appends of other clients wait for the batch.",
        minimum=1,
        maximum=1_000_000,
    )
    batch_bytes_max: int = _bytes_setting(
        8 * MIB, "Maximum bytes of one append batch of a client.", minimum=5 * MIB, maximum=15 * MIB
    )
    replica_lag_bytes_max: int = _bytes_setting(
        16 * MIB,
        "Bytes by which a replica may lag. Up to this limit, the server sends the missing "
        "records from its memory; above it, the server copies them from the logs of other "
        "replicas. If it is too small, a short pause of a replica causes reads from the disks of "
        "other storages. If it is too large, the server needs more memory for each replica.",
        minimum=MIB,
    )
    checkpoint_interval_count: int = setting(
        250_000,
        "Number of transactions after which the server opens a new store session, to raise the "
        "low-water marks of the replicas. If it is too small, the short pauses of appends for a "
        "new session are more frequent. If it is too large, a recovery compares more batches.",
        minimum=100,
        maximum=1_000_000_000,
    )
    feed_frame_count_max: int = setting(
        4_096, "Maximum number of transactions in one feed message.", minimum=1, maximum=65_536
    )
    feed_request_count_min: int = setting(
        10_000,
        "Minimum number of transactions that the server sends for one feed request of a "
        "client. If it is too small, there are frequent round trips.",
        minimum=1,
        maximum=10_000_000,
    )
    range_bytes_max: int = _bytes_setting(
        4 * MIB,
        "Maximum bytes of records in one answer of the server to a read of a range.",
        minimum=64 * KIB,
        maximum=8 * MIB,
    )
    group: int = _group_setting(
        "The group of storages to which this server belongs, for example the number of its rack. "
        "The server prefers storages of this group for reads. -1: no group; the server reads "
        "from all storages in turn."
    )
    partition_storage_reads_max: int = setting(
        8,
        "Maximum number of concurrent reads from storages for one partition.",
        minimum=1,
        maximum=1_024,
    )
    remembered_clients_max: int = setting(
        262_144,
        "Maximum number of disconnected clients that the server remembers for each partition. "
        "For each client, it remembers the latest connection, so that it can reject older "
        "connections of the same client ID.",
        minimum=1_024,
        maximum=100_000_000,
    )
    retry_interval_ms_min: int = _ms_setting(
        50,
        "The first pause before the server tries to connect to a replica again. If it is too "
        "short, the server tries again without success more often.",
    )
    retry_interval_ms_max: int = _ms_setting(
        2_000,
        "The longest pause before the server tries to connect to a replica again. If it is too "
        "long, the server uses a restarted storage late.",
    )
    quorum_timeout_ms: int = _ms_setting(
        12_000,
        "If a partition has no quorum for this time, the server assigns the partition to another "
        "server. It is also the time within which a replica must answer a request. If it is too "
        "short, slow disks make partitions move. If it is too long, a server that cannot connect "
        "to storages keeps its partitions for a long time.",
        minimum=100,
    )
    slow_append_ms: int = _ms_setting(
        250,
        "If a replica acknowledges an append only after this time, the server logs "
        "`append.slow`, at most once a second for each replica. If it is too low, the server "
        "logs it for healthy disks. 0: never.",
        minimum=0,
    )
    archive_interval_ms: int = _ms_setting(
        0,
        "Pause between attempts to archive the committed transactions of a partition. The "
        "storages must have an `archive_url`. If it is too short, storages check their logs "
        "without need. If it is too long, the archive lags, and the storages remove old segments "
        "late. 0: the server archives nothing.",
        minimum=0,
    )
    archive_retention_ms: int = _ms_setting(
        0,
        "Age at which archived transactions expire. The log then begins after the expired "
        "transactions, and their objects are deleted a day later. If it is too short, readers "
        "lose transactions that they still need. 0: archived transactions never expire.",
        minimum=0,
    )
    high_water_mark_staleness_ms_max: int = _ms_setting(
        2_000,
        "Maximum staleness of a high-water mark that the server returns. After a quorum of "
        "replicas has confirmed the server's store session, the server returns its mark for "
        "this time without another query. If it is too short, the server queries the replicas "
        "more often. If it is too long, a server that has lost a partition returns old marks.",
    )
    balance: str = setting(
        "count",
        'How servers share the partitions: "count" gives each server the same number of '
        'partitions, "load" the same amount of work. All servers use the same value.',
    )
    balance_interval_ms: int = _ms_setting(
        5_000,
        "Interval at which servers publish their loads and consider moves, if `balance` is "
        '"load". If it is too short, the servers write to ZooKeeper more often.',
        minimum=50,
    )
    balance_window_ms: int = _ms_setting(
        30_000,
        "Time over which the server averages the load of a partition. If it is too short, short "
        "peaks of load make partitions move. If it is too long, the servers respond late to a "
        "lasting change.",
        minimum=50,
    )
    balance_cooldown_ms: int = _ms_setting(
        600_000,
        "Minimum time for which a partition stays at a server after it was moved because of its "
        "load. If it is too short, partitions with varying loads move too often.",
        minimum=50,
    )
    session_wait_ms_max: int = _ms_setting(
        5_000,
        "Time for which a read or a mount waits for an open store session before the server "
        "rejects it.",
    )

    tls_require_certificate: bool = _tls_require_certificate_setting(default=False)
    tls_transition: str = _tls_transition_setting()
    insecure_network: bool = _insecure_network_setting()
    access: str = _access_setting()
    principal_pattern: str = _principal_pattern_setting()
    audit_log: str = _audit_log_setting()
    handshake_burst_max: int = _handshake_burst_max_setting()
    handshakes_per_s_max: int = _handshakes_per_s_max_setting()

    def validate(self) -> None:
        """Raise BadConfig if the values of different settings contradict each other."""
        _check_hosts(self.listen_host, self.advertised_host, self.http_host)
        super().validate()
        self._check_one_of("access", ACCESS_MODES)
        self._check_one_of("tls_transition", TLS_TRANSITIONS)
        if self.tls_transition and self.access == "on":
            raise BadConfig(
                'setting tls_transition must be empty with access = "on", because access '
                f"control requires TLS; found {self.tls_transition!r}"
            )
        _check_audit_log(self.audit_log, self.access)
        self._check_ports_differ("port", "http_port")
        self._check_at_most("retry_interval_ms_min", "retry_interval_ms_max")
        self._check_at_most("balance_interval_ms", "balance_window_ms")
        self._check_one_of("balance", BALANCE_MODES)
        self._check_at_most("batch_bytes_max", "partition_queue_bytes_max")
        self._check_at_most("batch_bytes_max", "connection_in_flight_bytes_max")
        reserved_bytes = (
            self.lock_table_bytes_max + self.feed_cache_bytes + self.transaction_cache_bytes
        )
        if reserved_bytes > self.memory_bytes_max:
            raise BadConfig(
                "setting memory_bytes_max: expected at least the sum of "
                "lock_table_bytes_max, feed_cache_bytes and transaction_cache_bytes "
                f"({reserved_bytes}), found {self.memory_bytes_max}"
            )


@dataclass(frozen=True, kw_only=True)
class ClientConfig(TlsConfig, ZooKeeperConfig):
    """The settings of a client; an application passes `ClientConfig(...)`, not a file."""

    kind: ClassVar[str] = "client"

    server_connect_timeout_ms: int = _ms_setting(
        5_000, "Maximum time for opening a connection to a server."
    )
    request_timeout_ms: int = _ms_setting(
        30_000,
        "Time for which the client tries to get the outcome of an append. After this time, the "
        "client reports the outcome as unknown. If it is too short, outcomes are unknown "
        "whenever a partition moves. If it is too long, an application notices a fault late.",
        minimum=100,
    )
    mount_timeout_ms: int = _ms_setting(
        10_000, "Time that one attempt to mount a partition may take."
    )
    traces: bool = setting(
        False,  # noqa: FBT003 - the name explains it
        "Whether the client records an OpenTelemetry span for each append, and for each group of "
        "transactions that it passes to callbacks. This needs `waltz-spark[traces]` and a tracer "
        "provider of the application.",
    )
    retry_interval_ms_min: int = _ms_setting(
        50, "The first pause before the client tries to connect to a server again."
    )
    retry_interval_ms_max: int = _ms_setting(
        2_000,
        "The longest pause before the client tries to connect to a server again. If it is "
        "too long, the client idles although the server runs again.",
    )
    in_flight_count_max: int = setting(
        20_000,
        "Maximum number of transactions of one partition that wait for their outcome; over the "
        "limit, `submit` waits. If it is too small, latency limits the throughput. If it is too "
        "large, memory use grows, and appends have older marks, so locks reject them more often.",
        minimum=1,
        maximum=10_000_000,
    )
    in_flight_bytes_max: int = _bytes_setting(
        32 * MIB,
        "Maximum bytes of the transactions of one partition that wait for their outcome; "
        "over the limit, `submit` waits.",
        minimum=5 * MIB,
    )
    batch_rows_max: int = setting(
        10_000,
        "Maximum number of transactions that the client sends in one append batch; the "
        "server may have a lower limit.",
        minimum=1,
        maximum=1_000_000,
    )
    batch_bytes_max: int = _bytes_setting(
        4 * MIB,
        "Maximum bytes that the client sends in one append batch; the server may have a "
        "lower limit.",
        minimum=64 * KIB,
        maximum=15 * MIB,
    )
    range_bytes_max: int = _bytes_setting(
        4 * MIB,
        "Maximum bytes of records that the client requests from a server or storage in one read "
        "of a range. A longer read consists of several requests.",
        minimum=64 * KIB,
        maximum=8 * MIB,
    )
    group: int = _group_setting(
        "The group of storages to which this client belongs, for example the number of its rack. "
        "The client prefers replicas of this group for reads of ranges. -1: no group; the client "
        "uses any replica."
    )
    feed_prefetch_count_max: int = setting(
        100_000,
        "Maximum number of transactions that the client has requested from the feed and not "
        "applied yet. If it is too small, there are frequent round trips. If it is too "
        "large, memory use grows.",
        minimum=100,
        maximum=100_000_000,
    )

    encryption_keys: str = setting(
        "",
        "The source of the keys for encrypted payloads: a directory with a file for each key, or "
        'a function in the form "module:function". If it is empty, the client neither encrypts '
        "nor decrypts payloads.",
    )
    encryption_key_id: str = setting(
        "",
        "The ID of the key with which the client encrypts payloads, unless an append names "
        "another key. If it is empty, these payloads are not encrypted.",
    )
    encryption_required: bool = setting(
        False,  # noqa: FBT003 - the name explains it
        "Whether the client rejects payloads that are not encrypted: it then returns None and a "
        "reason instead of the payload. If false, it returns these payloads.",
    )

    def validate(self) -> None:
        """Raise BadConfig if the values of different settings contradict each other."""
        super().validate()
        self._check_at_most("retry_interval_ms_min", "retry_interval_ms_max")
        self._check_at_most("batch_bytes_max", "in_flight_bytes_max")
        for name in ("encryption_key_id", "encryption_required"):
            if getattr(self, name) and not self.encryption_keys:
                raise BadConfig(
                    f"setting {name} requires setting encryption_keys, which is not set"
                )


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(LogConfig, TlsConfig, ZooKeeperConfig):
    """The settings of a gateway, which offers HTTP to applications in other languages."""

    kind: ClassVar[str] = "gateway"

    zookeeper_connect_timeout_ms: int = _zookeeper_connect_timeout_setting(60_000)
    listen_host: str = setting(
        "127.0.0.1",
        "The address at which the gateway listens. Another address than loopback requires "
        "`https_certificate`.",
    )
    port: int = _port_setting(
        15_380, "Port for HTTP requests of applications; 0 uses any free port."
    )
    https_certificate: str = setting(
        "",
        "A PEM file with the certificate of `port`, followed by its chain of issuers. If it "
        "is empty, the port uses HTTP without TLS. SIGHUP reads the file again.",
    )
    https_key: str = setting(
        "",
        "A PEM file with the private key of `https_certificate`. If it is empty, the key is "
        "in the file of `https_certificate`.",
    )
    insecure_network: bool = setting(
        False,  # noqa: FBT003 - the name explains it
        "Whether the gateway may listen on a non-loopback address without "
        "`https_certificate`. If true, every host on the way can read tokens and payloads, so "
        "use it only in a private network, or behind a proxy with TLS.",
    )
    http_host: str = _http_host_setting()
    http_port: int = _port_setting(
        0, "Port of the HTTP pages /livez, /readyz, /health and /metrics; 0 disables them."
    )
    connections_max: int = setting(
        1_024,
        "Maximum number of open connections of applications; the gateway closes further ones.",
        minimum=1,
        maximum=100_000,
    )
    body_bytes_max: int = _bytes_setting(
        8 * MIB,
        "Maximum size of the body of a request. If it is too large, few requests use all of "
        "`memory_bytes_max`.",
        minimum=64 * KIB,
        maximum=64 * MIB,
    )
    memory_bytes_max: int = _bytes_setting(
        256 * MIB,
        "Maximum bytes of the bodies of all requests that the gateway processes at the same "
        "time. Over the limit, it rejects appends with status 503.",
        minimum=MIB,
    )
    feeds_max: int = setting(
        256,
        "Maximum number of feeds that are open at the same time. Each feed has a connection to "
        "a server, and up to 4 MiB of payloads in memory.",
        minimum=1,
        maximum=100_000,
    )
    request_timeout_ms: int = _ms_setting(
        30_000,
        "Time after which the outcome of an append is unknown if no server has answered. The "
        "timeout of applications should be longer.",
        minimum=100,
    )
    idempotency_retention_ms: int = _ms_setting(
        60 * 60 * 1000,
        "Time for which the servers keep an idempotency key after the append. If it is too "
        "short, a late retry appends a second time. If it is too long, the 10,000 keys that a "
        "principal can have are used up.",
        minimum=1_000,
    )

    def validate(self) -> None:
        """Raise BadConfig if the values of different settings contradict each other."""
        _check_hosts(self.listen_host, self.listen_host or "localhost", self.http_host)
        super().validate()
        self._check_ports_differ("port", "http_port")
        self._check_at_most("body_bytes_max", "memory_bytes_max")
        if self.https_key and not self.https_certificate:
            raise BadConfig("setting https_key requires https_certificate, which is not set")


@dataclass(frozen=True, kw_only=True)
class LocalConfig(Config):
    """The settings of a cluster on one machine, for development, notebooks and tests."""

    kind: ClassVar[str] = "local"

    directory: str = setting(
        ".waltz", "The directory for data, configuration and logs of the cluster."
    )
    zookeeper_count: int = setting(
        1, "Number of ZooKeeper servers. Three tolerate the loss of one.", minimum=1, maximum=7
    )
    storage_count: int = setting(
        3,
        "Number of storages. Every partition has a replica on each of them.",
        minimum=1,
        maximum=9,
    )
    server_count: int = setting(
        2, "Number of servers, which share the partitions.", minimum=1, maximum=16
    )
    partition_count: int = setting(
        4,
        "Number of partitions. It is fixed when the directory is created.",
        minimum=1,
        maximum=1_024,
    )
    port_base: int = setting(
        0,
        "The first of the consecutive ports of all processes. Each storage has 3 ports, and each "
        "server has 2. A single ZooKeeper server has 1 port; each ZooKeeper server of an ensemble "
        "has 3. With 0, the processes use the usual ports where these are free, otherwise random "
        "ports. The setting is fixed when the directory is created.",
        minimum=0,
        maximum=65_000,
    )
    ready_timeout_ms: int = _ms_setting(
        300_000, "Time for which `up` waits until every partition accepts appends."
    )


CONFIG_TYPES_BY_KIND: dict[str, type[Config]] = {
    each.kind: each
    for each in (
        StorageConfig,
        ServerConfig,
        GatewayConfig,
        ClientConfig,
        TlsConfig,
        LocalConfig,
    )
}


def render_toml(kind: str, values: Mapping[str, object]) -> str:
    """Return the text of a configuration file for a kind of process, with only these values.

    Raises:
        BadConfig: an unknown kind or setting, or a value of another type or out of bounds.
    """
    if kind not in CONFIG_TYPES_BY_KIND:
        raise BadConfig(
            f"unknown kind of process {kind!r}{nearest_name_hint(kind, list(CONFIG_TYPES_BY_KIND))}"
        )
    return render_settings(CONFIG_TYPES_BY_KIND[kind], values)
