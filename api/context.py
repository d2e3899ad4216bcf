"""Everything a handler needs, in one object in the aiohttp application."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import web

from penstock.api.chat_protocol import ReasoningField
from penstock.api.constraints.conformance_checker import ConformanceChecker
from penstock.api.workers import Workers
from penstock.engine.grammar import AdditionalProperties

if TYPE_CHECKING:
    from penstock.api.templates.chat_template import ChatTemplate
    from penstock.engine.grammars.grammar_cache import GrammarCompiler
    from penstock.engine.hooks import ReasoningParserFactory, ToolParserFactory
    from penstock.engine.loop import Engine
    from penstock.engine.pooling.engine import PoolingEngine
    from penstock.engine.text.tokenizer import Tokenizer
    from penstock.plugins.manager import Plugins


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What the operator chose about the wire. Sizes are in bytes, times in seconds.

    `reasoning_field` names the reasoning in answers. `system_fingerprint` changes with whatever may change the answer to a seed.
    """

    allow_unknown_fields: bool = False
    trust_request_chat_template: bool = False
    additional_properties: AdditionalProperties = "closed"
    max_body_bytes: int = 16 * 2**20
    keep_alive_seconds: float = 15.0  # 0: no keep-alive comments
    api_keys: tuple[str, ...] = ()
    share_prefix_cache: bool = False  # between several keys
    write_timeout_seconds: float = 60.0  # for a client that does not read its stream; 0: none
    cors_origins: tuple[str, ...] = ()
    metrics_without_key: bool = False
    reasoning_field: ReasoningField = "reasoning_content"
    system_fingerprint: str | None = None
    max_tool_calls: int = 16
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # a request's own go before them


class RunningEngine(Protocol):
    """The life of an engine, whatever it computes."""

    @property
    def is_healthy(self) -> bool: ...

    def check_admission(self) -> None:
        """Raises `EngineUnavailable` or `QueueFull` where a request would be refused whatever is in it."""
        ...

    async def start(self) -> None: ...

    async def stop(self, drain_seconds: float = 0.0) -> None: ...


@dataclass(slots=True, kw_only=True)
class SharedContext:
    """What handlers need whatever the model does. `vocab_size` bounds the token ids that may come in; `workers` is for anything slow: the
    event loop stays free.
    """

    engine: RunningEngine
    tokenizer: "Tokenizer"
    chat_template: "ChatTemplate"
    model_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    workers: Workers
    options: ServerOptions = field(default_factory=ServerOptions)

    def warm_up(self) -> None:
        """Does beforehand what the first request would wait for. Blocks for up to a second."""

    def close(self) -> None:
        """Ends the threads. The engine has been stopped before."""
        self.workers.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True, kw_only=True)
class ServerContext(SharedContext):
    """A model that generates, shared by every handler.

    `vocab_size` is the width of the logits that may be sampled; `stop_token_ids` are the model's own. `default_sampling` holds the
    model's generation_config by our field names.
    """

    engine: "Engine"
    stop_token_ids: frozenset[int]
    plugins: "Plugins"
    reasoning_parser: "ReasoningParserFactory | None"
    tool_parser: "ToolParserFactory | None"
    compile_grammar: "GrammarCompiler"
    default_thinking_budget: int | None
    default_sampling: dict[str, Any]
    conformance: ConformanceChecker = field(default_factory=ConformanceChecker)

    def warm_up(self) -> None:
        self.compile_grammar.warm_up()

    def close(self) -> None:
        self.compile_grammar.close()
        SharedContext.close(self)


@dataclass(slots=True, kw_only=True)
class PoolingContext(SharedContext):
    """A model that gives numbers for a text: an encoder, a classifier, a cross-encoder."""

    engine: "PoolingEngine"


SHARED: web.AppKey[SharedContext] = web.AppKey("shared", SharedContext)
# One of these two is there. No route leads to handlers of the other kind, so that each takes its own context without asking.
CONTEXT: web.AppKey[ServerContext] = web.AppKey("context", ServerContext)
POOLING: web.AppKey[PoolingContext] = web.AppKey("pooling", PoolingContext)
