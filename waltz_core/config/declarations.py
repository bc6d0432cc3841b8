"""Every setting of every process: default, unit, bounds, and what too little or too much costs.

No other module has settings of its own, so this file is the whole list. A machine is given the few
numbers it needs, never a config object. How settings are declared, loaded and written is
`settings.py`.

Rules:
    1. A name ends with its unit; a port 0 means "any free one", an `http_port` 0 means "none".
    2. Sizes that formats rest on are no settings; they stand beside the format.
    3. What a field costs when it is too small and too large stands in its sentence.

The samples in `conf/` are written from here by `make docs`; a test compares them.
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
BALANCES = ("count", "load")
TLS_WORDS = ("", "on", "off")
TLS_CHECKS = ("name", "chain", "nothing")


def _connect() -> Any:  # noqa: ANN401 - see `setting`
    return setting(
        "",
        "ZooKeeper's hosts and the cluster's root. All processes of a cluster have the same.",
        example="127.0.0.1:2181/waltz/local",
    )


def _port(default: int, doc: str) -> Any:  # noqa: ANN401 - see `setting`
    return setting(default, doc, least=0, most=PORT_MAX)


def _group(doc: str) -> Any:  # noqa: ANN401 - see `setting`
    return setting(NO_GROUP, doc, least=NO_GROUP, most=(1 << 31) - 1)


def _bytes(default: int, doc: str, *, least: int = KIB, most: int = 1024 * GIB) -> Any:  # noqa: ANN401 - see `setting`
    return setting(default, doc, least=least, most=most)


def _ms(default: int, doc: str, *, least: int = 1) -> Any:  # noqa: ANN401 - see `setting`
    return setting(default, doc, least=least, most=MS_MAX)


def _zookeeper_connect_timeout_ms(default: int) -> Any:  # noqa: ANN401 - see `setting`
    return _ms(
        default,
        "How long a start waits for a connection to ZooKeeper, and how long it repeats a request "
        "that ZooKeeper does not answer. Too long hides a wrong address.",
    )


@dataclass(frozen=True, kw_only=True)
class ZooKeeperConfig(Config):
    """How a process deals with ZooKeeper; part of every other kind."""

    connect: str = _connect()
    zookeeper_connect_timeout_ms: int = _zookeeper_connect_timeout_ms(10_000)
    zookeeper_session_timeout_ms: int = _ms(
        4_000,
        "After how much silence ZooKeeper takes this process for dead. Too short: a pause of the "
        "machine moves partitions. Too long: a dead server's partitions wait that long.",
        least=500,
    )
    zookeeper_request_timeout_ms: int = _ms(
        10_000, "How long one request to ZooKeeper may take before it counts as unavailable."
    )


@dataclass(frozen=True, kw_only=True)
class TlsConfig(Config):
    """TLS: what a process shows of itself, and asks of whom it dials; part of every other kind."""

    kind: ClassVar[str] = "tls"

    tls: str = setting(
        "",
        'Whether connections are wrapped in TLS, 1.2 or 1.3: "on" or "off". Empty: as `connect` '
        "says behind ?tls=, else off. All processes of a cluster do the same.",
    )
    tls_certificate: str = setting(
        "",
        "A PEM file: this process's certificate, then those that lead to an authority. A daemon "
        "must have one; who dials shows it where it is asked for.",
    )
    tls_key: str = setting(
        "", "A PEM file: the certificate's private key. Empty: it is in `tls_certificate`."
    )
    tls_authorities: str = setting(
        "",
        "A PEM file: the authorities whose certificates are believed. Empty: those of the system.",
    )
    tls_verify: str = setting(
        "",
        'What is checked of whom we dial: "name", that an authority has signed his certificate for '
        'the host that was dialled; "chain", any that it has signed; "nothing". Empty: as ?tls= '
        "says, else the name; also where ?tls=unverified meets `tls_authorities`.",
    )

    def validate(self) -> None:
        """Check relations between fields; raises BadConfig."""
        self._among("tls", TLS_WORDS)
        if self.tls_verify:
            self._among("tls_verify", TLS_CHECKS)
        if self.tls_key and not self.tls_certificate:
            raise BadConfig("tls_key: expected tls_certificate beside it, found none")
        super().validate()


def _tls_require_certificate(*, default: bool) -> Any:  # noqa: ANN401 - see `setting`
    return setting(
        default,
        "Under TLS, whether only those are let in who show a certificate that one of "
        "`tls_authorities` has signed.",
    )


def _check_hosts(listen_host: str, advertised_host: str) -> None:
    """Raise BadConfig for an impossible host, or where the process would publish none."""
    bare = advertised_host.removeprefix("[").removesuffix("]")  # an IPv6 address may have them
    for name, host in (("listen_host", listen_host), ("advertised_host", bare)):
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
            f"advertised_host: listen_host is {listen_host!r}, which is no address that others can "
            "connect to; set advertised_host to this machine's name or address"
        )


@dataclass(frozen=True, kw_only=True)
class StorageConfig(TlsConfig, ZooKeeperConfig):
    """A storage daemon."""

    kind: ClassVar[str] = "storage"

    # A daemon waits longer than a client: no person waits for it, and its log says what it awaits.
    zookeeper_connect_timeout_ms: int = _zookeeper_connect_timeout_ms(60_000)
    directory: str = setting(
        "",
        "Where the log lies. One directory belongs to one storage of one cluster, for ever.",
        example="data/storage",
    )
    listen_host: str = setting(
        "127.0.0.1",
        'The address to listen at; "0.0.0.0" for every one, which needs `advertised_host`.',
    )
    port: int = _port(15_280, "For servers and readers. 0: any free one.")
    advertised_host: str = setting(
        "", "The host under which servers reach it, part of its identity. Empty: `listen_host`."
    )
    admin_port: int = _port(15_281, "For administration. 0: any free one.")
    http_port: int = _port(0, "For /metrics, /health and /ping. 0: none.")
    segment_bytes_max: int = _bytes(
        1_000_000_000,
        "When a segment file is full and the next begins. Too small: many files and indexes. "
        "Too large: slow to check at a start and to copy.",
        least=4 * KIB,
        most=2_000_000_000,
    )
    open_files_max: int = setting(
        64,
        "Files held open over all partitions; a segment has three. Too few: files are opened again "
        "for appends and reads that go round many partitions. Too many: the limit of the process "
        "on open files, which connections need too. Those with writes that are not synced stay "
        "open beyond it, at most three for each partition.",
        least=8,
        most=65_536,
    )
    cached_bytes_max: int = _bytes(
        16 * MIB,
        "Of each file, how much of what was appended last the system's memory keeps once it is "
        "synced; older bytes are given back. Too small: whoever is a little behind reads from the "
        "disk. Too large: memory fills with what nobody reads, at the cost of new pages.",
        least=0,
    )
    reserve_bytes: int = _bytes(
        64 * MIB,
        "Space set aside, given back when the disk is full, so that repair and marks still work. "
        "Too small: a full disk also stops repair.",
        least=0,
        most=64 * GIB,
    )
    scrub_bytes_per_s: int = _bytes(
        4 * MIB,
        "How fast old records are read again, over all partitions, so that rot is found while "
        "other replicas can mend it. 0: not at all. Too slow: a terabyte takes weeks. Too fast: "
        "reads and syncs wait for it.",
        least=0,
        most=4 * GIB,
    )
    scrub_interval_ms: int = _ms(
        MS_MAX,
        "A log is read again no sooner than so long after the last time has begun. Too short: a "
        "small log is read all day for nothing.",
        least=0,
    )
    trust_fsync: bool = setting(
        True,  # noqa: FBT003 - it stands for itself, beside its name
        "Whether the disk keeps what it says it has synced. False: after every restart of the "
        "machine a replica counts as suspect until it was repaired.",
    )
    writer_threads_count: int = setting(
        4,
        "Threads that write and sync, one call at a time for a partition. Too few: partitions wait "
        "for one another's syncs. Too many: they only contend for the disk.",
        least=1,
        most=64,
    )
    queue_bytes_max: int = _bytes(
        64 * MIB,
        "Appends that wait for a writer, over all partitions. Full: connections are not read. "
        "Too small: a sync has little to do. Too large: memory and latency.",
        least=32 * MIB,
    )
    connections_max: int = setting(
        10_000,
        "Connections at one time; more are refused. Servers have one for each partition, and a "
        "second one while it moves.",
        least=4,
        most=100_000,
    )

    tls_require_certificate: bool = _tls_require_certificate(default=True)

    def validate(self) -> None:
        """Check relations between fields; raises BadConfig."""
        _check_hosts(self.listen_host, self.advertised_host)
        super().validate()
        self._differ("port", "admin_port", "http_port")


@dataclass(frozen=True, kw_only=True)
class ServerConfig(TlsConfig, ZooKeeperConfig):
    """A server daemon; what begins with `partition_` or `connection_` holds for each of them."""

    kind: ClassVar[str] = "server"

    # A daemon waits longer than a client: no person waits for it, and its log says what it awaits.
    zookeeper_connect_timeout_ms: int = _zookeeper_connect_timeout_ms(60_000)
    listen_host: str = setting(
        "127.0.0.1",
        'The address to listen at; "0.0.0.0" for every one, which needs `advertised_host`.',
    )
    port: int = _port(15_180, "For clients. 0: any free one.")
    advertised_host: str = setting("", "The host that clients are told. Empty: `listen_host`.")
    advertised_port: int = _port(0, "The port that clients are told. 0: `port`.")
    http_port: int = _port(0, "For /metrics, /health and /ping. 0: none.")
    lock_slot_count: int = setting(
        1_048_573,
        "Slots of a partition's lock table, 8 bytes each; best a prime. Too few: clients that lag "
        "are refused without a conflict. Too many: memory, and time when a partition moves.",
        least=101,
        most=134_217_689,
    )
    lock_table_bytes_max: int = _bytes(
        256 * MIB,
        "Lock tables of all partitions together. Over it, all tables are made smaller.",
        least=MIB,
    )
    lock_refill_count_max: int = setting(
        1_000_000,
        "Of so many of the last transactions a new owner learns the locks from the storages, 8 MiB "
        "of them at most. Too few: after a move clients that lag more are refused without a "
        "conflict. Too many: work when a partition moves. 0: none.",
        least=0,
        most=100_000_000,
    )
    feed_cache_bytes: int = _bytes(
        64 * MIB,
        "Headers of recent transactions, over all partitions. Too small: feeds that lag a little "
        "read from storages.",
        least=MIB,
    )
    transaction_cache_bytes: int = _bytes(
        128 * MIB,
        "Recent transactions with their data, over all partitions. Too small: readers of recent "
        "data cost the storages' disks.",
        least=MIB,
    )
    memory_bytes_max: int = _bytes(
        GIB,
        "All of this server's buffers, caches and tables. Over it, appends are refused as "
        "overloaded and connections are not read.",
        least=64 * MIB,
    )
    connections_max: int = setting(
        10_000, "Connections at one time; more are refused.", least=4, most=100_000
    )
    connection_in_flight_bytes_max: int = _bytes(
        64 * MIB,
        "Requests of one connection that are not answered yet. Over it, it is not read.",
        least=16 * MIB,
    )
    connection_in_flight_max: int = setting(
        1_024,
        "Appends and batches of one connection that are not answered yet. Over it, it is not read.",
        least=1,
        most=1_000_000,
    )
    write_buffer_bytes_max: int = _bytes(
        MIB,
        "Answers that one client has not taken yet. Over it, it is fed and read no more until it "
        "has taken some.",
        least=64 * KIB,
    )
    partition_queue_bytes_max: int = _bytes(
        32 * MIB,
        "Appends that wait to be judged. Full: they are refused as overloaded.",
        least=16 * MIB,
    )
    partition_in_flight_bytes_max: int = _bytes(
        4 * MIB,
        "Records sent to replicas and not on a quorum of disks yet. Too small: the disks idle "
        "between syncs. Too large: latency, and memory for each replica.",
        least=64 * KIB,
    )
    partition_in_flight_batches_max: int = setting(
        64, "Batches sent to replicas and not on a quorum of disks yet.", least=1, most=65_536
    )
    small_requests_first: bool = setting(
        True,  # noqa: FBT003 - as above
        "While small requests come too, large batches go in pieces with pauses, so that others "
        "wait for at most twice as long as alone. Off: whoever sends most gets most.",
    )
    batch_rows_max: int = setting(
        16_384,
        "Rows of one append batch of a client. Too many: other clients' appends wait for it.",
        least=1,
        most=1_000_000,
    )
    batch_bytes_max: int = _bytes(
        8 * MIB, "Bytes of one append batch of a client.", least=5 * MIB, most=15 * MIB
    )
    replica_lag_bytes_max: int = _bytes(
        16 * MIB,
        "How far a replica may fall behind before it is fed from the others' logs instead of from "
        "memory. Too small: a short pause costs reads. Too large: memory for each replica.",
        least=MIB,
    )
    checkpoint_interval_count: int = setting(
        250_000,
        "After how many transactions low-water marks are raised. Too many: a recovery compares "
        "more. Too few: a new session, and a short pause, more often.",
        least=100,
        most=1_000_000_000,
    )
    feed_frame_count_max: int = setting(
        4_096, "Transactions of one feed message.", least=1, most=65_536
    )
    feed_grant_count_min: int = setting(
        10_000,
        "The least that a client may ask to be fed ahead. Too small: a round trip too often.",
        least=1,
        most=10_000_000,
    )
    range_bytes_max: int = _bytes(
        4 * MIB, "Records of one answer to a reader.", least=64 * KIB, most=8 * MIB
    )
    group: int = _group(
        "The group of storages that this server is in. What it reads from a storage it reads from "
        "one of these where it can. -1: from all of them in turn."
    )
    partition_fetches_max: int = setting(
        8, "Reads from storages at one time for one partition.", least=1, most=1_024
    )
    fences_count_max: int = setting(
        262_144,
        "Clients whose latest connection is remembered after they left, for one partition.",
        least=1_024,
        most=100_000_000,
    )
    retry_interval_ms_min: int = _ms(
        50, "The first pause before a replica is tried again. Too short: busy for nothing."
    )
    retry_interval_ms_max: int = _ms(
        2_000, "The longest such pause. Too long: a storage that is back waits to be used."
    )
    quorum_timeout_ms: int = _ms(
        12_000,
        "How long a partition may be without a quorum before it is given to another server. Too "
        "short: slow disks move partitions. Too long: a server that reaches no storage keeps them.",
        least=100,
    )
    slow_append_ms: int = _ms(
        250,
        "Appends that a replica takes this long to answer are logged as `append.slow` with the "
        "replica, at most once a second for each. Too low: healthy disks are logged. 0: never.",
        least=0,
    )
    session_timer_ms: int = _ms(
        2_000,
        "For how long after a quorum has answered marks are told without asking it again. Too "
        "long: a server that has lost its partitions tells old marks.",
    )
    balance: str = setting(
        "count",
        'What partitions are spread by: "count", or "load", what they cost their server. The same '
        "for all servers.",
    )
    balance_interval_ms: int = _ms(
        5_000,
        'How often loads are told, and moves considered, where `balance` is "load". Too short: '
        "work for ZooKeeper.",
        least=50,
    )
    balance_window_ms: int = _ms(
        30_000,
        "Loads are means over about so long. Too short: peaks move partitions. Too long: a lasting "
        "change is answered late.",
        least=50,
    )
    balance_rest_ms: int = _ms(
        600_000,
        "A partition that was moved for its load stays at least so long. Too short: partitions "
        "whose loads come and go move to and fro.",
        least=50,
    )
    open_wait_ms: int = _ms(
        5_000, "How long a read or mount waits for a store session before it is refused."
    )

    tls_require_certificate: bool = _tls_require_certificate(default=False)

    def validate(self) -> None:
        """Check relations between fields; raises BadConfig."""
        _check_hosts(self.listen_host, self.advertised_host)
        super().validate()
        self._differ("port", "http_port")
        self._not_above("retry_interval_ms_min", "retry_interval_ms_max")
        self._not_above("balance_interval_ms", "balance_window_ms")
        self._among("balance", BALANCES)
        self._not_above("batch_bytes_max", "partition_queue_bytes_max")
        self._not_above("batch_bytes_max", "connection_in_flight_bytes_max")
        held = self.lock_table_bytes_max + self.feed_cache_bytes + self.transaction_cache_bytes
        if held > self.memory_bytes_max:
            raise BadConfig(
                "memory_bytes_max: expected at least lock_table_bytes_max + feed_cache_bytes + "
                f"transaction_cache_bytes ({held}), found {self.memory_bytes_max}"
            )


@dataclass(frozen=True, kw_only=True)
class ClientConfig(TlsConfig, ZooKeeperConfig):
    """An application's client, and each Spark task."""

    kind: ClassVar[str] = "client"

    dial_timeout_ms: int = _ms(5_000, "How long making one connection to a server may take.")
    request_timeout_ms: int = _ms(
        30_000,
        "How long an append may take before its outcome is unknown. Too short: unknown outcomes "
        "while a partition moves. Too long: an application learns late.",
        least=100,
    )
    mount_timeout_ms: int = _ms(10_000, "How long one try to mount a partition may take.")
    retry_interval_ms_min: int = _ms(50, "The first pause before a server is tried again.")
    retry_interval_ms_max: int = _ms(
        2_000, "The longest such pause. Too long: idle after a server is back."
    )
    in_flight_count_max: int = setting(
        20_000,
        "Transactions of one partition that wait for their outcome; more make `submit` wait. Too "
        "few: throughput is bound by latency. Too many: memory, and stale locks.",
        least=1,
        most=10_000_000,
    )
    in_flight_bytes_max: int = _bytes(32 * MIB, "The same in bytes.", least=5 * MIB)
    batch_rows_max: int = setting(
        10_000,
        "Transactions sent in one append batch; the server may allow less.",
        least=1,
        most=1_000_000,
    )
    batch_bytes_max: int = _bytes(
        4 * MIB,
        "Bytes sent in one append batch; the server may allow less.",
        least=64 * KIB,
        most=15 * MIB,
    )
    range_bytes_max: int = _bytes(
        4 * MIB, "Records asked for at once when reading.", least=64 * KIB, most=8 * MIB
    )
    group: int = _group(
        "The group of storages that this client is in: ranges that are read from replicas come "
        "from these where they can. -1: from any."
    )
    feed_ahead_count_max: int = setting(
        100_000,
        "Transactions fed and not applied yet, beyond which no more is asked for. Too few: a round "
        "trip too often. Too many: memory.",
        least=100,
        most=100_000_000,
    )

    def validate(self) -> None:
        """Check relations between fields; raises BadConfig."""
        super().validate()
        self._not_above("retry_interval_ms_min", "retry_interval_ms_max")
        self._not_above("batch_bytes_max", "in_flight_bytes_max")


@dataclass(frozen=True, kw_only=True)
class LocalConfig(Config):
    """A cluster of processes on one machine, for development, notebooks and tests."""

    kind: ClassVar[str] = "local"

    directory: str = setting(".waltz", "Where data, configuration and logs lie.")
    zookeeper_count: int = setting(
        1, "Nodes of ZooKeeper. Three bear the loss of one.", least=1, most=7
    )
    storage_count: int = setting(
        3, "Storages. Every partition has a replica on each.", least=1, most=9
    )
    server_count: int = setting(2, "Servers, which share the partitions.", least=1, most=16)
    partition_count: int = setting(
        4, "Partitions. Fixed for the life of the directory.", least=1, most=1_024
    )
    port_base: int = setting(
        0,
        "First of the consecutive ports of all processes: 3 for each storage, 2 for each server, 1 "
        "for ZooKeeper, or 3 for each of its nodes. 0: the usual ports where they are free, and "
        "random ones. Fixed for the life of the directory.",
        least=0,
        most=65_000,
    )
    ready_timeout_ms: int = _ms(300_000, "How long `up` waits until every partition takes appends.")


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
