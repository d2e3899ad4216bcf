"""examples/ray_serve/serve.yaml on a real Ray of two nodes: a replica whose two ranks are on different nodes, and adapters as requests ask
for them; a second `serve deploy` replaces it.
"""

import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]
from openai import APIConnectionError, InternalServerError, NotFoundError, OpenAI
from transformers import AutoModelForCausalLM

from penstock import LLM, LoRARequest, SamplingParams
from tests.integrations.local_ray import PATIENCE, title
from tests.llm.model_directory import SETTINGS, write_model
from tests.tiny_adapters import write_adapter

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'penstock[ray]'"),
]

ROOT = Path(__file__).parent.parent.parent
PROMPT, NUM_TOKENS = "Once upon a time", 20
NAMES = ("first", "second")
START_SECONDS = 300.0
FLAGS = ["--dtype", "float32", "--compile", "off", "--kv-cache-memory", "4MiB", "--threads", "1", "--device", "cpu"]
FLAGS += ["--tensor-parallel-size", "2", "--max-loras", "1", "--max-cpu-loras", "1", "--served-model-name", "tiny"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    model = AutoModelForCausalLM.from_pretrained(write_model(directory / "model"))
    for seed, name in enumerate(NAMES):
        write_adapter(model, directory / "adapters" / name, seed=seed + 1)
    return directory


@pytest.fixture(scope="module")
def expected(directory: Path) -> dict[str, str]:
    """What one process says, with each adapter and without."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(directory / "model"), enable_lora=True, **SETTINGS) as llm:
        requests = {"tiny": None} | {
            name: LoRARequest(name, number, str(directory / "adapters" / name)) for number, name in enumerate(NAMES, start=1)
        }
        return {
            name: llm.generate(PROMPT, params, lora_request=request, use_tqdm=False)[0].outputs[0].text
            for name, request in requests.items()
        }


class TwoNodes:
    """Is asked as an operator does: by `serve`, and by what Ray's dashboard says."""

    def __init__(self, process: "subprocess.Popen[str]", environment: dict[str, str], directory: Path) -> None:
        self.process, self._environment, self._directory = process, environment, directory
        started = self._line()
        self._dashboard: str = started["dashboard"]
        self.nodes: list[str] = started["nodes"]

    def _line(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (self._directory / "log").read_text(encoding="utf-8")[-4000:]
        return json.loads(line)

    def placements(self) -> list[dict[str, str]]:
        """The nodes of the bundles of each placement group."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found: list[dict[str, str]] = self._line()
        return found

    def serve(self, command: str, *words: str) -> str:
        serve = Path(sys.executable).parent / "serve"
        done = subprocess.run(
            [serve, command, "-a", self._dashboard, *words], env=self._environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def deploy(self, config: dict[str, Any], number: int) -> None:
        """Returns once what is deployed answers."""
        file = self._directory / f"serve-{number}.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        before = self.application().get("last_deployed_time_s", 0)
        self.serve("deploy", str(file))
        deadline = time.monotonic() + START_SECONDS
        while (found := self.application())["status"] != "RUNNING" or found["last_deployed_time_s"] <= before:
            assert time.monotonic() < deadline, found
            assert found["status"] != "DEPLOY_FAILED", found["message"]
            time.sleep(0.5)

    def application(self) -> dict[str, Any]:
        """What the dashboard says of it; empty before it is deployed."""
        token = self._environment["RAY_AUTH_TOKEN"]
        request = urllib.request.Request(f"{self._dashboard}/api/serve/applications/", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request) as response:
            found: dict[str, Any] = json.load(response)["applications"].get("penstock", {})
        return found


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    directory = tmp_path_factory.mktemp("two-nodes")
    files = tempfile.mkdtemp(prefix="ray-")  # of sockets as well, whose paths have to be short
    environment = (
        os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)} | PATIENCE
    )
    environment["RAY_TMPDIR"] = files
    with (directory / "log").open("w", encoding="utf-8") as log:
        command = [sys.executable, "-W", "ignore", "-m", "tests.integrations.two_nodes"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=ROOT)
    timer = threading.Timer(START_SECONDS, process.kill)
    timer.start()
    try:
        nodes = TwoNodes(process, environment, directory)
        timer.cancel()
        yield nodes
    finally:
        timer.cancel()
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.communicate()  # the end of its input is the end of it
        for child in psutil.wait_procs(family, timeout=20)[1]:
            child.kill()
        shutil.rmtree(files, ignore_errors=True)


@pytest.fixture(scope="module")
def config(directory: Path) -> dict[str, Any]:
    """The example's, with what differs in its comments: address, model, sizes. Proxies of two nodes on one machine would share a port."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "ray_serve" / "serve.yaml").read_text(encoding="utf-8"))
    found["proxy_location"] = "HeadOnly"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found["http_options"]["port"] = listener.getsockname()[1]
    (application,) = found["applications"]
    arguments = application["args"]
    del arguments["autoscaling"]
    flags = ["--model", str(directory / "model"), "--adapter-dir", str(directory / "adapters"), *FLAGS]
    arguments |= {"flags": flags, "num_cpus": 1, "num_replicas": 1, "placement_strategy": "STRICT_SPREAD", "version": "1"}
    return found


@pytest.fixture(scope="module")
def client(two_nodes: TwoNodes, config: dict[str, Any]) -> OpenAI:
    two_nodes.deploy(config, 1)
    port = config["http_options"]["port"]
    return OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)


def said(client: OpenAI, model: str) -> str:
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0, extra_body={"ignore_eos": True})
    return answer.choices[0].text


