"""What is deployed on Ray, in this process: options, the policy of autoscaling, retries, and the engine of `ray.serve.llm`."""

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine.errors import ConfigurationError
from penstock.integrations.embedded import Call, Head
from tests.integrations.local_ray import EXAMPLE

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'penstock[ray]'", allow_module_level=True)

ROOT = Path(__file__).parent.parent.parent
# Ray's own, of pydantic and of files.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "answers.jsonl"
    path.write_text('{"model": {"name": "demo"}}\n{"content": "one two three"}\n', encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"replicas": 2}, "replicas"),
        ({"num_replicas": 2, "autoscaling": {}}, "exclude each other"),
        ({"num_cpus": "many"}, r"num_cpus"),
        ({"routing": "luck"}, "routing"),
        ({"router_capacity": 0}, "router_capacity"),
        ({"flags": "--files-dir /tmp/files"}, "--files-dir"),
        ({"flags": ["--response-store", "store.db"]}, "--response-store"),
        ({"flags": "--api-servers 2"}, "--api-servers"),
        ({"flags": "--admin 127.0.0.1:1"}, "--admin"),
        ({"flags": "--models /nowhere.toml"}, "nowhere"),
    ],
)
def test_what_cannot_be_deployed_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    from penstock.integrations.ray import app

    with pytest.raises(ConfigurationError, match=message):
        app(given)


@pytest.mark.ray
def test_the_example_reports_refused_options_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLE, "--", "--files-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "penstock: error: --files-dir: files and batches would be those of one replica: run a server of their own\n"


def test_an_application_is_built_from_words_as_serve_run_gives_them(script: Path) -> None:
    from penstock.integrations.ray.application import app, read_options

    assert read_options({"flags": "--model 'a b'", "num_replicas": "3", "num_gpus": "0.5"}).words == ["--model", "a b"]
    assert read_options({"num_replicas": "3"}).num_replicas == 3
    app({"flags": f"--model scripted:{script}", "num_replicas": "2"})
    app({"flags": "--tensor-parallel-size 2", "autoscaling": {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 8}})


def context(running: dict[str, float], waiting: dict[str, float], queued: float, total: float = 0.0, *, target: float = 8) -> Any:
    """What Serve passes to a policy, as far as this one reads it."""
    stats = {"running": running, "waiting": waiting} if running or waiting else {}
    config = SimpleNamespace(get_target_ongoing_requests=lambda: target)
    return SimpleNamespace(aggregated_metrics=stats, total_queued_requests=queued, total_num_requests=total, config=config)


def test_as_many_replicas_are_wanted_as_it_takes_for_what_runs_and_waits() -> None:
    from penstock.integrations.ray import by_load

    assert by_load(context({"a": 8, "b": 6}, {"a": 20, "b": 0}, 6))[0] == 5
    assert by_load(context({"a": 0}, {"a": 0}, 0))[0] == 0
    assert by_load(context({}, {}, 0, total=16))[0] == 2, "replicas that report nothing: what Serve counts itself"


class FakeReplicas:
    """In place of a handle: each call is answered by the next of `answers`, an exception where the replica is lost before or within."""

    def __init__(self, *answers: list[Head | bytes | Exception]) -> None:
        self._answers = list(answers)
        self.num_cancelled = 0
        self.model_ids: list[str] = []

    def options(self, **options: Any) -> "FakeReplicas":
        self.model_ids += [options["multiplexed_model_id"]] if "multiplexed_model_id" in options else []
        return self

    def remote(self, *_: Any) -> "FakeResponse":
        return FakeResponse(self, self._answers.pop(0))


class FakeResponse:
    def __init__(self, replicas: FakeReplicas, pieces: list[Head | bytes | Exception]) -> None:
        self._replicas, self._pieces = replicas, iter(pieces)

    def __aiter__(self) -> "FakeResponse":
        return self

    async def __anext__(self) -> Head | bytes:
        try:
            piece = next(self._pieces)
        except StopIteration:
            raise StopAsyncIteration from None
        if isinstance(piece, Exception):
            raise piece
        return piece

    def cancel(self) -> None:
        self._replicas.num_cancelled += 1


STREAM = Head(200, [("Content-Type", "text/event-stream")])
CALL = Call("POST", "/v1/completions", [], b'{"model": "m", "prompt": "a"}')


def body_through(replicas: FakeReplicas, *, is_multiplexed: bool = False) -> tuple[Head, bytes]:
    from penstock.integrations.ray.ingress import Ingress

    async def run() -> tuple[Head, bytes]:
        ingress = Ingress(replicas, is_multiplexed=is_multiplexed)  # type: ignore[arg-type]
        head, pieces = await ingress.begun(CALL, None)
        return head, b"".join([piece async for piece in pieces])

    return asyncio.run(run())


def lost() -> Exception:
    from ray.exceptions import ActorDiedError

    return ActorDiedError()


