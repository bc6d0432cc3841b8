"""The tool for each package in `conf/` accepts the package, if the tool is installed.

No test builds an image, or starts a container, a unit or a pod.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.tidy.packages import (
    CHART_FOLDER,
    DAEMONS,
    DOCKER_FOLDER,
    MANIFESTS_FILE,
    SYSTEMD_FOLDER,
    kubernetes_daemons,
    yaml_documents,
)
from tests.time_limits import TEST_TIMEOUT_S

COMPOSE = DOCKER_FOLDER / "compose.yaml"
# Each variant is a list of values that change the manifests of the chart.
VARIANTS = {
    "as written": [],
    "without TLS": [
        "tls.secretName=",
        "settings.access=off",
        "settings.insecure_network=true",
        "gateway.settings.insecure_network=true",
    ],
    "without gateways": ["gateway.replicas=0"],
    "with an auth file": ["zookeeper.authSecretName=waltz-zookeeper"],
    "with larger values": [
        "storage.replicas=6",
        'storage.settings={"queue_bytes_max": 1000000000, "trust_fsync": false}',
        "server.settings.balance=load",
        "storage.volume.storageClassName=fast",
        "imagePullSecrets[0].name=registry",
        "server.nodeSelector.pool=waltz",
    ],
    "without the job": ["cluster.create=false"],
}


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program that must succeed; skip the test if it is not installed."""
    name = str(words[0])
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed; docs/packages.md states where to get it")
    result = subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=TEST_TIMEOUT_S
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def rendered(*values: str) -> str:
    options = [
        word for value in values for word in ("--set-json" if "{" in value else "--set", value)
    ]
    # Without a cluster, Helm assumes an old version that depends on how Helm was built.
    location = ("--namespace", "waltz", "--kube-version", "1.30.0")
    return run("helm", "template", "waltz", CHART_FOLDER, *location, *options).stdout


def test_hadolint_accepts_the_dockerfile() -> None:
    run("hadolint", DOCKER_FOLDER / "Dockerfile")


def test_the_compose_file_matches_the_compose_schema() -> None:
    run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE)


def test_docker_compose_accepts_the_compose_file() -> None:
    docker = shutil.which("docker")
    if (
        docker is None
        or subprocess.run(
            [docker, "compose", "version"], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("docker compose is not installed")
    run("docker", "compose", "--file", COMPOSE, "config", "--quiet")


@pytest.mark.parametrize("kind", DAEMONS)
def test_systemd_accepts_the_units(kind: str, tmp_path: Path) -> None:
    name = f"waltz-{kind}.service"
    text = (SYSTEMD_FOLDER / name).read_text(encoding="utf-8")
    # The tool requires that the program exists.
    unit = tmp_path / name
    unit.write_text(text.replace("/opt/waltz/bin/waltz-core", sys.executable), encoding="utf-8")
    # The tool succeeds even if it ignores an unknown line, so its output is checked.
    assert name not in run("systemd-analyze", "verify", unit).stderr


def test_systemd_accepts_the_user() -> None:
    run("systemd-sysusers", "--dry-run", SYSTEMD_FOLDER / "waltz.sysusers")


def test_kubernetes_accepts_the_manifests() -> None:
    run("kubernetes-validate", "--strict", MANIFESTS_FILE)


def test_helm_accepts_the_chart() -> None:
    run("helm", "lint", "--strict", CHART_FOLDER)


def test_the_manifests_equal_the_rendered_chart() -> None:
    assert sorted(yaml_documents(MANIFESTS_FILE), key=str) == sorted(
        (document for document in yaml.safe_load_all(rendered()) if document), key=str
    )


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_manifests_with_other_values_are_valid(values: list[str], tmp_path: Path) -> None:
    path = tmp_path / "waltz.yaml"
    path.write_text(rendered(*values), encoding="utf-8")
    for pod in kubernetes_daemons(tmp_path, path):
        assert ("?" in pod.config.connect) == ("tls.secretName=" not in values)
    run("kubernetes-validate", "--strict", path)
