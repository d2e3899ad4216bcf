"""`LLM`: a model for batches of prompts, with vLLM's calls."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from numbers import Integral
from typing import Any, NoReturn, cast

from penstock.engine.errors import InvalidRequest
from penstock.engine.pooling.params import PoolingParams, PoolingTask
from penstock.engine.sampling.params import BeamSearchParams
from penstock.llm.batch import Progress, UseTqdm, run_batch
from penstock.llm.model import OfflineModel
from penstock.llm.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
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
    read_prompts,
    refuse_adapter,
)
from penstock.llm.sampling_params import SamplingParams

Conversation = Sequence[Message]


class LLM(OfflineModel):
    """A model in this process, for batches.

        with LLM("HuggingFaceTB/SmolLM2-135M-Instruct") as llm:
            for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
                print(output.outputs[0].text)

    Keyword arguments are the flags of the command line in snake case (`docs/library.md` lists them), and `logits_processors`, factories by
    name that sampling parameters may then name. Raises `TypeError` for an argument that there is not, `ConfigurationError` for what cannot
    be served as asked.

    A call raises `InvalidRequest` for anything wrong with its arguments before anything of it runs.
    """

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's authors recommend, by its generation_config; what a call without parameters uses."""
        return SamplingParams(**self._model.generating.default_sampling)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: None = None,
        priority: Priority = None,
    ) -> list[RequestOutput]:
        """Continues one prompt or several, and gives the outputs in their order.

        `sampling_params` are for all or one for each prompt, and so is `priority`, of which the lower goes first. `use_tqdm` may be what is
        called in tqdm's place.
        """
        refuse_adapter(lora_request)
        sources = read_prompts(prompts)
        params = self._for_each(sampling_params, len(sources), "prompts")
        priorities = read_priorities(priority, len(sources), "prompts")
        context = self._model.generating
        requests = (
            (source.path, prepare_prompt(context, source, own, priority=order))
            for source, own, order in zip(sources, params, priorities, strict=True)
        )
        return self._run(self._loop.run(prepare_each(requests)), use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: None = None,
        priority: Priority = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, as /v1/chat/completions does: `reasoning_content` and `tool_calls` are apart from the text
        where the model's format is known.

        `chat_template` is Jinja's source, in place of the model's own. `priority` is as in `generate`.
        """
        refuse_adapter(lora_request)
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
        requests = (
            (path, prepare_chat(context, conversation, own, options, path, priority=order))
            for path, conversation, own, order in zip(paths, conversations, params, priorities, strict=True)
        )
        return self._run(self._loop.run(prepare_each(requests)), use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams] | None = None,
        lora_request: None = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The best answers to each prompt, best first, by the search that `transformers` does.

        `params` are for all prompts or one for each. At most `concurrency_limit` prompts are searched at a time.
        """
        refuse_adapter(lora_request)
        sources = read_prompts(prompts)
        each = one_for_each(BeamSearchParams() if params is None else params, BeamSearchParams, "params", len(sources), "prompts")
        if concurrency_limit is not None and (not isinstance(concurrency_limit, Integral) or concurrency_limit < 1):
            raise InvalidRequest(f"`concurrency_limit` must be a positive integer, got {concurrency_limit!r:.100}", "concurrency_limit")
        context = self._model.generating
        requests = ((source.path, prepare_beams(context, source, own)) for source, own in zip(sources, each, strict=True))
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
        """What a pooling model computes of each prompt, as it is, in their order: `pooling_task`, or else the model's own first one.

        `truncate_prompt_tokens` cuts what is longer, and with -1 what does not fit the model. `prompt_name` names one of the instructions
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
        """A vector for each prompt, by an embedding model. Options are those of `encode`."""
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
        """How probable each label is for each prompt, by a classifier. Options are those of `encode`."""
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
