"""The calls of `LLM` and `AsyncLLM` that turn text into numbers, over the same checks as HTTP."""

import dataclasses
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from penstock.engine.errors import InvalidRequest
from penstock.engine.pooling.engine import PoolingOutput as Pooled
from penstock.engine.pooling.engine import ScoreLimits
from penstock.engine.pooling.model import PoolingParams, PoolingTask
from penstock.llm.model import LocalModel, pooling_calls
from penstock.llm.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from penstock.llm.preparing import Priority, PromptSource, located, one_for_each, read_priorities, read_priority
from penstock.serving.context import description, queue_for, wrong_model
from penstock.serving.pooling import EncodingOptions, PoolingTimer, Side, encode_inputs, score_pairs, token_limit

OnOutput = Callable[[Pooled], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingOptions:
    """`truncate_prompt_tokens` cuts each input to so many tokens, and with -1 to what the model takes; without it none is cut.

    `prompt_name` names one of the instructions in the model's sentence-transformers files. Lower `priority` goes first; it is for all
    prompts or one for each.
    """

    truncate_prompt_tokens: int | None = None
    prompt_name: str | None = None
    priority: Priority = None

    def __post_init__(self) -> None:
        limit = self.truncate_prompt_tokens
        if limit is not None and (not isinstance(limit, Integral) or isinstance(limit, bool)):
            raise InvalidRequest(f"`truncate_prompt_tokens` must be an integer, got {limit!r:.100}", "truncate_prompt_tokens")
        if not isinstance(self.prompt_name, str | None):
            raise InvalidRequest(f"`prompt_name` must be a string, got {self.prompt_name!r:.100}", "prompt_name")


async def pool(
    model: LocalModel,
    sources: Sequence[PromptSource],
    params: Sequence[PoolingParams],
    options: PoolingOptions,
    on_output: OnOutput | None = None,
) -> list[PoolingRequestOutput]:
    """Outputs in the order of the prompts. Raises `InvalidRequest` for whatever is wrong with one of them, before anything runs."""
    context = model.pooling
    priorities = read_priorities(options.priority, len(sources), "prompts")
    for own in params:
        check_task(model, own.task or context.engine.model.default_task)
    limit = token_limit(context, options.truncate_prompt_tokens)
    for source in sources:
        source.require_text()
    given = [source.text or "" if source.token_ids is None else source.token_ids for source in sources]
    paths = [source.path for source in sources]
    try:
        encoding = EncodingOptions(limit, prompt_name=options.prompt_name)
        queue = queue_for(sum(map(len, given)))
        inputs = await context.workers.run(queue, lambda: encode_inputs(context, given, paths, encoding))
    except InvalidRequest as error:
        raise located(error, error.param or "") from None
    timer = PoolingTimer(model.metrics, time.monotonic(), on_output)
    outputs = await timer.pool(context.engine, inputs, params, priority=priorities)
    return [
        PoolingRequestOutput(request_id=_request_id("pool"), prompt_token_ids=output.prompt_token_ids, outputs=PoolingOutput(output.data))
        for output in outputs
    ]


async def score(
    model: LocalModel, first: str | Sequence[str], second: str | Sequence[str], options: PoolingOptions, on_output: OnOutput | None = None
) -> list[ScoringRequestOutput]:
    """A score for each pair, in the order of the second texts. Raises `InvalidRequest`."""
    context = model.pooling
    check_task(model, "score", "embed")
    limits = ScoreLimits(token_limit(context, options.truncate_prompt_tokens))
    priority = 0 if options.priority is None else read_priority(options.priority)
    timer = PoolingTimer(model.metrics, time.monotonic(), on_output)
    try:
        scores, _ = await score_pairs(context, timer, _side("text_1", first), _side("text_2", second), limits, priority)
    except InvalidRequest as error:
        raise located(error, error.param or "") from None
    return [
        ScoringRequestOutput(request_id=_request_id("score"), prompt_token_ids=score.prompt_token_ids, outputs=ScoringOutput(score.value))
        for score in scores
    ]


def as_embedding(output: PoolingRequestOutput) -> EmbeddingRequestOutput:
    outputs = EmbeddingOutput(output.outputs.embedding)
    return EmbeddingRequestOutput(request_id=output.request_id, prompt_token_ids=output.prompt_token_ids, outputs=outputs)


def as_classification(model: LocalModel, output: PoolingRequestOutput) -> ClassificationRequestOutput:
    probs: list[float] = output.outputs.data.tolist()
    label = model.pooling.engine.model.id2label.get(probs.index(max(probs)))
    return ClassificationRequestOutput(
        request_id=output.request_id, prompt_token_ids=output.prompt_token_ids, outputs=ClassificationOutput(probs, label)
    )


def check_task(model: LocalModel, *tasks: PoolingTask) -> None:
    """Raises `InvalidRequest`, naming the calls that do serve the model, where it can do none of these."""
    pooling = model.pooling.engine.model
    if not set(tasks) & pooling.tasks:
        served = wrong_model(model.name, description(pooling), pooling_calls(pooling))
        raise InvalidRequest(f"{served}; its tasks are {', '.join(sorted(pooling.tasks))}")


def params_for_each(
    given: PoolingParams | Sequence[PoolingParams] | None, count: int, task: PoolingTask | None = None
) -> list[PoolingParams]:
    """With the call's own task. Raises `InvalidRequest` where there are not as many as prompts, and for those that name another task."""
    params = one_for_each(PoolingParams() if given is None else given, PoolingParams, "pooling_params", count, "prompts")
    for own in params:
        if task is not None and own.task not in (None, task):
            raise InvalidRequest(f"`pooling_params` ask for {own.task}, and this call is for {task}", "pooling_params")
    return [own if task is None else dataclasses.replace(own, task=task) for own in params]


def _side(param: str, given: Any) -> Side:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or isinstance(texts, bytes):
        raise InvalidRequest(f"`{param}` must be a string or a list of strings, got {type(texts).__name__}", param)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidRequest(f"`{param}[{index}]` must be a string, got {type(text).__name__}", f"{param}[{index}]")
    return Side(param, list(texts), is_list=not isinstance(given, str))


def _request_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"
