"""The packages in `conf/` match the program: settings, commands, ports, probes and versions."""

import re
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.commands import parse_command
from tests.tidy.packages import (
    CHART_FOLDER,
    DAEMONS,
    DOCKER_FOLDER,
    MANIFESTS_FILE,
    SYSTEMD_FOLDER,
    PackagedDaemon,
    compose_daemons,
    compose_services,
    image_variables,
    kubernetes_daemons,
    manifests_of_kind,
    pod_specification,
    replicated_workloads,
    tls_settings,
    yaml_documents,
)
from tests.tidy.sources import PROJECT_ROOT, read_text
from waltz_core import __version__
from waltz_core.config import (
    CONFIG_TYPES_BY_KIND,
    GatewayConfig,
    ServerConfig,
    StorageConfig,
    TlsConfig,
)
from waltz_core.config.connect_string import parse_connect_string
from waltz_core.config.declarations import render_toml
from waltz_core.transport.tls import check_network

FILES_MAX = 15
PAGES = set(re.findall(r'"(/[a-z]+)": ', read_text("waltz_core/daemon_pages.py")))
DEFAULT_PORTS = {
    "server": {"port": ServerConfig(connect="z:1/w").port, "http_port": 15182},
    "storage": {
        "port": StorageConfig(connect="z:1/w", directory="d").port,
        "admin_port": StorageConfig(connect="z:1/w", directory="d").admin_port,
        "http_port": 15282,
    },
    "gateway": {"port": GatewayConfig(connect="z:1/w").port, "http_port": 15382},
}
UNITS = [SYSTEMD_FOLDER / f"waltz-{kind}.service" for kind in DAEMONS]


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> list[PackagedDaemon]:
    return list(kubernetes_daemons(tmp_path_factory.mktemp("settings")))


def unit_lines(unit: Path, name: str) -> list[str]:
    return re.findall(rf"(?m)^{name}=(.*)$", unit.read_text(encoding="utf-8"))


# --- Versions


def test_the_chart_images_and_manifests_have_the_version_of_the_project() -> None:
    (chart,) = yaml_documents(CHART_FOLDER / "Chart.yaml")
    assert chart["appVersion"] == __version__
    # Helm requires semantic versions.
    assert chart["version"] == __version__.replace(".dev", "-dev.")
    page = PROJECT_ROOT / "docs" / "packages.md"
    files = (DOCKER_FOLDER / "Dockerfile", DOCKER_FOLDER / "compose.yaml", MANIFESTS_FILE, page)
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    tags = {
        (path.name, tag)
        for path, text in texts.items()
        for tag in re.findall(r"waltz-spark(?:-notebook)?:([\w.-]+)", text)
    }
    assert tags == {(path.name, __version__) for path in files}


def test_folders_are_small() -> None:
    for folder in (
        DOCKER_FOLDER,
        SYSTEMD_FOLDER,
        CHART_FOLDER,
        CHART_FOLDER / "templates",
        MANIFESTS_FILE.parent,
    ):
        assert 0 < len(list(folder.iterdir())) <= FILES_MAX


def test_file_headers_name_the_parts_that_no_test_runs() -> None:
    headers = [
        DOCKER_FOLDER / "Dockerfile",
        DOCKER_FOLDER / "compose.yaml",
        CHART_FOLDER / "Chart.yaml",
        MANIFESTS_FILE,
        *UNITS,
    ]
    silent = [
        path.name
        for path in headers
        if not re.search(r"# [^\n]*Not\s(# )?run:", path.read_text(encoding="utf-8"))
    ]
    assert silent == []


# --- The image


def test_the_build_copies_existing_files_and_what_the_wheel_needs() -> None:
    text = (DOCKER_FOLDER / "Dockerfile").read_text(encoding="utf-8")
    copied = [
        name
        for line in re.findall(r"(?m)^COPY (?!--from)(.*)$", text)
        for name in line.split()[:-1]
    ]
    assert [name for name in copied if not (PROJECT_ROOT / name).exists()] == []
    needed = re.findall(
        r'"([\w./]+)"',
        re.search(r"(?m)^only-include = (.*)$", read_text("pyproject.toml")).group(1),
    )
    assert set(needed) < set(copied)


