"""`AsyncLLM`: a model whose answers are streamed to coroutines."""

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from penstock.engine.deltas import SequenceDelta
from penstock.engine.errors import EngineUnavailable, InvalidRequest
from penstock.engine.hooks import RegisteredLogitsProcessor
from penstock.engine.pooling.params import PoolingParams
from penstock.llm.batch import OutputFold
from penstock.llm.metrics import Metric, metric_values
from penstock.llm.model import LocalModel
from penstock.llm.outputs import PoolingRequestOutput, RequestOutput
from penstock.llm.pooling import PoolingOptions, params_for_each, pool
from penstock.llm.preparing import (
    ChatOptions,
    Message,
    Prepared,
    Prompt,
    prepare_chat,
    prepare_prompt,
    read_priority,
    read_prompt,
    refuse_adapter,
)
from penstock.llm.sampling_params import RequestOutputKind, SamplingParams


class AsyncLLM:
    """A model in this process, on the caller's event loop.

        async with AsyncLLM("HuggingFaceTB/SmolLM2-135M-Instruct") as llm:
            async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=8)):
                print(output.outputs[0].text)

    Arguments are those of `LLM`. They are checked at once; the model is loaded by `start`, in a thread. A request ends when its iterator
    is closed or its task is cancelled. What fails is raised as one of the exceptions of `penstock.engine.errors`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        logits_processors: Mapping[str, RegisteredLogitsProcessor] | None = None,
        **engine_arguments: Any,
    ) -> None:
        self._model = LocalModel(model, engine_arguments, logits_processors)

    async def start(self) -> None:
        """Loads the model and begins to serve, on this loop. An engine is started once."""
        await asyncio.to_thread(self._model.load)
        await self._model.start()

    async def shutdown(self) -> None:
        """Ends what runs and gives the model's memory back. May be called twice."""
        await self._model.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.shutdown()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The output of one prompt as it grows: `sampling_params.output_kind` says what each one holds.

        `request_id` must be no running request's; without one, one is made up.
        """
        refuse_adapter(lora_request)
        params = self._sampling_params(sampling_params)
        source, order = read_prompt(prompt, "prompt"), read_priority(priority)
        prepared = await prepare_prompt(self._model.generating, source, params, request_id=request_id, priority=order)
        async with aclosing(self._stream(prepared)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: None = None,
        priority: int = 0,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answer to one conversation as it grows. Where outputs hold what is new, tool calls come whole, with the last one."""
        refuse_adapter(lora_request)
        options = ChatOptions(
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
            tool_choice=tool_choice,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        params, order = self._sampling_params(sampling_params), read_priority(priority)
        prepared = await prepare_chat(self._model.generating, messages, params, options, "messages", request_id=request_id, priority=order)
        async with aclosing(self._stream(prepared)) as outputs:
            async for output in outputs:
                yield output

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: None = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """What a pooling model computes of one prompt: one output, of the task that the parameters name or the model's own first one."""
        refuse_adapter(lora_request)
        options = PoolingOptions(truncate_prompt_tokens=truncate_prompt_tokens, prompt_name=prompt_name, priority=priority)
        source = read_prompt(prompt, "prompt")
        (output,) = await pool(self._model, [source], params_for_each(pooling_params, 1), options)
        if request_id is not None:
            output.request_id = request_id
        yield output

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's authors recommend, by its generation_config; what a call without parameters uses."""
        return SamplingParams(**self._model.generating.default_sampling)

    async def get_tokenizer(self, lora_request: None = None) -> Any:
        """The model's tokenizer as transformers loads it."""
        refuse_adapter(lora_request)
        return await asyncio.to_thread(lambda: self._model.hf_tokenizer)

    def get_metrics(self) -> list[Metric]:
        """What the server shows at `/metrics`: counters, gauges and histograms by name."""
        return metric_values(self._model.metrics.registry)

    async def reset_prefix_cache(self) -> bool:
        """Forgets what earlier prompts left in the KV cache."""
        await self._model.reset_prefix_cache()
        return True

    async def sleep(self, level: int = 1) -> None:
        """Frees the KV cache, at level 2 the weights too, once what runs has ended. Until `wake_up`, `EngineUnavailable` is raised."""
        await self._model.rest.sleep(level)

    async def wake_up(self) -> None:
        """Serves again, with an empty KV cache and new counters. Raises `ConfigurationError` where there is no room any more."""
        await self._model.rest.wake_up()

    async def is_sleeping(self) -> bool:
        return self._model.is_sleeping

    async def check_health(self) -> None:
        """Raises `EngineUnavailable` where the engine has failed or does not run."""
        if not self._model.context.engine.is_healthy:
            raise EngineUnavailable("the engine has failed; the error has been logged")

    def _sampling_params(self, given: Any) -> SamplingParams:
        params = self.get_default_sampling_params() if given is None else given
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"`sampling_params` must be SamplingParams, got {type(params).__name__}", "sampling_params")
        return params

    async def _stream(self, prepared: Prepared) -> AsyncGenerator[RequestOutput, None]:
        fold = OutputFold(prepared, self._model.generating.tokenizer)
        async with aclosing(self._model.generate(prepared.request)) as deltas:
            async for delta in deltas:
                output = _add(fold, delta, prepared.params.output_kind)
                if output is not None:
                    yield output


def _add(fold: OutputFold, delta: SequenceDelta, kind: RequestOutputKind) -> RequestOutput | None:
    new = fold.add(delta)
    match kind:
        case RequestOutputKind.DELTA:
            return fold.output([new])
        case RequestOutputKind.CUMULATIVE:
            return fold.whole()
        case RequestOutputKind.FINAL_ONLY:
            return fold.whole() if fold.is_finished else None
