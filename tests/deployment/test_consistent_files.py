"""The files of examples/deploy agree with the server and with each other."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from penstock.api.middleware import OPEN_PATHS
from penstock.cli.flags import build_parser, configured
from penstock.cli.settings import OTHER_VARIABLES, read_environment
from penstock.server import CLEANUP_SECONDS, MISCONFIGURED
from penstock.serving.options import OPTIONS
from tests.deployment.files import DEPLOY, ROOT, Unit, compose, dockerfile, image_environment, manifest, yaml_documents

END_SECONDS = 2 * CLEANUP_SECONDS  # of the server and its API servers, after the drain


def pod() -> dict[str, Any]:
    specification: dict[str, Any] = manifest("base/statefulset.yaml")["spec"]["template"]["spec"]
    return specification


def container() -> dict[str, Any]:
    (only,) = pod()["containers"]
    assert isinstance(only, dict)
    return only


def drain_seconds(path: str) -> float:
    """By a file of options, which holds no mistake."""
    return configured(build_parser(), {"command": "serve", "served_model": None, "config": str(DEPLOY / path)}, {}).arguments.drain_timeout


def test_a_drain_ends_before_the_supervisor_kills() -> None:
    (unit_seconds,) = Unit(DEPLOY / "systemd" / "penstock.service")["TimeoutStopSec"]
    assert float(unit_seconds) >= drain_seconds("penstock.toml") + END_SECONDS
    assert float(compose()["services"]["penstock"]["stop_grace_period"].removesuffix("s")) >= drain_seconds("penstock.toml") + END_SECONDS
    pause = container()["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod()["terminationGracePeriodSeconds"] >= pause + drain_seconds("kubernetes/base/penstock.toml") + END_SECONDS


def test_probes_need_no_key() -> None:
    paths = {name: container()[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}
    assert set(paths.values()) <= OPEN_PATHS
    assert "/health" in dict(dockerfile())["HEALTHCHECK"]


def test_every_variable_is_one_of_the_server() -> None:
    unit = Unit(DEPLOY / "systemd" / "penstock.service")
    pods = {variable["name"]: "" for variable in container()["env"]}
    for environment in (image_environment(), unit.environment, compose()["services"]["penstock"]["environment"], pods):
        read_environment(environment)
        ours = {name for name in environment if name.startswith("PENSTOCK_")}
        assert ours
        assert ours <= {option.variable for option in OPTIONS.values()} | set(OTHER_VARIABLES)


def test_the_pod_and_the_image_have_the_same_user_port_and_volume() -> None:
    image, context = dict(dockerfile()), pod()["securityContext"]
    assert image["USER"] == f"{context['runAsUser']}:{context['runAsGroup']}" == f"{context['fsGroup']}:{context['fsGroup']}"
    assert [port["containerPort"] for port in container()["ports"]] == [int(image["EXPOSE"])] == [OPTIONS["port"].default]
    assert image["VOLUME"] in [mount["mountPath"] for mount in container()["volumeMounts"]]
    assert Path(image["VOLUME"]) in Path(image_environment()["PENSTOCK_CACHE"]).parents


def test_commands_are_the_servers() -> None:
    service = compose()["services"]["penstock"]
    assert container()["args"] == service["command"] == ["serve", "--config", "/etc/penstock/penstock.toml"]
    unit = Unit(DEPLOY / "systemd" / "penstock.service")
    assert (unit["ExecStart"], unit["ExecStartPre"]) == (
        ["/opt/penstock/bin/penstock serve"],
        ["-/opt/penstock/bin/penstock config --changed"],  # of its failure RestartPreventExitStatus says nothing
    )
    assert unit["RestartPreventExitStatus"] == [str(MISCONFIGURED)]
    assert unit["Restart"] == ["on-failure"]
    assert not unit.get("SuccessExitStatus"), "any other code but 0 is a failure: the server is started again"


@pytest.mark.parametrize("service", sorted(compose()["services"]))
def test_what_compose_mounts_is_there(service: str) -> None:
    sources = [volume.split(":")[0] for volume in compose()["services"][service]["volumes"]]
    assert [source for source in sources if source.startswith(".") and not (DEPLOY / source).exists()] == []
    assert {source for source in sources if not source.startswith(".")} <= set(compose()["volumes"])


def test_the_image_is_built_from_all_that_the_wheel_is() -> None:
    kept = re.findall(r"^!(.+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    needed = {path.name for path in ROOT.glob("*.py")} | {package.split(".")[1] for package in packages if "." in package}
    assert needed | {"README.md", "LICENSE", "MANIFEST.in", "pyproject.toml", "constraints.txt", "scripts/build_backend.py"} == set(kept)


def test_the_monitor_selects_the_service_and_its_port() -> None:
    service, monitor = manifest("base/service.yaml"), manifest("monitoring/servicemonitor.yaml")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [endpoint["port"] for endpoint in monitor["endpoints"]] == [port["name"] for port in service["spec"]["ports"]]
    assert service["spec"]["selector"].items() <= manifest("base/statefulset.yaml")["spec"]["template"]["metadata"]["labels"].items()


def test_every_alert_says_what_it_means_and_names_the_section_on_it() -> None:
    (group,) = yaml_documents(DEPLOY / "prometheus" / "alerts.yml")[0]["groups"]
    for annotations in (rule["annotations"] for rule in group["rules"]):
        assert annotations["description"]
        page, _, section = annotations["runbook"].partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert section in {heading.lower().replace(" ", "-") for heading in headings}
