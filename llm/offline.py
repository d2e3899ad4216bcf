"""`LLM` and `AsyncLLM`: the engine as a library, without a server."""

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, closing
from numbers import Integral
from types import TracebackType
from typing import Any, NoReturn, Self, cast

from penstock.engine.contracts.hooks import RegisteredLogitsProcessor
from penstock.engine.deltas import SequenceDelta
from penstock.engine.errors import EngineUnavailable, InvalidRequest
from penstock.engine.pooling.model import PoolingParams, PoolingTask
from penstock.engine.sampling.params import BeamSearchParams
from penstock.llm.adapters import LoRAChoice, LoRARequest, refuse_adapter
from penstock.llm.batch import OutputFold, Progress, UseTqdm, run_batch
from penstock.llm.model import LocalModel, LoopThread, threads_as_they_were
from penstock.llm.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    Metric,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
    metric_values,
)
from penstock.llm.pooling import PoolingOptions, as_classification, as_embedding, params_for_each, pool, score
from penstock.llm.preparing import (
    ChatOptions,
    Message,
    Prepared,
    Priority,
    Prompt,
    beam_output,
    one_for_each,
    prepare_beams,
    prepare_chat,
    prepare_each,
    prepare_prompt,
    read_priorities,
    read_priority,
    read_prompt,
    read_prompts,
)
from penstock.llm.sampling_params import RequestOutputKind, SamplingParams

Conversation = Sequence[Message]


class _Model:
    """What both have. `_model` is loaded by the arguments of the command line, as keywords."""

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        logits_processors: Mapping[str, RegisteredLogitsProcessor] | None = None,
        **engine_arguments: Any,
    ) -> None:
        self._model = LocalModel(model, engine_arguments, logits_processors)

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's recommended parameters, from its generation_config, which a call without parameters uses."""
        return SamplingParams(**self._model.generating.default_sampling)

    def get_metrics(self) -> list[Metric]:
        """What the server shows at `/metrics`: counters, gauges and histograms by name."""
        return metric_values(self._model.metrics.registry)


