"""The files of examples/deploy pass the linters and schemas of their kinds."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.clients.programs import needs
from tests.deployment.files import DEPLOY, compose, manifest
from tests.deployment.tools import faults_by_operator, lint, module

pytestmark = pytest.mark.deployment

KUBERNETES = DEPLOY / "kubernetes"
STYLE = """
extends: default
rules: {line-length: {max: 140}, document-start: disable, comments: {min-spaces-from-content: 1}, comments-indentation: disable}
"""
PROGRAM = "/opt/penstock/bin/penstock"
MOST_EXPOSED = 2.0  # of 10, by systemd's count


def test_the_dockerfile_is_accepted_by_hadolint(tmp_path: Path) -> None:
    lint("hadolint", DEPLOY / "Dockerfile")
    worse = tmp_path / "Dockerfile"
    worse.write_text((DEPLOY / "Dockerfile").read_text().replace("USER 10001:10001", "USER root"))
    with pytest.raises(AssertionError, match="DL3002"):
        lint("hadolint", worse)


def test_yaml_is_accepted_by_yamllint() -> None:
    lint("yamllint", "--strict", "--config-data", STYLE, DEPLOY)


def test_the_compose_file_follows_its_specification() -> None:
    project = module("compose_spec").PyCompose
    project.from_yaml(yaml.safe_dump(compose())).validate()
    for service, wrong in (("penstock", {"read_only": "perhaps"}), ("grafana", {"ports": ["http"]})):
        document = compose()
        document["services"][service] |= wrong
        with pytest.raises(ValueError, match=f"services.{service}"):
            project.from_yaml(yaml.safe_dump(document))


@pytest.mark.parametrize("folder", ["base", "gpu"])
def test_what_kubectl_applies_follows_kubernetes_schemas(folder: str, tmp_path: Path) -> None:
    rendered = tmp_path / "rendered.yaml"
    rendered.write_text(kustomized(folder))
    said = lint("kubernetes-validate", "--strict", rendered)
    assert set(re.findall(r"passed for resource (\w+)/penstock", said)) == {"configmap", "service", "statefulset", "poddisruptionbudget"}
    rendered.write_text(rendered.read_text().replace("readOnlyRootFilesystem", "readonlyRootFilesystem"))
    with pytest.raises(AssertionError, match="readonlyRootFilesystem"):
        lint("kubernetes-validate", "--strict", rendered)


def kustomized(folder: str) -> str:
    needs("kubectl")
    return subprocess.run(["kubectl", "kustomize", KUBERNETES / folder], capture_output=True, text=True, check=True).stdout


def test_pods_on_gpus_have_the_image_and_the_device() -> None:
    documents = {document["kind"]: document for document in yaml.safe_load_all(kustomized("gpu"))}
    (container,) = documents["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    assert container["image"].endswith("penstock:cuda")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {"name": "PENSTOCK_DEVICE", "value": "cuda"} in container["env"]
    assert "PENSTOCK_API_KEY" in [variable["name"] for variable in container["env"]]


def test_pods_are_replaced_when_their_options_change() -> None:
    documents = {document["kind"]: document for document in yaml.safe_load_all(kustomized("base"))}
    name = documents["ConfigMap"]["metadata"]["name"]
    assert re.fullmatch("penstock-[a-z0-9]{10}", name)
    assert [volume["configMap"]["name"] for volume in volumes(documents["StatefulSet"]) if "configMap" in volume] == [name]


def volumes(stateful_set: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = stateful_set["spec"]["template"]["spec"]["volumes"]
    return found


def test_the_monitor_follows_the_prometheus_operator() -> None:
    monitor = manifest("monitoring/servicemonitor.yaml")
    assert faults_by_operator(monitor) == ""
    monitor["spec"]["endpoints"][0]["interval"] = 15
    assert "interval must be string" in faults_by_operator(monitor)


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """A copy of the unit, with its addition for GPUs and a program that is on this machine."""
    needs("systemd-analyze")
    copy = tmp_path / "penstock.service"
    copy.write_text((DEPLOY / "systemd" / "penstock.service").read_text().replace(PROGRAM, sys.executable))
    addition = tmp_path / "penstock.service.d" / "gpu.conf"
    addition.parent.mkdir()
    addition.write_text((DEPLOY / "systemd" / "gpu.conf").read_text())
    return copy


def test_the_unit_is_verified_by_systemd(unit: Path) -> None:
    assert faults_by_systemd(unit) == ""
    unit.write_text(unit.read_text().replace("ProtectSystem=", "ProtectSytem="))
    assert "ProtectSytem" in faults_by_systemd(unit)


def faults_by_systemd(unit: Path) -> str:
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    return "\n".join(line for line in done.stderr.splitlines() if "penstock" in line)


def test_the_unit_exposes_little(unit: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={int(MOST_EXPOSED * 10)}"]
    done = subprocess.run([*command, unit], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
