"""OpenVINO GenAI's continuous batching behind as much of OpenAI's interface as the benchmarks speak; it brings no server of its own.

Runs where `openvino-genai` and `aiohttp` are installed, without Penstock: `python benchmarks/openvino_server.py MODEL_DIRECTORY --port N`,
the directory written by `optimum-cli export openvino --weight-format fp16`.
"""

import argparse
import asyncio
import itertools
import json
import queue
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import openvino_genai as genai  # type: ignore[import-not-found]  # installed beside the peer, not beside this project
from aiohttp import web

Tokens = tuple[list[int], bool]  # the new ones, and whether they are the last


@dataclass(frozen=True, slots=True)
class Order:
    """What one request asks for; its answer goes to `tokens` in the event loop."""

    prompt: str
    config: Any
    tokens: "asyncio.Queue[Tokens]"


class Batching(threading.Thread):
    """Steps the pipeline as long as there is anything to do."""

    def __init__(self, pipeline: Any, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(daemon=True)
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._pipeline = pipeline
        self._loop = loop
        self._numbers = itertools.count()
        self._running: list[tuple[Any, Order]] = []

    def run(self) -> None:
        while True:
            while not self._running or not self.orders.empty():
                order = self.orders.get()
                self._running.append((self._pipeline.add_request(next(self._numbers), order.prompt, order.config), order))
            self._pipeline.step()
            self._running = [(handle, order) for handle, order in self._running if not self._pass_on(handle, order)]

    def _pass_on(self, handle: Any, order: Order) -> bool:
        token_ids: list[int] = []
        is_last = False
        while handle.can_read():
            for output in handle.read().values():
                token_ids += output.generated_ids
                is_last = is_last or output.finish_reason != genai.GenerationFinishReason.NONE
        if token_ids or is_last:
            self._loop.call_soon_threadsafe(order.tokens.put_nowait, (token_ids, is_last))
        return is_last


class Server:
    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        self.tokenizer = pipeline.get_tokenizer()
        self.batching: Batching | None = None

    async def start(self, _: web.Application) -> None:
        self.batching = Batching(self.pipeline, asyncio.get_running_loop())
        self.batching.start()

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "openvino", "object": "model"}]})

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": genai.__version__})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = self.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
        config = genai.GenerationConfig(max_new_tokens=body["max_tokens"], ignore_eos=body.get("ignore_eos", False), do_sample=False)
        config.apply_chat_template = False
        num_prompt_tokens = self.tokenizer.encode(prompt, add_special_tokens=False).input_ids.shape[1]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        num_tokens = 0
        async for token_ids, is_last in self.answer(prompt, config):
            num_tokens += len(token_ids)
            choice = {"index": 0, "delta": {"content": self.tokenizer.decode(token_ids)}, "finish_reason": "length" if is_last else None}
            await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_tokens}
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        return response

    async def answer(self, prompt: str, config: Any) -> AsyncIterator[Tokens]:
        assert self.batching is not None
        order = Order(prompt, config, asyncio.Queue())
        self.batching.orders.put(order)
        is_last = False
        while not is_last:
            token_ids, is_last = await order.tokens.get()
            yield token_ids, is_last


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve an OpenVINO model to the benchmarks.")
    parser.add_argument("model", help="a directory that optimum-cli exported")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GiB
    scheduler.max_num_seqs = 64
    scheduler.enable_prefix_caching = True
    server = Server(genai.ContinuousBatchingPipeline(arguments.model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": arguments.threads}))
    app = web.Application()
    app.on_startup.append(server.start)
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/version", server.version)
    app.router.add_post("/v1/chat/completions", server.chat)
    web.run_app(app, host="127.0.0.1", port=arguments.port, print=None)


if __name__ == "__main__":
    main()