def test_a_request_goes_to_another_replica_as_long_as_nothing_was_sent() -> None:
    head = Head(200, [("Content-Type", "application/json")])
    answers = FakeReplicas([lost()], [head, lost()], [head, b"{}"])
    found, body = body_through(answers)
    assert body == b"{}"
    assert ("x-attempts", "3") in found.headers
    assert answers.num_cancelled == 3


def test_a_stream_that_has_begun_ends_with_an_error() -> None:
    _, body = body_through(FakeReplicas([STREAM, b"data: 1\n\n", lost()]))
    first, error, done = body.split(b"\n\n")[:3]
    assert (first, done) == (b"data: 1", b"data: [DONE]")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "replica_lost"


def test_a_body_that_has_begun_is_cut_short() -> None:
    from ray.exceptions import ActorDiedError

    with pytest.raises(ActorDiedError):
        body_through(FakeReplicas([Head(200, []), b"{", lost()]))


def test_a_request_that_ends_every_replica_is_given_up() -> None:
    from penstock.integrations.ray.ingress import MAX_ATTEMPTS, ReplicaLost

    answers: list[list[Head | bytes | Exception]] = [[lost()] for _ in range(MAX_ATTEMPTS + 1)]
    replicas = FakeReplicas(*answers)
    with pytest.raises(ReplicaLost):
        body_through(replicas)
    assert replicas.num_cancelled == MAX_ATTEMPTS


@pytest.mark.parametrize(("prefix", "path"), [("", "/v1/models"), ("/llm", "/llm/v1/models")])
def test_paths_are_those_below_the_applications_prefix(prefix: str, path: str) -> None:
    from starlette.requests import Request

    from penstock.integrations.ray.ingress import Ingress

    scope = {"type": "http", "method": "GET", "path": path, "root_path": prefix, "query_string": b"limit=1", "headers": []}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    calls: list[Call] = []

    class Replicas(FakeReplicas):
        def remote(self, *arguments: Any) -> FakeResponse:
            calls.append(arguments[0])
            return FakeReplicas.remote(self, *arguments)

    async def run() -> None:
        await Ingress(Replicas([Head(200, []), b"{}"]))(Request(scope, receive))  # type: ignore[arg-type]

    asyncio.run(run())
    assert [call.target for call in calls] == ["/v1/models?limit=1"]


def test_requests_are_routed_by_their_model_where_there_are_adapters() -> None:
    replicas = FakeReplicas([STREAM, b"data: 1\n\n"])
    body_through(replicas, is_multiplexed=True)
    assert replicas.model_ids == ["m"]


class Broadcast:
    """In place of what a handle has for a call of all replicas."""

    def __init__(self, answers: list[tuple[Head, bytes] | Exception]) -> None:
        self._answers = answers

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert timeout_s > 0
        assert return_exceptions
        return self._answers


class MeasuredReplicas(FakeReplicas):
    def __init__(self, answers: list[tuple[Head, bytes] | Exception]) -> None:
        super().__init__()
        self._all = answers

    def broadcast(self, method: str, call: Call, client: str | None) -> Broadcast:
        assert (method, call.target) == ("answer_whole", "/metrics")
        return Broadcast(self._all)


def metrics_of(*answers: tuple[Head, bytes] | Exception) -> Any:
    from penstock.integrations.ray.ingress import Ingress

    ingress = Ingress(MeasuredReplicas(list(answers)))  # type: ignore[arg-type]
    return asyncio.run(ingress.metrics(Call("GET", "/metrics", []), None))


def shown(replica: str, value: int) -> tuple[Head, bytes]:
    text = f'# HELP tokens_total Tokens.\n# TYPE tokens_total counter\ntokens_total{{model_name="m"}} {value}.0\n'
    return Head(200, [("Content-Type", "text/plain"), ("x-replica", replica)]), text.encode()


def test_metrics_are_those_of_all_replicas_by_their_names() -> None:
    response = metrics_of(shown("a", 1), lost(), shown("b", 2))
    assert response.status_code == 200
    assert response.body.decode().splitlines() == [
        "# HELP tokens_total Tokens.",
        "# TYPE tokens_total counter",
        'tokens_total{model_name="m",replica="a"} 1.0',
        'tokens_total{model_name="m",replica="b"} 2.0',
    ]


def test_metrics_without_a_key_are_refused_as_by_one_server() -> None:
    response = metrics_of((Head(401, [("Content-Type", "application/json"), ("x-replica", "a")]), b"{}"), shown("b", 2))
    assert (response.status_code, response.body, response.headers["content-type"]) == (401, b"{}", "application/json")


