"""Ray's own `LLMServer` with this engine, as a program: prints a line of JSON with the result of each call.

`python -m tests.integrations.llm_server SCRIPT` runs a scripted model. `ray.serve.llm` cannot be imported without vLLM's or SGLang's
classes of requests and answers, nor without pyarrow and httpx, of which only names are needed here: others are in their place. All else
is Ray's.
"""

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import AsyncGenerator
from types import ModuleType
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from pydantic import BaseModel, ConfigDict

SGLANG = "sglang.srt.entrypoints.openai.protocol"
NAMES = ("ChatCompletion", "Completion", "Embedding", "Scoring", "Tokenize", "Detokenize")


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class OpenRequest(Open):
    stream: bool | None = False


def stand_in(name: str, **attributes: Any) -> None:
    """Makes the module importable, with all packages that it is in."""
    parts = name.split(".")
    for stop in range(1, len(parts) + 1):
        path = ".".join(parts[:stop])
        module = sys.modules.setdefault(path, ModuleType(path))
        module.__path__ = []
    vars(sys.modules[name]).update(attributes)


def prepare() -> None:
    """No request may need aiohttp."""
    sys.modules["aiohttp"] = None  # type: ignore[assignment]
    classes: dict[str, Any] = {}
    for name in NAMES:
        classes |= {f"{name}Request": OpenRequest, f"{name}Response": Open, f"{name}StreamResponse": Open}
    stand_in(SGLANG, **classes)
    if importlib.util.find_spec("pyarrow") is None:
        stand_in("pyarrow.fs", FileSystem=object)
    if importlib.util.find_spec("httpx") is None:
        stand_in("httpx", HTTPStatusError=type("HTTPStatusError", (Exception,), {}))


async def items(stream: AsyncGenerator[Any, None]) -> list[Any]:
    return [item async for item in stream]


async def run(script: str) -> dict[str, Any]:
    from ray.llm._internal.serve.core.configs.openai_api_models import ChatCompletionRequest, ChatCompletionResponse, ErrorResponse
    from ray.llm._internal.serve.core.engine.protocol import LLMEngine
    from ray.serve.llm import LLMConfig, LLMServer

    from penstock.integrations.ray.engine import PenstockEngine

    def chat(**fields: Any) -> Any:
        return ChatCompletionRequest(**{"model": "demo", "messages": [{"role": "user", "content": "Hi"}], **fields})

    config = LLMConfig(
        model_loading_config={"model_id": "demo", "model_source": f"scripted:{script}"},
        engine_kwargs={"kv_cache_memory": "16MiB", "device": "cpu"},
    )
    make: Any = LLMServer.sync_init  # asks for a subclass of `LLMEngine`, and for no more than its methods when it runs
    server = make(config, engine_cls=PenstockEngine)
    await server.start()
    (whole,) = await items(await server.chat(chat()))
    batches = await items(await server.chat(chat(stream=True)))
    (error,) = await items(await server.chat(chat(temperature=-1)))
    (unknown,) = await items(await server.chat(chat(model="other")))
    await server.check_health()
    found = {
        "missing": sorted(name for name in vars(LLMEngine) if not name.startswith("_") and not hasattr(PenstockEngine, name)),
        "kinds": [isinstance(whole, ChatCompletionResponse), isinstance(error, ErrorResponse)],
        "text": whole.choices[0]["message"]["content"],
        "events": [event for batch in batches for event in batch],
        "errors": [error.error.code, unknown.error.code],
        "stats": await server.record_routing_stats(),
    }
    await server.reset_prefix_cache()
    await server.sleep(level=1)
    found["is_sleeping"] = [await server.is_sleeping()]
    await server.wakeup()
    found["is_sleeping"].append(await server.is_sleeping())
    await server.engine.shutdown()
    return found


if __name__ == "__main__":
    prepare()
    print(json.dumps(asyncio.run(run(sys.argv[1]))))
