"""The admin interface of real models, small ones: adapters while the model sleeps, a model that does not generate, a whole server."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from penstock.api.admin.app import administered
from penstock.api.admin.routes import Administration
from penstock.engine.control import sleep
from penstock.engine.errors import ConfigurationError
from penstock.serving.options import Arguments
from tests.api.admin.test_admin import administering
from tests.api.models.test_adapters import Files, completion
from tests.api.models.test_adapters import files as files
from tests.api.models.test_adapters import served as served_with_adapters
from tests.api.pooling.server import pooling_server
from tests.fakes import make_core
from tests.llm.executors import context_over
from tests.server.test_process import ROOT, server
from tests.server.test_several_models import completion as completion_of
from tests.server.test_several_models import scripts
from tests.server.test_several_models import server as several_models


@pytest.fixture(autouse=True)
def spill_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep, "spill_directory", lambda: tmp_path)


def test_adapters_are_loaded_while_the_model_sleeps_and_computed_once_it_is_awake(files: Files) -> None:
    async def test() -> None:
        async with served_with_adapters(files, "--enable-lora") as api, administering(Administration(api.assembled.context)) as admin:

            async def post(path: str, body: object) -> Any:
                async with admin.post(path, json=body) as response:
                    return response.status, await response.json()

            assert (await post("/sleep", {"level": 2, "wake_on_request": True}))[0] == 200
            status, models = await post("/adapters/load", {"name": "mine", "path": str(files.adapters / "first")})
            assert (status, models["models"][0]["state"]) == (200, "asleep")
            assert models["models"][0]["adapters"] == {"mine": str(files.adapters / "first")}
            assert (await post("/adapters/load", {"name": "mine", "path": str(files.adapters / "second")}))[0] == 400
            assert await api.complete("mine") == files.texts["first"]
            assert await api.complete("base") == files.texts["base"]
            assert (await post("/sleep", {"level": 2}))[0] == 200
            assert (await post("/adapters/load", {"name": "mine", "path": str(files.adapters / "second"), "replace": True}))[0] == 200
            assert (await post("/wake", {}))[0] == 200
            assert await api.complete("mine") == files.texts["second"]
            assert (await post("/adapters/unload", {"name": "mine"}))[1]["models"][0]["adapters"] == {}
            assert (await api.post("/v1/completions", completion("mine")))[0] == 404

    asyncio.run(test())


def test_a_model_that_does_not_generate_is_described_and_the_rest_refused(embedder: Path) -> None:
    async def test() -> None:
        async with pooling_server(embedder) as pooling, administering(Administration(pooling.context)) as admin:
            for path in ("/models", "/stats", "/threads", "/log-level"):
                async with admin.get(path) as response:
                    assert response.status == 200, path
            for method, path in (("GET", "/requests"), ("POST", "/sleep"), ("POST", "/profile"), ("GET", "/is_sleeping")):
                async with admin.request(method, path) as response:
                    assert response.status == 400, path
                    assert "models that generate text" in (await response.json())["error"]["message"]

    asyncio.run(test())


def test_sleep_by_the_clock_is_refused_where_the_model_cannot_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.system.memory.can_release", lambda: False)

    async def test() -> None:
        context = context_over(make_core())
        with pytest.raises(ConfigurationError, match="--sleep-idle-seconds: only a model on the CPU"):
            async with administered(Arguments(sleep_idle_seconds=1.0), Administration(context), None):
                pass
        context.close()

    asyncio.run(test())


def resident_kilobytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


@pytest.mark.thorough
def test_a_server_over_a_real_model_frees_the_memory_that_it_says_and_answers_the_same(tmp_path: Path) -> None:
    """The bound is half of what was freed, by the kernel's count 110 MB or more: other memory of the process may come and go."""
    path = tmp_path / "admin.sock"
    environment = {**os.environ, "PENSTOCK_ADMIN": f"unix:{path}"}

    def admin(*words: str) -> Any:
        command = [sys.executable, "-m", "penstock", "admin", "--json", *words]
        return json.loads(subprocess.run(command, cwd=ROOT.parent, env=environment, check=True, capture_output=True).stdout)

    with server("--admin", f"unix:{path}", "--speculation", "none") as (process, url):

        def answer() -> Any:
            body = {"prompt": "Once upon a time", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
            request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as response:
                return json.load(response)["choices"]

        before = answer()
        awake = resident_kilobytes(process.pid)
        slept = admin("sleep", "--level", "2")
        freed = slept["freed_weight_bytes"] + slept["freed_kv_cache_bytes"]
        assert slept["freed_weight_bytes"] > 80 * 2**20
        assert awake - resident_kilobytes(process.pid) > freed / 2048
        assert admin("status")["state"] == "asleep"
        assert admin("wake")["state"] == "awake"
        assert answer() == before
        assert admin("list") == {"requests": []}
        process.send_signal(signal.SIGTERM)
        process.communicate()
        assert process.returncode == 0
        assert not path.exists()


def test_several_models_are_loaded_pinned_put_to_sleep_and_unloaded(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text('[defaults]\nkv_cache_memory = "4MiB"\n' + "\n".join(scripts(tmp_path, "a", "b")), encoding="utf-8")

    async def test() -> None:
        async with several_models(path) as (context, http), administering(Administration(context)) as admin:

            async def ask(method: str, path: str, **options: Any) -> tuple[int, Any]:
                async with admin.request(method, path, **options) as response:
                    return response.status, await response.json()

            async def post(route: str, /, **body: Any) -> tuple[int, Any]:
                return await ask("POST", route, json=body)

            assert [model["state"] for model in (await ask("GET", "/models"))[1]["models"]] == ["unloaded", "unloaded"]
            status, body = await post("/sleep", model="a")
            assert (status, body["error"]["message"]) == (409, "the model `a` is unloaded")
            status, body = await post("/sleep")
            assert (status, body["error"]["param"]) == (400, "model")
            assert (await post("/models/load", model="nothing"))[0] == 404
            [a, b] = (await post("/models/load", model="a"))[1]["models"]
            assert (a["state"], b["state"], a["is_pinned"]) == ("loaded", "unloaded", False)
            assert a["num_bytes"] > 4 * 2**20
            assert (await post("/models/pin", model="a"))[1]["models"][0]["is_pinned"]
            assert not (await post("/models/pin", model="a", pinned=False))[1]["models"][0]["is_pinned"]
            assert (await post("/sleep", model="a", level=2))[1]["state"] == "asleep"
            assert (await ask("GET", "/sleep?model=a"))[1]["level"] == 2
            async with http.post("/v1/completions", json={"model": "a", "prompt": "?"}) as response:
                assert response.status == 503
            assert await completion_of(http, "b") == "I am b."
            assert [model["state"] for model in (await ask("GET", "/models"))[1]["models"]] == ["asleep", "loaded"]
            assert (await post("/models/unload", model="a"))[1]["models"][0]["state"] == "unloaded"
            assert await completion_of(http, "a") == "I am a."
            assert sorted((await ask("GET", "/stats"))[1]["engines"]) == ["a", "b"]
            assert (await ask("GET", "/requests"))[1] == {"requests": []}
            assert (await post("/requests/abort", ids=["x"]))[1] == {"aborted": [], "unknown": ["x"]}
            assert (await post("/adapters/load", name="x", path="y"))[0] == 400

    asyncio.run(test())


def test_one_model_is_not_loaded_or_unloaded() -> None:
    async def test() -> None:
        context = context_over(make_core())
        async with administering(Administration(context)) as admin:
            for path in ("/models/load", "/models/unload", "/models/pin"):
                async with admin.post(path, json={"model": "fake"}) as response:
                    assert response.status == 400
                    assert "several models" in (await response.json())["error"]["message"]
            async with admin.get("/sleep?model=other") as response:
                assert response.status == 404
            async with admin.get("/sleep?model=fake") as response:
                assert response.status == 200
        context.close()

    asyncio.run(test())