class LLM(_Model):
    """A model in this process, for batches.

        with LLM("HuggingFaceTB/SmolLM2-135M-Instruct") as llm:
            for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
                print(output.outputs[0].text)

    Keyword arguments are the flags of the command line in snake case (`docs/library.md` lists them), and `logits_processors`, factories by
    name, for use in sampling parameters. Raises `TypeError` for an unknown argument, `ConfigurationError` for a model or settings that
    cannot be served.

    A call raises `InvalidRequest` for invalid arguments before any of its requests runs.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        logits_processors: Mapping[str, RegisteredLogitsProcessor] | None = None,
        **engine_arguments: Any,
    ) -> None:
        super().__init__(model, logits_processors=logits_processors, **engine_arguments)
        with threads_as_they_were():
            self._model.load()
        self._loop = LoopThread()  # runs all of the model's coroutines; any thread may call, also one in which another loop is running
        self._loop.run(self._model.start())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends running requests and frees the model's memory. May be called twice."""
        if not self._loop.is_closed:
            self._loop.run(self._model.close())
            self._loop.close()

    def get_tokenizer(self, lora_request: LoRARequest | None = None) -> Any:
        """The model's tokenizer as transformers loads it, which adapters have as well."""
        return self._model.hf_tokenizer

    def reset_prefix_cache(self) -> bool:
        """Clears the prefix cache."""
        self._loop.run(self._model.reset_prefix_cache())
        return True

    def sleep(self, level: int = 1) -> None:
        """Frees the KV cache, at level 2 the weights too, once running requests have ended. Until `wake_up`, calls raise
        `EngineUnavailable`.
        """
        self._loop.run(self._model.rest.sleep(level))

    def wake_up(self) -> None:
        """Serves again, with an empty KV cache and new counters. Raises `ConfigurationError` if memory no longer suffices."""
        self._loop.run(self._model.rest.wake_up())

    @property
    def is_sleeping(self) -> bool:
        return self._model.is_sleeping

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRAChoice = None,
        priority: Priority = None,
    ) -> list[RequestOutput]:
        """Continues one prompt or several, and returns the outputs in their order.

        `sampling_params` are for all or one for each prompt, and so is `priority`; lower values run first. `use_tqdm` may be a callable
        that replaces tqdm.
        """
        sources = read_prompts(prompts)
        params = self._for_each(sampling_params, len(sources), "prompts")
        priorities = read_priorities(priority, len(sources), "prompts")
        context = self._model.generating
        adapters = self._loop.run(self._model.adapters.load(lora_request, len(sources), "prompts"))
        requests = (
            (source.path, prepare_prompt(context, source, own, priority=order, adapter=adapter))
            for source, own, order, adapter in zip(sources, params, priorities, adapters, strict=True)
        )
        return self._run(self._loop.run(prepare_each(requests)), use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRAChoice = None,
        priority: Priority = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, as /v1/chat/completions does: `reasoning_content` and `tool_calls` are separate from the
        text if the model's format is known.

        `chat_template` is Jinja source that replaces the model's own. `priority` is as in `generate`.
        """
        conversations, is_batch = _conversations(messages)
        params = self._for_each(sampling_params, len(conversations), "messages")
        priorities = read_priorities(priority, len(conversations), "conversations")
        options = ChatOptions(
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
            tool_choice=tool_choice,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        context = self._model.generating
        paths = [f"messages[{index}]" for index in range(len(conversations))] if is_batch else ["messages"]
        adapters = self._loop.run(self._model.adapters.load(lora_request, len(conversations), "conversations"))
        requests = (
            (path, prepare_chat(context, conversation, own, options, path, priority=order, adapter=adapter))
            for path, conversation, own, order, adapter in zip(paths, conversations, params, priorities, adapters, strict=True)
        )
        return self._run(self._loop.run(prepare_each(requests)), use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams] | None = None,
        lora_request: LoRAChoice = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The best answers to each prompt, best first, by the search that `transformers` does.

        `params` are for all prompts or one for each. At most `concurrency_limit` prompts are searched at a time.
        """
        sources = read_prompts(prompts)
        each = one_for_each(BeamSearchParams() if params is None else params, BeamSearchParams, "params", len(sources), "prompts")
        if concurrency_limit is not None and (not isinstance(concurrency_limit, Integral) or concurrency_limit < 1):
            raise InvalidRequest(f"`concurrency_limit` must be a positive integer, got {concurrency_limit!r:.100}", "concurrency_limit")
        context = self._model.generating
        adapters = self._loop.run(self._model.adapters.load(lora_request, len(sources), "prompts"))
        requests = (
            (source.path, prepare_beams(context, source, own, adapter))
            for source, own, adapter in zip(sources, each, adapters, strict=True)
        )
        batch = self._loop.run(prepare_each(requests))
        size = concurrency_limit or max(len(batch), 1)
        outputs = [output for start in range(0, len(batch), size) for output in self._run(batch[start : start + size], use_tqdm)]
        return [beam_output(output, context.tokenizer) for output in outputs]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: None = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        priority: Priority = None,
    ) -> list[PoolingRequestOutput]:
        """A pooling model's raw output for each prompt, in their order: for `pooling_task`, or else the model's own first task.

        `truncate_prompt_tokens` cuts longer prompts, with -1 to the model's limit. `prompt_name` names one of the instructions
        in the model's sentence-transformers files, to be put before each text.
        """
        refuse_adapter(lora_request)
        options = PoolingOptions(truncate_prompt_tokens=truncate_prompt_tokens, prompt_name=prompt_name, priority=priority)
        return self._pool(prompts, pooling_params, pooling_task, options, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: None = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        priority: Priority = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt, by an embedding model. Options are as in `encode`."""
        refuse_adapter(lora_request)
        options = PoolingOptions(truncate_prompt_tokens=truncate_prompt_tokens, prompt_name=prompt_name, priority=priority)
        return [as_embedding(output) for output in self._pool(prompts, pooling_params, "embed", options, use_tqdm)]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: None = None,
        truncate_prompt_tokens: int | None = None,
        priority: Priority = None,
    ) -> list[ClassificationRequestOutput]:
        """The probability of each label for each prompt, by a classifier. Options are as in `encode`."""
        refuse_adapter(lora_request)
        options = PoolingOptions(truncate_prompt_tokens=truncate_prompt_tokens, priority=priority)
        outputs = self._pool(prompts, pooling_params, "classify", options, use_tqdm)
        return [as_classification(self._model, output) for output in outputs]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        use_tqdm: UseTqdm = True,
        lora_request: None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """A score for each pair of texts: one with one, one with many, or as many with as many.

        A cross-encoder reads both at once; of an embedding model it is the cosine of the two vectors.
        """
        refuse_adapter(lora_request)
        options = PoolingOptions(truncate_prompt_tokens=truncate_prompt_tokens, priority=priority)
        with Progress(use_tqdm, None) as progress:
            return self._loop.run(score(self._model, text_1, text_2, options, progress.count_pooled))

    def start_profile(self) -> NoReturn:
        raise InvalidRequest("profiles are not taken here: see benchmarks/profile_step.py, or run the process under a profiler")

    def _run(self, batch: Sequence[Prepared], use_tqdm: UseTqdm) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        with Progress(use_tqdm, len(batch)) as progress, closing(self._loop.iterate(run_batch(self._model, batch))) as running:
            for place, output in running:
                outputs[place] = output
                progress.add(output)
        return [outputs[place] for place in range(len(batch))]

    def _pool(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | Sequence[PoolingParams] | None,
        task: PoolingTask | None,
        options: PoolingOptions,
        use_tqdm: UseTqdm,
    ) -> list[PoolingRequestOutput]:
        sources = read_prompts(prompts)
        each = params_for_each(params, len(sources), task)
        with Progress(use_tqdm, len(sources)) as progress:
            return self._loop.run(pool(self._model, sources, each, options, progress.count_pooled))

    def _for_each(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int, what: str) -> Sequence[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        return one_for_each(given, SamplingParams, "sampling_params", count, what)


def _conversations(messages: Conversation | Sequence[Conversation]) -> tuple[list[Conversation], bool]:
    """The conversations, and whether there was a list of them."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise InvalidRequest("`messages` must be a conversation, which is a list of messages, or a list of these", "messages")
    if all(isinstance(message, Mapping) for message in messages):
        return [cast(Conversation, messages)], False
    for index, conversation in enumerate(messages):
        if not isinstance(conversation, Sequence) or isinstance(conversation, str):
            raise InvalidRequest(f"`messages[{index}]` must be a conversation, like the others", f"messages[{index}]")
    return list(cast(Sequence[Conversation], messages)), True


class AsyncLLM(_Model):
    """A model in this process, on the caller's event loop.

        async with AsyncLLM("HuggingFaceTB/SmolLM2-135M-Instruct") as llm:
            async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=8)):
                print(output.outputs[0].text)

    Arguments are the same as for `LLM`. They are checked at once; the model is loaded by `start`, in a thread. A request ends when its
    iterator is closed or its task is cancelled. Failures raise the exceptions of `penstock.engine.errors`.
    """

    async def start(self) -> None:
        """Loads the model and begins to serve, on this loop. An engine is started once."""
        await asyncio.to_thread(self._model.load)
        await self._model.start()

    async def shutdown(self) -> None:
        """Ends running requests and frees the model's memory. May be called twice."""
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
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Streams the output of one prompt: `sampling_params.output_kind` selects the contents of each output.

        `request_id` must not be a running request's; by default one is generated.
        """
        params = self._sampling_params(sampling_params)
        source, order = read_prompt(prompt, "prompt"), read_priority(priority)
        context = self._model.generating
        (adapter,) = await self._model.adapters.load(lora_request, 1, "prompt")
        prepared = await prepare_prompt(context, source, params, request_id=request_id, priority=order, adapter=adapter)
        async with aclosing(self._stream(prepared)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Streams the answer to one conversation. If outputs are deltas, tool calls are whole, in the last one."""
        options = ChatOptions(
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
            tool_choice=tool_choice,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        params, order = self._sampling_params(sampling_params), read_priority(priority)
        context = self._model.generating
        (adapter,) = await self._model.adapters.load(lora_request, 1, "conversation")
        prepared = await prepare_chat(
            context, messages, params, options, "messages", request_id=request_id, priority=order, adapter=adapter
        )
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

    async def get_tokenizer(self, lora_request: LoRARequest | None = None) -> Any:
        """The model's tokenizer as transformers loads it, which adapters have as well."""
        return await asyncio.to_thread(lambda: self._model.hf_tokenizer)

    async def reset_prefix_cache(self) -> bool:
        """Clears the prefix cache."""
        await self._model.reset_prefix_cache()
        return True

    async def sleep(self, level: int = 1) -> None:
        """Frees the KV cache, at level 2 the weights too, once running requests have ended. Until `wake_up`, calls raise
        `EngineUnavailable`.
        """
        await self._model.rest.sleep(level)

    async def wake_up(self) -> None:
        """Serves again, with an empty KV cache and new counters. Raises `ConfigurationError` if memory no longer suffices."""
        await self._model.rest.wake_up()

    async def is_sleeping(self) -> bool:
        return self._model.is_sleeping

    async def check_health(self) -> None:
        """Raises `EngineUnavailable` if the engine has failed or does not run."""
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
