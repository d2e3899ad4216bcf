"""Executors over the engine of `tests.fakes`: everything is real but the model."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from penstock.engine.constraints.compiler import GrammarCompiler
from penstock.engine.core import EngineCore
from penstock.engine.loop import Engine
from penstock.llm.executor import Executor
from penstock.llm.executor.requests import OutputConfig, Request
from penstock.llm.executor.responses import Response, Result
from penstock.plugins.manager import Plugins
from penstock.serving.context import LocalContext, Workers
from penstock.serving.templates.rendering import ChatTemplate
from tests.fakes import NextToken, ids, letter_after, make_core

OUTPUT_ALONE = OutputConfig(exclude_input_from_output=True)


builtin_plugins = cache(Plugins.start)


def context_over(core: EngineCore, processors: Mapping[str, Any] | None = None) -> LocalContext:
    """What `assemble` makes for a server, of a core. `processors` are logits processors by name."""
    plugins = builtin_plugins() if processors is None else Plugins.start()
    plugins.register_logits_processors(processors or {}, "tests")
    workers = Workers()
    return LocalContext(
        engine=Engine(core),
        tokenizer=core.tokenizer,
        chat_template=ChatTemplate(None, {}),
        model_names=("fake",),
        max_model_len=core.max_model_len,
        vocab_size=core.vocab_size,
        stop_token_ids=core.stop_token_ids,
        plugins=plugins,
        reasoning_parser=None,
        tool_parser=None,
        grammar_compiler=GrammarCompiler(plugins.grammar_backends, core.tokenizer, core.vocab_size, core.stop_token_ids),
        default_thinking_budget=None,
        default_sampling={},
        workers=workers,
    )


@contextmanager
def executor_over(core: EngineCore, processors: Mapping[str, Any] | None = None, **settings: Any) -> Iterator[Executor]:
    """Checks at the end that no block and no sequence is left."""
    with Executor(context=context_over(core, processors), **settings) as executor:
        yield executor
    core.check_integrity()
    assert not core.has_work
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks


@contextmanager
def make_executor(next_token: NextToken = letter_after, processors: Mapping[str, Any] | None = None, **settings: Any) -> Iterator[Executor]:
    """`settings` are those of `make_core`."""
    with executor_over(make_core(next_token, **settings), processors) as executor:
        yield executor


def ask(prompt: str = "?", max_tokens: int = 8, **fields: Any) -> Request:
    """A request whose prompt is not part of the output unless `output_config` is given."""
    given: dict[str, Any] = {"output_config": OUTPUT_ALONE} | fields
    return Request(ids(prompt), max_tokens, **given)


def whole(executor: Executor, request: Request | int) -> list[Response]:
    """All responses of a request."""
    request_id = request if isinstance(request, int) else executor.enqueue_request(request)
    responses: list[Response] = []
    while more := executor.await_responses(request_id, timeout=60):
        responses += more
    assert responses[-1].is_final
    assert not any(response.is_final for response in responses[:-1])
    return responses


def result_of(executor: Executor, request: Request | int) -> Result:
    """The one result of a request with one sequence that is not streamed."""
    [response] = whole(executor, request)
    return response.result


def error_of(executor: Executor, request: Request) -> str:
    [response] = whole(executor, request)
    assert response.error_msg is not None
    return response.error_msg


def output(results: Iterable[Response], index: int = 0) -> list[int]:
    """What the responses to a streamed request say of one sequence."""
    own = [response.result for response in results if response.result.sequence_index == index]
    return [token_id for result in own for token_id in result.output_token_ids[0]]