def test_the_exposed_ports_are_the_default_ports_of_the_daemons() -> None:
    text = (DOCKER_FOLDER / "Dockerfile").read_text(encoding="utf-8")
    exposed = re.findall(r"(?m)^EXPOSE (.*)$", text)[0]
    ports = {port for default_port in DEFAULT_PORTS.values() for port in default_port.values()}
    assert {int(port) for port in exposed.split()} == ports


class _Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/livez" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Discard log messages."""


@pytest.mark.parametrize("is_alive", [True, False])
@pytest.mark.parametrize("variable", image_variables())
def test_the_health_check_of_the_image_reads_livez(variable: str, *, is_alive: bool) -> None:
    with HTTPServer(("127.0.0.1", 0), _Pages) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        port = server.server_port if is_alive else 1
        ports = dict.fromkeys(image_variables(), "1") | {variable: str(port)}
        ran = subprocess.run([sys.executable, DOCKER_FOLDER / "livez.py"], env=ports, check=False)
        server.shutdown()
        thread.join()
    assert ran.returncode == (0 if is_alive else 1)
    assert "/livez" in PAGES


# --- Compose


def test_daemons_of_the_compose_file_have_valid_settings() -> None:
    daemons = list(compose_daemons())
    kinds = ["storage"] * 3 + ["server"] * 2 + ["gateway"]
    assert [daemon.command for daemon in daemons] == [[kind, "run"] for kind in kinds]
    for daemon in daemons:
        assert getattr(daemon.config, "advertised_host", daemon.name) == daemon.name
        assert daemon.config.insecure_network
        assert daemon.ports == DEFAULT_PORTS[daemon.command[0]]
        assert parse_command(daemon.command)


def test_the_compose_file_creates_a_cluster_with_all_its_storages() -> None:
    services = compose_services()
    options = parse_command(services["create"]["command"])
    storages = [
        compose_daemon
        for compose_daemon in compose_daemons()
        if isinstance(compose_daemon.config, StorageConfig)
    ]
    assert list(options["storage"]) == [address_of(storage) for storage in storages]
    connects = {
        service["environment"]["WALTZ_CONNECT"]
        for name, service in services.items()
        if not name.startswith("zookeeper")
    }
    assert {storage.config.connect for storage in storages} == connects
    hosts = parse_connect_string(connects.pop()).hosts
    assert list(hosts) == [f"{name}:2181" for name in services if name.startswith("zookeeper")]


def test_the_compose_file_refers_only_to_existing_services_and_volumes() -> None:
    (content,) = yaml_documents(DOCKER_FOLDER / "compose.yaml")
    for service in content["services"].values():
        assert set(service.get("depends_on", ())) <= set(content["services"])
        volumes = {each.split(":")[0] for each in service.get("volumes", ())}
        assert volumes <= set(content["volumes"])
        assert all(each.startswith("127.0.0.1:") for each in service.get("ports", ()))


def address_of(storage: PackagedDaemon) -> str:
    config = storage.config
    assert isinstance(config, StorageConfig)
    return f"{config.advertised_host}:{config.port}:{config.admin_port}"


# --- systemd


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_units_start_existing_commands_as_their_user(unit: Path) -> None:
    (start,) = unit_lines(unit, "ExecStart")
    program, kind, *options = start.split()
    assert program == "/opt/waltz/bin/waltz-core"
    assert options == ["run", "--config", f"/etc/waltz/{kind}.toml"]
    parse_command([kind, "run"])
    (user,) = unit_lines(unit, "User")
    assert re.search(
        rf"(?m)^u {user} ", (SYSTEMD_FOLDER / "waltz.sysusers").read_text(encoding="utf-8")
    )


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_units_permit_enough_open_files_for_all_connections(unit: Path) -> None:
    (limit,) = unit_lines(unit, "LimitNOFILE")
    config = StorageConfig(connect="z:1/w", directory="d")
    assert int(limit) > config.connections_max + config.open_files_max


# --- Kubernetes


def test_pods_have_valid_settings(pods: list[PackagedDaemon]) -> None:
    kinds = ["server"] * 2 + ["storage"] * 3 + ["gateway"] * 2
    assert [pod.command[0] for pod in pods] == kinds
    for pod in pods:
        assert pod.ports == DEFAULT_PORTS[pod.command[0]]
        assert pod.config.http_host == pod.config.listen_host == "0.0.0.0"
        assert parse_command(pod.command[:2])
        if isinstance(pod.config, GatewayConfig):
            assert not pod.config.insecure_network
            continue
        assert pod.config.access == "on"
        _, set_name, namespace, *domain = pod.config.advertised_host.split(".")
        assert pod.config.advertised_host.startswith(f"{pod.name}.")
        assert set_name in manifests_of_kind("Service")
        assert [namespace, *domain] == ["waltz", "svc", "cluster", "local"]


