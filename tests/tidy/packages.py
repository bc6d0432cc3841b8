"""The contents of the packages in `conf/`: containers, units and manifests, with their settings."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.tidy.sources import PROJECT_ROOT
from waltz_core.config import CONFIG_TYPES_BY_KIND, GatewayConfig, ServerConfig, StorageConfig
from waltz_core.config.settings import load_config

DOCKER_FOLDER = PROJECT_ROOT / "conf" / "docker"
SYSTEMD_FOLDER = PROJECT_ROOT / "conf" / "systemd"
CHART_FOLDER = PROJECT_ROOT / "conf" / "helm" / "waltz"
MANIFESTS_FILE = PROJECT_ROOT / "conf" / "kubernetes" / "waltz.yaml"
DAEMONS = ("server", "storage", "gateway")
_ENV = re.compile(r"(?m)^ENV (.*)$")


class PackagedDaemon(NamedTuple):
    """A daemon of a package: its command, and the settings with which it starts."""

    name: str
    command: list[str]
    config: ServerConfig | StorageConfig | GatewayConfig

    @property
    def ports(self) -> dict[str, int]:
        """The ports at which it listens, by setting."""
        names = ("port", "admin_port", "http_port")
        return {name: getattr(self.config, name) for name in names if hasattr(self.config, name)}


@cache
def yaml_documents(path: Path) -> list[dict[str, Any]]:
    """Return the documents of a YAML file."""
    return [
        document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document
    ]


def image_variables() -> dict[str, str]:
    """Return the variables that the image sets."""
    matches = _ENV.findall((DOCKER_FOLDER / "Dockerfile").read_text(encoding="utf-8"))
    return dict(each.split("=", 1) for line in matches for each in line.split())


def compose_services() -> dict[str, dict[str, Any]]:
    """Return the services of the compose file."""
    (content,) = yaml_documents(DOCKER_FOLDER / "compose.yaml")
    return content["services"]


def compose_daemons() -> Iterator[PackagedDaemon]:
    """Yield the daemons of the compose file."""
    for name, service in compose_services().items():
        command = service.get("command", [])
        if command[:1] in ([kind] for kind in DAEMONS):
            yield _read_daemon(name, command, {**image_variables(), **service["environment"]}, None)


def manifests_of_kind(kind: str, path: Path = MANIFESTS_FILE) -> dict[str, dict[str, Any]]:
    """Return the manifests of a kind, by name."""
    return {
        yaml_document["metadata"]["name"]: yaml_document
        for yaml_document in yaml_documents(path)
        if yaml_document.get("kind") == kind
    }


def replicated_workloads(path: Path = MANIFESTS_FILE) -> dict[str, dict[str, Any]]:
    """Return the stateful sets and deployments, by name."""
    return manifests_of_kind("StatefulSet", path) | manifests_of_kind("Deployment", path)


def pod_specification(workload: dict[str, Any]) -> dict[str, Any]:
    """Return the specification of the pods of a workload."""
    return workload["spec"]["template"]["spec"]


def kubernetes_daemons(directory: Path, path: Path = MANIFESTS_FILE) -> Iterator[PackagedDaemon]:
    """Yield a daemon for each replica; `directory` is for the settings files."""
    (settings,) = manifests_of_kind("ConfigMap", path).values()
    for name, text in settings["data"].items():
        (directory / name).write_text(text, encoding="utf-8")
    for name, workload in replicated_workloads(path).items():
        (container,) = pod_specification(workload)["containers"]
        for number in range(workload["spec"]["replicas"]):
            pod = f"{name}-{number}"
            variables = {
                each["name"]: each["value"].replace("$(POD_NAME)", pod)
                for each in container["env"]
                if "value" in each
            }
            option = container["args"][-1].removeprefix("--config=")
            file = directory / Path(option).name
            yield _read_daemon(pod, container["args"], {**image_variables(), **variables}, file)


def tls_settings(path: Path = MANIFESTS_FILE) -> dict[str, object]:
    """Return the TLS settings of the pods; empty if they have none."""
    (settings,) = manifests_of_kind("ConfigMap", path).values()
    return tomllib.loads(settings["data"].get("tls.toml", ""))


def _read_daemon(
    name: str, command: list[str], variables: Mapping[str, str], file: Path | None
) -> PackagedDaemon:
    kind = CONFIG_TYPES_BY_KIND[command[0]]
    config = load_config(kind, path=file, environment=variables).config
    assert isinstance(config, ServerConfig | StorageConfig | GatewayConfig)
    return PackagedDaemon(name, command, config)
