"""The dashboard and the alert rules of examples/deploy, against a real Prometheus that scrapes a real server: `-m prometheus`."""

import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_process import server
from tests.serving.observability.test_exposition import DASHBOARD

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "examples" / "deploy"
PLACES = os.pathsep.join((os.environ["PATH"], str(ROOT / ".venv" / "prometheus" / "usr" / "bin")))  # where .ci/run unpacks Debian's
PROMETHEUS, PROMTOOL = (shutil.which(name, path=PLACES) for name in ("prometheus", "promtool"))
pytestmark = [pytest.mark.prometheus, pytest.mark.skipif(None in (PROMETHEUS, PROMTOOL), reason="there is no Prometheus here")]
INTERVAL = 1  # seconds between two scrapes
PATIENCE = 60
BODY = {"model": "demo", "messages": [{"role": "user", "content": "Say something long enough to be a few blocks."}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ASKED: tuple[dict[str, Any], ...] = (
    BODY,
    BODY | {"stream": True, "max_tokens": 50},
    BODY | {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    BODY | {"model": "another"},  # a 404
)


def promtool(*words: str | Path) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def get(url: str, **query: str) -> Any:
    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(query)}") as response:
        return json.load(response)


def ask(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with suppress(urllib.error.HTTPError), urllib.request.urlopen(request) as response:
        response.read()


def queries() -> list[str]:
    """Every query of the dashboard, as Grafana would send it."""
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "penstock.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(found) > 20
    return [expression.replace("$__rate_interval", f"{4 * INTERVAL}s").replace("$model_name", "demo") for expression in found]


@contextmanager
def prometheus(target: str, directory: Path) -> Iterator[str]:
    """With the configuration of examples/deploy, but for the target and the times."""
    config = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    (directory / "prometheus.yml").write_text(config.replace("penstock:8000", target).replace("15s", f"{INTERVAL}s"))
    shutil.copy(DEPLOY / "prometheus" / "alerts.yml", directory)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = [
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen([str(PROMETHEUS), *flags], stdout=log, stderr=log)
    try:
        until(lambda: is_ready(f"http://{address}/-/ready"))
        yield f"http://{address}/api/v1"
    finally:
        process.kill()
        process.wait()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url):
            return True
    except OSError:
        return False


def until(condition: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "what is waited for has not happened"
        time.sleep(INTERVAL / 4)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The HTTP API of a Prometheus that has scraped a server under traffic."""
    directory = tmp_path_factory.mktemp("prometheus")
    script = directory / "answers.jsonl"
    script.write_text('{"model": {"name": "demo"}}\n{"content": "{\\"a\\": 1} and again {\\"a\\": 1} and again and again"}\n')
    with ExitStack() as stack:
        _, url = stack.enter_context(server("--model", f"scripted:{script}", "--metric-prefix", "vllm"))
        api = stack.enter_context(prometheus(url.removeprefix("http://").removesuffix("/v1"), directory))
        until(lambda: get(f"{api}/query", query="up == 1")["data"]["result"])
        for _ in range(3):
            for body in ASKED:
                ask(url, body)
            time.sleep(2 * INTERVAL)
        yield api


def result(api: str, query: str) -> list[Any]:
    found: list[Any] = get(f"{api}/query", query=query)["data"]["result"]
    return found


def test_rules_and_configuration_are_valid() -> None:
    assert "SUCCESS" in promtool("check", "rules", DEPLOY / "prometheus" / "alerts.yml")
    promtool("check", "config", DEPLOY / "prometheus" / "prometheus.yml")


def test_alerts_fire_where_they_should_and_only_there() -> None:
    promtool("test", "rules", Path(__file__).with_name("alerts.test.yml"))


def test_metrics_are_as_prometheus_wants_them(api: str) -> None:
    (target,) = get(f"{api}/targets")["data"]["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")


@pytest.mark.parametrize("query", queries())
def test_every_query_of_the_dashboard_is_answered(api: str, query: str) -> None:
    end = time.monotonic() + 5 * INTERVAL
    while not (found := result(api, query)) and time.monotonic() < end:
        time.sleep(INTERVAL / 4)
    assert found, query


@pytest.mark.parametrize("name", sorted(DASHBOARD))
def test_every_sample_of_vllms_dashboard_has_been_scraped(api: str, name: str) -> None:
    assert result(api, f'{name}{{model_name="demo"}}'), name


def test_rules_are_loaded_and_no_alert_fires_on_a_healthy_server(api: str) -> None:
    (group,) = get(f"{api}/rules")["data"]["groups"]
    alerts = re.findall(r"alert: (\w+)", (DEPLOY / "prometheus" / "alerts.yml").read_text())
    assert [(rule["name"], rule["health"]) for rule in group["rules"]] == [(name, "ok") for name in alerts]
    assert get(f"{api}/alerts")["data"]["alerts"] == []