def test_pods_use_the_tls_files_of_the_secret(pods: list[PackagedDaemon], tmp_path: Path) -> None:
    files = tls_settings()
    assert TlsConfig(**files).tls == "on"
    for workload in replicated_workloads().values():
        (container,) = pod_specification(workload)["containers"]
        mounts = {each["mountPath"] for each in container["volumeMounts"]}
        folders = [str(value).rpartition("/")[0] for value in files.values() if "/" in str(value)]
        assert set(folders) <= mounts
    for pod in pods:
        if isinstance(pod.config, GatewayConfig):
            assert pod.config.https_certificate == files["tls_certificate"]
            assert pod.config.https_key == files["tls_key"]
            continue
        settings_path = Path(parse_connect_string(pod.config.connect).tls)
        assert settings_path.as_posix() == "/etc/waltz/settings/tls.toml"
        (tmp_path / settings_path.name).write_text(render_toml("tls", files), encoding="utf-8")
        connect = pod.config.connect.replace(str(settings_path.parent), str(tmp_path))
        check_network(replace(pod.config, connect=connect))


def test_the_job_creates_a_cluster_with_all_storages(pods: list[PackagedDaemon]) -> None:
    (job,) = manifests_of_kind("Job").values()
    (container,) = pod_specification(job)["containers"]
    options = parse_command(container["args"])
    storages = [address_of(pod) for pod in pods if isinstance(pod.config, StorageConfig)]
    assert list(options["storage"]) == [
        f"{storage}:{group}" for group, storage in enumerate(storages)
    ]
    (connect,) = {str(pod.config.connect).partition("?")[0] for pod in pods}
    assert options["connect"] == connect


def test_manifests_have_the_ports_and_probes_of_the_daemons() -> None:
    for name, workload in replicated_workloads().items():
        (container,) = pod_specification(workload)["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        expected = DEFAULT_PORTS[name.rpartition("-")[2]]
        assert sorted(ports.values()) == sorted(expected.values())
        (service,) = (
            each for each in manifests_of_kind("Service").values() if selects(each, workload)
        )
        assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == ports
        probes = {key: value for key, value in container.items() if key.endswith("Probe")}
        assert {key: probe["httpGet"]["path"] for key, probe in probes.items()} == {
            "startupProbe": "/livez",
            "livenessProbe": "/livez",
            "readinessProbe": "/readyz",
        }
        assert {probe["httpGet"]["path"] for probe in probes.values()} <= PAGES
        assert {probe["httpGet"]["port"] for probe in probes.values()} == {"http"}


def selects(service: dict[str, dict[str, object]], found: dict[str, object]) -> bool:
    return service["spec"]["selector"] == found["spec"]["selector"]["matchLabels"]


def test_services_publish_the_addresses_of_members_that_are_not_ready() -> None:
    for name in manifests_of_kind("StatefulSet"):
        service = manifests_of_kind("Service")[name]
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"]


def test_the_environment_of_pods_has_no_variables_of_services() -> None:
    """The variable WALTZ_SERVER_PORT of a service would be read as a setting."""
    workloads = [*replicated_workloads().values(), *manifests_of_kind("Job").values()]
    assert len(workloads) == 4
    assert not any(pod_specification(workload)["enableServiceLinks"] for workload in workloads)


def test_each_kind_of_daemon_has_a_disruption_budget() -> None:
    budgets = manifests_of_kind("PodDisruptionBudget")
    for name, workload in replicated_workloads().items():
        assert budgets[name]["spec"]["selector"] == workload["spec"]["selector"]
        assert budgets[name]["spec"]["maxUnavailable"] == 1


def test_chart_values_contain_only_existing_settings() -> None:
    (values,) = yaml_documents(CHART_FOLDER / "values.yaml")
    names = {kind: {*CONFIG_TYPES_BY_KIND[kind].__dataclass_fields__} for kind in DAEMONS}
    assert set(values["settings"]) <= names["server"] & names["storage"]
    for kind in DAEMONS:
        assert set(values[kind]["settings"]) <= names[kind]