def test_a_routers_loads_are_those_of_what_it_has_routed() -> None:
    """Serve also reports the ends of calls that all replicas get, and of those that a replica has not accepted."""
    from penstock.integrations.ray.router import PenstockRequestRouter

    router = PenstockRequestRouter.__new__(PenstockRequestRouter)
    router.initialize_state()
    replica: Any = "a"
    for name in ("1", "2"):
        request: Any = SimpleNamespace(args=[], metadata=SimpleNamespace(internal_request_id=name))
        router.on_request_routed(request, replica, None)
    router.on_request_completed(replica, "everywhere")
    assert router._sent[replica] == 2
    router.on_request_completed(replica, "1")
    assert router._sent[replica] == 1


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[]", b'{"model": 3}'])
def test_a_body_that_is_no_request_has_no_prefixes(body: bytes) -> None:
    from penstock.integrations.routing import PromptFields

    fields = PromptFields.of(body)
    assert fields.model_name == ""
    assert fields.prefixes().hashes == ()


def test_a_conversations_next_turn_has_the_prefixes_of_the_last() -> None:
    from penstock.integrations.routing import PromptFields

    def hashes(messages: list[str], **others: Any) -> tuple[int, ...]:
        body = {"messages": [{"role": "user", "content": message} for message in messages], "model": "m", **others}
        return PromptFields.of(json.dumps(body).encode()).prefixes().hashes

    first, second = hashes(["a" * 2000]), hashes(["a" * 2000, "b" * 2000], temperature=0)
    assert len(first) > 6
    assert second[: len(first) - 1] == first[: len(first) - 1]
    assert hashes(["a" * 2000], model="n")[0] != first[0]
    assert hashes(["a" * 2000], tools=[{"type": "function"}])[0] != first[0]


@pytest.fixture
def engine(script: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Awaitable[None]]], None]:
    """Runs a scenario with an engine as `LLMServer` has it."""
    from penstock.integrations.ray import engine as module

    monkeypatch.setattr(module, "ANSWERS", "tests.integrations.llm_models")
    config = SimpleNamespace(
        model_loading_config=SimpleNamespace(model_id="demo", model_source=f"scripted:{script}"),
        engine_kwargs={"kv_cache_memory": "16MiB", "device": "cpu"},
        lora_config=None,
    )

    def run(scenario: Callable[[Any], Awaitable[None]]) -> None:
        async def main() -> None:
            engine = module.PenstockEngine(config)
            await engine.start()
            try:
                await scenario(engine)
            finally:
                await engine.shutdown()

        asyncio.run(main())

    return run


async def collected(stream: AsyncGenerator[Any, None]) -> list[Any]:
    return [item async for item in stream]


def chat(**fields: Any) -> Any:
    from tests.integrations.llm_models import ChatCompletionRequest

    return ChatCompletionRequest(**{"model": "demo", "messages": [{"role": "user", "content": "Hi"}], **fields})


def test_rays_engine_answers_streams_reports_errors_and_its_state(engine: Callable[[Callable[[Any], Awaitable[None]]], None]) -> None:
    async def scenario(engine: Any) -> None:
        (whole,) = await collected(engine.chat(chat()))
        assert type(whole).__name__ == "ChatCompletionResponse"
        assert whole.choices[0]["message"]["content"] == "one two three"

        events = await collected(engine.chat(chat(stream=True), SimpleNamespace(headers={"X-Request-Id": "mine"})))
        assert all(isinstance(event, str) and event.startswith("data: ") and event.endswith("\n\n") for event in events)
        assert events[-1] == "data: [DONE]\n\n"
        deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events[:-1]]
        assert "".join(delta.get("content") or "" for delta in deltas) == "one two three"

        (error,) = await collected(engine.chat(chat(model="other")))
        assert (error.error.code, error.error.param) == (404, "model")
        (error,) = await collected(engine.chat(chat(temperature=-1)))
        assert error.error.code == 400
        (error,) = await collected(engine.transcriptions(None))
        assert "audio" in error.error.message

        await engine.check_health()
        assert engine.routing_stats() | {"kv_cache_usage": 0} == {"num_running": 0, "num_waiting": 0, "kv_cache_usage": 0}
        await engine.reset_prefix_cache()
        assert not await engine.is_sleeping()
        with pytest.raises(NotImplementedError):
            await engine.collective_rpc("anything")

    engine(scenario)


@pytest.mark.ray
def test_rays_own_llm_server_has_the_engine_answer(script: Path) -> None:
    """In a process of its own, where other classes are in the place of vLLM's."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.integrations.llm_server", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["missing"] == [], "methods of Ray's LLMEngine"
    assert found["kinds"] == [True, True]
    assert found["text"] == "one two three"
    *events, last = found["events"]
    assert last == "data: [DONE]\n\n"
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    assert "".join(delta["content"] for delta in deltas) == "one two three"
    assert found["errors"] == [400, 404]
    assert found["stats"]["num_running"] == found["stats"]["num_waiting"] == 0
    assert found["is_sleeping"] == [True, False]
