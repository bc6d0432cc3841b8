"""Every setting of every process: default, unit, bounds, and what too little or too much costs.

No other module has settings of its own, so this file is the whole list. A machine gets the few
numbers it needs, never a config object. `settings.py` declares, loads and writes settings.

Rules:
    1. A name ends with its unit; a port 0 means "any free one", an `http_port` 0 means "none".
    2. Sizes that are part of a format are no settings; they are declared with the format.
    3. The sentence of a setting states the cost of too small and too large values.

The samples in `conf/` are generated from here by `make docs`; a test compares them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from waltz_core.config.host_names import check_host
from waltz_core.config.settings import Config, nearest, render, setting
from waltz_core.errors import BadConfig

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
PORT_MAX = 65_535
MS_MAX = 24 * 60 * 60 * 1000
NO_GROUP = -1
BALANCE_MODES = ("count", "load")
TLS_MODES = ("", "on", "off")
TLS_CHECKS = ("name", "chain", "nothing")
TLS_TRANSITIONS = ("", "accept", "dial")
ACCESS_MODES = ("off", "report", "on")


def _connect() -> Any:  # noqa: ANN401 - see `setting`
    return setting(
        "",
        "ZooKeeper's hosts and the cluster's root. All processes of a cluster use the same value.",
        example="127.0.0.1:2181/waltz/local",
    )


def _port(default: int, doc: str) -> Any:  # noqa: ANN401 - see `setting`
    return setting(default, doc, minimum=0, maximum=PORT_MAX)


def _group(doc: str) -> Any:  # noqa: ANN401 - see `setting`
    return setting(NO_GROUP, doc, minimum=NO_GROUP, maximum=(1 << 31) - 1)


def _bytes(default: int, doc: str, *, minimum: int = KIB, maximum: int = 1024 * GIB) -> Any:  # noqa: ANN401 - see `setting`
    return setting(default, doc, minimum=minimum, maximum=maximum)


def _ms(default: int, doc: str, *, minimum: int = 1) -> Any:  # noqa: ANN401 - see `setting`
    return setting(default, doc, minimum=minimum, maximum=MS_MAX)


def _zookeeper_connect_timeout_ms(default: int) -> Any:  # noqa: ANN401 - see `setting`
    return _ms(
        default,
        "How long a start waits for a connection to ZooKeeper, and how long it repeats a request "
        "that ZooKeeper does not answer. Too long hides a wrong address.",
    )


@dataclass(frozen=True, kw_only=True)
class ZooKeeperConfig(Config):
    """The use of ZooKeeper by a process; part of every other kind."""

    connect: str = _connect()
    zookeeper_connect_timeout_ms: int = _zookeeper_connect_timeout_ms(10_000)
    zookeeper_session_timeout_ms: int = _ms(
        4_000,
        "Silence after which ZooKeeper ends this process's session. Too short: a pause of the "
        "machine moves partitions. Too long: the partitions of a dead server wait that long "
        "for a new owner.",
        minimum=500,
    )
    zookeeper_request_timeout_ms: int = _ms(
        10_000,
        "Time that one request to ZooKeeper may take before ZooKeeper counts as unavailable.",
    )


@dataclass(frozen=True, kw_only=True)
class TlsConfig(Config):
    """TLS: the certificate of a process, and how it verifies peers; part of every other kind."""

    kind: ClassVar[str] = "tls"

    tls: str = setting(
        "",
        'Whether connections use TLS 1.2 or 1.3: "on" or "off". Empty: as ?tls= of `connect` '
        "states, otherwise off. All processes of a cluster use the same value.",
    )
    tls_certificate: str = setting(
        "",
        "A PEM file: this process's certificate, followed by its chain. A daemon must have "
        "one; a client presents it if the peer requests it.",
    )
    tls_key: str = setting(
        "", "A PEM file: the certificate's private key. Empty: it is in `tls_certificate`."
    )
    tls_authorities: str = setting(
        "",
        "A PEM file: the trusted certificate authorities. Empty: those of the system.",
    )
    tls_verify: str = setting(
        "",
        'How the peer\'s certificate is verified: "name" (CA and host name), "chain" (CA only) '
        'or "nothing". Empty: "nothing" if the connect string has ?tls=unverified and '
        '`tls_authorities` is empty, otherwise "name".',
    )

    def validate(self) -> None:
        """Check relations between fields; raises BadConfig."""
        self._check_one_of("tls", TLS_MODES)
        if self.tls_verify:
            self._check_one_of("tls_verify", TLS_CHECKS)
        if self.tls_key and not self.tls_certificate:
            raise BadConfig("tls_key requires tls_certificate, which is not set")
        super().validate()


def _tls_require_certificate(*, default: bool) -> Any:  # noqa: ANN401 - see `setting`
    return setting(
        default,
        "Under TLS, whether the daemon accepts only peers whose certificate one of "
        "`tls_authorities` has signed.",
    )


def _access() -> Any:  # noqa: ANN401 - see `setting`
    return setting(
        "off",
        'Whether the daemon checks the permissions of its peers, for which it needs TLS: "off", '
        '"report" or "on". Each connection has a principal, from its token or its certificate, and '
        'an invalid token is rejected. "on" denies requests that are not granted; "report" only '
        "logs them. Certificates are verified if a peer presents one, with `tls_authorities`.",
    )


def _tls_transition() -> Any:  # noqa: ANN401 - see `setting`
    return setting(
        "",
        "For the switch of a running cluster to TLS, which `tls` must enable. Not empty: the "
        "ports also accept plain TCP, from peers without a certificate, and the daemon connects "
        'with plain TCP ("accept") or with TLS ("dial"). Empty: TLS only.',
    )


def _insecure_network() -> Any:  # noqa: ANN401 - see `setting`
    return setting(
        False,  # noqa: FBT003 - the name explains it
        'Whether the daemon may listen on a non-loopback address without `tls = "on"` and '
        '`access = "on"`, or with `tls_transition`. True: every host that can connect may read '
        "and write; only for a private network.",
    )


def _http_host() -> Any:  # noqa: ANN401 - see `setting`
    return setting(
        "127.0.0.1",
        "The address of the pages at `http_port`, which have no access control: other hosts "
        "that reach it may read metrics and addresses.",
    )


def _principal_pattern() -> Any:  # noqa: ANN401 - see `setting`
    return setting(
        "CN=(.+)",
        "A regular expression for a whole name of a client certificate: `CN=..`, `SUBJECT=..` "
        "(RFC 4514), `URI=..` or `DNS=..`. Its first group is the principal.",
    )


def _audit_log() -> Any:  # noqa: ANN401 - see `setting`
    return setting(
        "",
        "The file of the audit log: administrative requests, denied requests and revisions of the "
        "permissions, as JSON lines. An administrative request is rejected if the file cannot be "
        "written. SIGHUP opens it again. Needs `access`. Empty: none.",
    )


def _handshake_burst_max() -> Any:  # noqa: ANN401 - see `setting`
    return setting(
        2_000,
        "TLS handshakes that one host may begin at once; the daemon closes further connections. "
        "Too few: after a restart, peers with many partitions connect slowly. Too many: a hostile "
        "host delays the requests of others.",
        minimum=10,
        maximum=1_000_000,
    )


def _handshakes_per_s_max() -> Any:  # noqa: ANN401 - see `setting`
    return setting(
        100,
        "TLS handshakes per second of one host after `handshake_burst_max`. Clients behind one "
        "address share it. Too few and too many: as for the burst.",
        minimum=1,
        maximum=1_000_000,
    )


def _check_audit(audit_log: str, access: str) -> None:
    if audit_log and access == "off":
        raise BadConfig('audit_log requires access = "report" or "on", found "off"')


def _check_hosts(listen_host: str, advertised_host: str, http_host: str) -> None:
    """Raise BadConfig for an impossible host, or if the process would publish none."""
    bare = advertised_host.removeprefix("[").removesuffix("]")  # an IPv6 address may have them
    named = {"listen_host": listen_host, "advertised_host": bare, "http_host": http_host}
    for name, host in named.items():
        if not host:
            continue
        try:
            check_host(host)
        except ValueError as error:
            raise BadConfig(
                f"{name} {host!r} is not a valid host name: {error}. Hint: give the name, or the "
                "IP address, of this machine."
            ) from error
    if listen_host in ("", "0.0.0.0", "::") and not advertised_host:  # noqa: S104
        raise BadConfig(
            f"advertised_host: listen_host is {listen_host!r}, which other machines cannot "
            "connect to. Hint: set advertised_host to this machine's name or address."
        )


@dataclass(frozen=True, kw_only=True)
class StorageConfig(TlsConfig, ZooKeeperConfig):
    """A storage daemon."""

    kind: ClassVar[str] = "storage"

    # A daemon waits longer than a client: no user waits for it, and its log names what it awaits.
    zookeeper_connect_timeout_ms: int = _zookeeper_connect_timeout_ms(60_000)
    directory: str = setting(
        "",
        "The directory of the log. It belongs to one storage of one cluster, permanently.",
        example="data/storage",
    )
    listen_host: str = setting(
        "127.0.0.1",
        'The address to listen at; "0.0.0.0" for all, which requires `advertised_host`.',
    )
    port: int = _port(15_280, "Port for servers and readers. 0: any free one.")
    advertised_host: str = setting(
        "",
        "The host under which servers connect to the storage, part of its identity. Empty: "
        "`listen_host`.",
    )
    admin_port: int = _port(15_281, "Port for administration. 0: any free one.")
    http_host: str = _http_host()
    http_port: int = _port(0, "Port for /metrics, /health and /ping. 0: none.")
    segment_bytes_max: int = _bytes(
        1_000_000_000,
        "Size at which a segment file is full and the next one begins. Too small: many files "
        "and indexes. Too large: slow to check at a start and to copy.",
        minimum=4 * KIB,
        maximum=2_000_000_000,
    )
    open_files_max: int = setting(
        64,
        "Files held open over all partitions; a segment has three. Too few: files are reopened "
        "for appends and reads that alternate between many partitions. Too many: the process "
        "reaches its limit on open files, which connections need, too. Files with unsynced "
        "writes stay open beyond it, at most three for each partition.",
        minimum=8,
        maximum=65_536,
    )
    page_cache_bytes_max: int = _bytes(
        16 * MIB,
        "Recently appended bytes of each file that stay in the page cache after a sync; the "
        "storage releases older pages. Too small: readers that lag a little read from the "
        "disk. Too large: memory fills with pages that are not read, at the cost of new ones.",
        minimum=0,
    )
    reserve_bytes: int = _bytes(
        64 * MIB,
        "Space that is allocated in advance, and released when the disk is full, so that "
        "truncation, repair and writes of low-water marks still work. Too small: a full disk also "
        "stops repair.",
        minimum=0,
        maximum=64 * GIB,
    )
    scrub_bytes_per_s: int = _bytes(
        4 * MIB,
        "Rate at which old records are read again, over all partitions, so that the storage "
        "finds silent corruption while other replicas can repair it. 0: no scrub. Too slow: a "
        "terabyte takes weeks. Too fast: reads and syncs wait for it.",
        minimum=0,
        maximum=4 * GIB,
    )
    scrub_interval_ms: int = _ms(
        MS_MAX,
        "Minimum time between the starts of two scrubs of one log. Too short: a small log is "
        "read all day without need.",
        minimum=0,
    )
    trust_fsync: bool = setting(
        True,  # noqa: FBT003 - the name explains it
        "Whether the disk keeps what it reports as synced. False: after every restart of the "
        "machine a replica is suspect until it is repaired.",
    )
    writer_thread_count: int = setting(
        4,
        "Threads that write and sync, one call at a time for a partition. Too few: partitions "
        "wait for each other's syncs. Too many: they contend for the disk.",
        minimum=1,
        maximum=64,
    )
    queue_bytes_max: int = _bytes(
        64 * MIB,
        "Bytes of appends that wait for a writer thread, over all partitions. Over the limit, the "
        "storage does not read from connections. Reads for clients have the same limit of their "
        "own. Too small: each sync covers few appends. Too large: memory and latency.",
        minimum=32 * MIB,
    )
    archive_url: str = setting(
        "",
        "Where this storage archives ranges of its partitions, such as file:///srv/archive or "
        "s3://bucket/folder. All storages of a cluster use the same value. A copy of the cluster "
        "has the same key and would delete the files: set another archive there. Empty: no "
        "archive.",
    )
    archive_object_bytes: int = _bytes(
        64 * MIB,
        "Size of the records of one object in the archive. Too small: many objects, which are slow "
        "to read. Too large: memory, as an object is held until it is written and verified.",
        maximum=GIB,
    )
    archive_age_ms: int = _ms(
        600_000,
        "Age of the oldest transaction that is not archived yet, after which an object may be "
        "smaller. Too short: many small objects. Too long: the archive lags if appends are rare.",
        minimum=0,
    )
    archive_bytes_per_s: int = _bytes(
        0,
        "Rate at which this storage reads logs for the archive, and writes objects and reads them "
        "back, over all partitions. Too slow: the archive lags, and the disk fills. Too fast: "
        "appends and reads wait for the disk or the network. 0: no limit.",
        minimum=0,
        maximum=4 * GIB,
    )
    local_retention_bytes: int = _bytes(
        0,
        "Size of all logs over which the storage removes old segments that are archived. Too "
        "small: reads of older transactions wait for the archive. Too large: the disk fills. 0: no "
        "limit.",
        minimum=0,
    )
    local_retention_ms: int = setting(
        0,
        "Age of the transactions of a segment over which the storage removes it, if it is "
        "archived. Too short: reads of older transactions wait for the archive. Too long: the disk "
        "fills. 0: no limit.",
        minimum=0,
        maximum=100 * 365 * MS_MAX,
    )
    connections_max: int = setting(
        10_000,
        "Concurrent connections; the storage rejects more. Servers have one for each "
        "partition, and a second one while it moves.",
        minimum=4,
        maximum=100_000,
    )

    tls_require_certificate: bool = _tls_require_certificate(default=True)
    tls_transition: str = _tls_transition()
    insecure_network: bool = _insecure_network()
    access: str = _access()
    principal_pattern: str = _principal_pattern()
    audit_log: str = _audit_log()
    handshake_burst_max: int = _handshake_burst_max()
    handshakes_per_s_max: int = _handshakes_per_s_max()

    def validate(self) -> None:
        """Check relations between fields; raises BadConfig."""
        _check_hosts(self.listen_host, self.advertised_host, self.http_host)
        super().validate()
        self._check_one_of("access", ACCESS_MODES)
        self._check_one_of("tls_transition", TLS_TRANSITIONS)
        if self.tls_transition and self.access == "on":
            raise BadConfig(
                f'tls_transition: expected no value with access = "on", which requires TLS, found '
                f"{self.tls_transition!r}"
            )
        _check_audit(self.audit_log, self.access)
        self._check_ports_differ("port", "admin_port", "http_port")


@dataclass(frozen=True, kw_only=True)
class ServerConfig(TlsConfig, ZooKeeperConfig):
    """A server; `partition_...` settings apply per partition, `connection_...` per connection."""

    kind: ClassVar[str] = "server"

    # A daemon waits longer than a client: no user waits for it, and its log names what it awaits.
    zookeeper_connect_timeout_ms: int = _zookeeper_connect_timeout_ms(60_000)
    listen_host: str = setting(
        "127.0.0.1",
        'The address to listen at; "0.0.0.0" for all, which requires `advertised_host`.',
    )
    port: int = _port(15_180, "Port for clients. 0: any free one.")
    advertised_host: str = setting(
        "", "The host under which clients connect. Empty: `listen_host`."
    )
    advertised_port: int = _port(0, "The port under which clients connect. 0: `port`.")
    http_host: str = _http_host()
    http_port: int = _port(0, "Port for /metrics, /health and /ping. 0: none.")
    lock_slot_count: int = setting(
        1_048_573,
        "Slots of a partition's lock table, 8 bytes each; preferably a prime number. Too few: the "
        "server rejects appends of lagging clients although there is no conflict. Too many: the "
        "server needs more memory, and moves of partitions take longer.",
        minimum=101,
        maximum=134_217_689,
    )
    lock_table_bytes_max: int = _bytes(
        256 * MIB,
        "Bytes of the lock tables of all partitions. Over the limit, the server shrinks all "
        "tables.",
        minimum=MIB,
    )
    lock_refill_count_max: int = setting(
        1_000_000,
        "Number of recent transactions whose locks a new owner loads from the storages; it stops "
        "after 8 MiB of locks. Too few: after a move the server rejects appends of clients that "
        "lag more, without a real conflict. Too many: moves of partitions take longer. 0: none.",
        minimum=0,
        maximum=100_000_000,
    )
    feed_cache_bytes: int = _bytes(
        64 * MIB,
        "Bytes of the headers of recent transactions, over all partitions. Too small: feeds that "
        "lag a little read from storages.",
        minimum=MIB,
    )
    transaction_cache_bytes: int = _bytes(
        128 * MIB,
        "Bytes of recent transactions with their data, over all partitions. Too small: readers of "
        "recent data cost the storages' disks.",
        minimum=MIB,
    )
    memory_bytes_max: int = _bytes(
        GIB,
        "Bytes of all buffers, caches and tables of this server. Over the limit, the server "
        "rejects appends as overloaded and does not read from connections.",
        minimum=64 * MIB,
    )
    connections_max: int = setting(
        10_000, "Concurrent connections; the server rejects more.", minimum=4, maximum=100_000
    )
    connection_in_flight_bytes_max: int = _bytes(
        64 * MIB,
        "Bytes of unanswered requests of one connection. Over the limit, the server does not read "
        "from it.",
        minimum=16 * MIB,
    )
    connection_in_flight_count_max: int = setting(
        1_024,
        "Unanswered appends and batches of one connection. Over the limit, the server does not "
        "read from it.",
        minimum=1,
        maximum=1_000_000,
    )
    write_buffer_bytes_max: int = _bytes(
        MIB,
        "Bytes of answers that one client has not read yet. Over the limit, the server pauses the "
        "client's feed and requests until it has read some.",
        minimum=64 * KIB,
    )
    partition_queue_bytes_max: int = _bytes(
        32 * MIB,
        "Bytes of appends to one partition that wait for their lock check. Over the limit, the "
        "server rejects appends as overloaded.",
        minimum=16 * MIB,
    )
    partition_in_flight_bytes_max: int = _bytes(
        4 * MIB,
        "Bytes of records sent to replicas and not yet on a quorum of disks. Too small: the disks "
        "idle between syncs. Too large: latency, and memory for each replica.",
        minimum=64 * KIB,
    )
    partition_in_flight_batches_max: int = setting(
        64, "Batches sent to replicas and not yet on a quorum of disks.", minimum=1, maximum=65_536
    )
    small_requests_first: bool = setting(
        True,  # noqa: FBT003 - as above
        "Whether the server splits large batches, and pauses between the pieces, while small "
        "requests arrive; these then take at most twice as long as without large batches. False: "
        "the client that sends most gets the largest share.",
    )
    batch_rows_max: int = setting(
        16_384,
        "Rows in one append batch of a client. Too many: appends of other clients wait for it.",
        minimum=1,
        maximum=1_000_000,
    )
    batch_bytes_max: int = _bytes(
        8 * MIB, "Bytes of one append batch of a client.", minimum=5 * MIB, maximum=15 * MIB
    )
    replica_lag_bytes_max: int = _bytes(
        16 * MIB,
        "Bytes by which a replica may lag before the server catches it up from the logs of the "
        "others instead of from memory. Too small: a short pause costs reads. Too large: memory "
        "for each replica.",
        minimum=MIB,
    )
    checkpoint_interval_count: int = setting(
        250_000,
        "Number of transactions after which low-water marks are raised. Too many: a recovery "
        "compares more batches. Too few: the owner opens new sessions more often, each with a "
        "short pause.",
        minimum=100,
        maximum=1_000_000_000,
    )
    feed_frame_count_max: int = setting(
        4_096, "Transactions in one feed message.", minimum=1, maximum=65_536
    )
    feed_grant_count_min: int = setting(
        10_000,
        "Minimum number of transactions that the server feeds for one feed request of a client. "
        "Too small: frequent round trips.",
        minimum=1,
        maximum=10_000_000,
    )
    range_bytes_max: int = _bytes(
        4 * MIB, "Bytes of records in one answer to a reader.", minimum=64 * KIB, maximum=8 * MIB
    )
    group: int = _group(
        "The group of storages that this server is in. It reads from storages of this group "
        "where possible. -1: from all of them in turn."
    )
    partition_fetches_max: int = setting(
        8, "Concurrent reads from storages for one partition.", minimum=1, maximum=1_024
    )
    fence_count_max: int = setting(
        262_144,
        "Disconnected clients of one partition whose latest connection the server remembers, to "
        "reject older connections of the same client ID.",
        minimum=1_024,
        maximum=100_000_000,
    )
    retry_interval_ms_min: int = _ms(
        50, "The first pause before a replica is tried again. Too short: wasted work."
    )
    retry_interval_ms_max: int = _ms(
        2_000,
        "The longest pause before a replica is tried again. Too long: a storage that has returned "
        "stays unused.",
    )
    quorum_timeout_ms: int = _ms(
        12_000,
        "Time without a quorum after which a partition is assigned to another server, and "
        "within which a replica must answer. Too short: slow disks move partitions. Too long: a "
        "server that cannot connect to storages keeps them.",
        minimum=100,
    )
    slow_append_ms: int = _ms(
        250,
        "An append that a replica acknowledges only after this time is logged as `append.slow`, at "
        "most once a second for each replica. Too low: healthy disks are logged. 0: never.",
        minimum=0,
    )
    archive_interval_ms: int = _ms(
        0,
        "Pause between attempts to archive the committed transactions of a partition; the storages "
        "need an `archive_url`. Too short: storages check their logs without need. Too long: "
        "archive and removal of old segments lag. 0: nothing is archived.",
        minimum=0,
    )
    archive_retention_ms: int = _ms(
        0,
        "Age at which archived transactions expire: the log then begins after them, and their "
        "objects are deleted a day later. Too short: they cannot be read any more. 0: the archive "
        "keeps everything.",
        minimum=0,
    )
    mark_staleness_ms_max: int = _ms(
        2_000,
        "Maximum staleness of a mark that the server returns: the time for which an answer of a "
        "quorum of replicas remains valid. Too long: a server that has lost its partitions "
        "returns old marks. Too short: more queries to replicas.",
    )
    balance: str = setting(
        "count",
        'How partitions are spread over servers: by "count", the number of partitions, or by '
        '"load", the work that they cause. All servers use the same value.',
    )
    balance_interval_ms: int = _ms(
        5_000,
        'How often servers report loads and consider moves, if `balance` is "load". Too short: '
        "more load on ZooKeeper.",
        minimum=50,
    )
    balance_window_ms: int = _ms(
        30_000,
        "Loads are means over about this time. Too short: peaks move partitions. Too long: a "
        "slow response to a lasting change.",
        minimum=50,
    )
    balance_cooldown_ms: int = _ms(
        600_000,
        "Minimum time for which a partition that was moved for its load stays. Too short: "
        "partitions with varying loads move to and fro.",
        minimum=50,
    )
    open_wait_ms: int = _ms(
        5_000,
        "Time for which a read or mount waits for a store session before the server rejects it.",
    )

    tls_require_certificate: bool = _tls_require_certificate(default=False)
    tls_transition: str = _tls_transition()
    insecure_network: bool = _insecure_network()
    access: str = _access()
    principal_pattern: str = _principal_pattern()
    audit_log: str = _audit_log()
    handshake_burst_max: int = _handshake_burst_max()
    handshakes_per_s_max: int = _handshakes_per_s_max()

    def validate(self) -> None:
        """Check relations between fields; raises BadConfig."""
        _check_hosts(self.listen_host, self.advertised_host, self.http_host)
        super().validate()
        self._check_one_of("access", ACCESS_MODES)
        self._check_one_of("tls_transition", TLS_TRANSITIONS)
        if self.tls_transition and self.access == "on":
            raise BadConfig(
                f'tls_transition: expected no value with access = "on", which requires TLS, found '
                f"{self.tls_transition!r}"
            )
        _check_audit(self.audit_log, self.access)
        self._check_ports_differ("port", "http_port")
        self._check_at_most("retry_interval_ms_min", "retry_interval_ms_max")
        self._check_at_most("balance_interval_ms", "balance_window_ms")
        self._check_one_of("balance", BALANCE_MODES)
        self._check_at_most("batch_bytes_max", "partition_queue_bytes_max")
        self._check_at_most("batch_bytes_max", "connection_in_flight_bytes_max")
        held = self.lock_table_bytes_max + self.feed_cache_bytes + self.transaction_cache_bytes
        if held > self.memory_bytes_max:
            raise BadConfig(
                "memory_bytes_max: expected at least lock_table_bytes_max + feed_cache_bytes + "
                f"transaction_cache_bytes ({held}), found {self.memory_bytes_max}"
            )


@dataclass(frozen=True, kw_only=True)
class ClientConfig(TlsConfig, ZooKeeperConfig):
    """An application's client; it gets `ClientConfig(...)`, and reads no file and no variable."""

    kind: ClassVar[str] = "client"

    server_connect_timeout_ms: int = _ms(5_000, "Time that connecting to a server may take.")
    request_timeout_ms: int = _ms(
        30_000,
        "Time that an append may take before its outcome is unknown. Too short: unknown "
        "outcomes while a partition moves. Too long: an application learns of a fault late.",
        minimum=100,
    )
    mount_timeout_ms: int = _ms(10_000, "Time that one attempt to mount a partition may take.")
    retry_interval_ms_min: int = _ms(50, "The first pause before a server is tried again.")
    retry_interval_ms_max: int = _ms(
        2_000,
        "The longest pause before a server is tried again. Too long: idle time after a server has "
        "returned.",
    )
    in_flight_count_max: int = setting(
        20_000,
        "Transactions of one partition that wait for their outcome; beyond that, `submit` "
        "waits. Too few: latency limits throughput. Too many: memory, and stale locks.",
        minimum=1,
        maximum=10_000_000,
    )
    in_flight_bytes_max: int = _bytes(
        32 * MIB,
        "Bytes of the transactions of one partition that wait for their outcome; beyond that, "
        "`submit` waits.",
        minimum=5 * MIB,
    )
    batch_rows_max: int = setting(
        10_000,
        "Transactions sent in one append batch; the server may allow less.",
        minimum=1,
        maximum=1_000_000,
    )
    batch_bytes_max: int = _bytes(
        4 * MIB,
        "Bytes sent in one append batch; the server may allow less.",
        minimum=64 * KIB,
        maximum=15 * MIB,
    )
    range_bytes_max: int = _bytes(
        4 * MIB,
        "Bytes of records requested at once when reading.",
        minimum=64 * KIB,
        maximum=8 * MIB,
    )
    group: int = _group(
        "The group of storages that this client is in: reads of ranges from replicas use this "
        "group where possible. -1: any."
    )
    feed_ahead_count_max: int = setting(
        100_000,
        "Maximum number of transactions that the client has requested from the feed and not "
        "applied yet. Too few: frequent round trips. Too many: memory.",
        minimum=100,
        maximum=100_000_000,
    )

    encryption_keys: str = setting(
        "",
        "The keys of encrypted payloads: a directory with a file for each key, or "
        '"module:function". Empty: payloads are neither encrypted nor decrypted.',
    )
    encryption_key: str = setting(
        "",
        "The ID of the key that encrypts appended payloads, unless an append names another one. "
        "Empty: such payloads are not encrypted.",
    )
    encryption_required: bool = setting(
        False,  # noqa: FBT003 - the name explains it
        "Whether a payload that is not encrypted is read as None, with a reason. False: it is "
        "returned.",
    )

    def validate(self) -> None:
        """Check relations between fields; raises BadConfig."""
        super().validate()
        self._check_at_most("retry_interval_ms_min", "retry_interval_ms_max")
        self._check_at_most("batch_bytes_max", "in_flight_bytes_max")
        for name in ("encryption_key", "encryption_required"):
            if getattr(self, name) and not self.encryption_keys:
                raise BadConfig(f"{name} requires encryption_keys, which is not set")