def test_ranks_on_two_nodes_say_what_one_process_says_with_each_adapter(
    client: OpenAI, two_nodes: TwoNodes, expected: dict[str, str]
) -> None:
    assert len(set(expected.values())) == 3
    for model in ("tiny", "first", "second", "first"):  # each has to leave for the other: --max-cpu-loras is 1
        assert said(client, model) == expected[model]
    assert [model.id for model in client.models.list()] == ["tiny", "first"]
    with pytest.raises(NotFoundError, match="third"):
        said(client, "third")
    (bundles,) = two_nodes.placements()
    assert sorted(bundles.values()) == sorted(two_nodes.nodes)


def replica_of(client: OpenAI) -> str:
    return client.completions.with_raw_response.create(model="tiny", prompt=PROMPT, max_tokens=1).headers["x-replica"]


def test_a_second_deploy_replaces_the_replica_and_costs_no_request(
    client: OpenAI, two_nodes: TwoNodes, config: dict[str, Any], expected: dict[str, str]
) -> None:
    before, is_over, texts = replica_of(client), threading.Event(), list[str]()

    def ask() -> None:
        while not is_over.is_set():
            texts.append(said(client, "tiny"))

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        config["applications"][0]["args"]["version"] = "2"
        two_nodes.deploy(config, 2)
        is_over.set()
        asking.result()
    assert set(texts) == {expected["tiny"]}
    assert replica_of(client) != before
    assert "RUNNING" in two_nodes.serve("status")


def test_a_replica_that_has_lost_a_rank_is_replaced(client: OpenAI, two_nodes: TwoNodes, expected: dict[str, str]) -> None:
    """The engine fails with the rank, and with that the replica's check of health."""
    family = psutil.Process(two_nodes.process.pid).children(recursive=True)
    (rank,) = (process for process in family if " worker --join " in title(process) and "penstock.server" in title(process))
    rank.kill()
    deadline = time.monotonic() + 200
    while True:
        assert time.monotonic() < deadline
        try:
            text = said(client, "tiny")
        except (InternalServerError, APIConnectionError):
            time.sleep(1)
        else:
            assert text == expected["tiny"]
            return