@dataclass(frozen=True, kw_only=True)
class LocalConfig(Config):
    """A cluster of processes on one machine, for development, notebooks and tests."""

    kind: ClassVar[str] = "local"

    directory: str = setting(".waltz", "The directory of data, configuration and logs.")
    zookeeper_count: int = setting(
        1, "ZooKeeper servers. Three tolerate the loss of one.", minimum=1, maximum=7
    )
    storage_count: int = setting(
        3, "Storages. Every partition has a replica on each.", minimum=1, maximum=9
    )
    server_count: int = setting(2, "Servers, which share the partitions.", minimum=1, maximum=16)
    partition_count: int = setting(
        4, "Partitions. Fixed for the life of the directory.", minimum=1, maximum=1_024
    )
    port_base: int = setting(
        0,
        "First of the consecutive ports of all processes: 3 for each storage, 2 for each server, 1 "
        "for a single ZooKeeper server, or 3 for each of several. 0: the usual ports where they "
        "are free, and random ones. Fixed for the life of the directory.",
        minimum=0,
        maximum=65_000,
    )
    ready_timeout_ms: int = _ms(
        300_000, "How long `up` waits until every partition accepts appends."
    )


KINDS: dict[str, type[Config]] = {
    each.kind: each for each in (StorageConfig, ServerConfig, ClientConfig, TlsConfig, LocalConfig)
}


def render_toml(kind: str, values: Mapping[str, object]) -> str:
    """Return the text of a configuration file with these values and nothing else.

    Raises:
        BadConfig: an unknown kind or setting, or a value of another type or out of bounds.
    """
    if kind not in KINDS:
        raise BadConfig(f"unknown kind of process {kind!r}{nearest(kind, list(KINDS))}")
    return render(KINDS[kind], values)
