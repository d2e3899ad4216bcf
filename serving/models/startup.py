"""From the operator's options and a model's own files to what a request handler needs besides the engine."""

import hashlib
import ipaddress
import logging
import socket
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.engine.config import EngineConfig
from penstock.engine.contracts.hooks import ReasoningParserFactory
from penstock.engine.contracts.parsing import ReasoningParser, Turn
from penstock.engine.errors import ConfigurationError
from penstock.engine.model.store import PACKAGED_MODELS, model_name, resolve_model
from penstock.engine.text.tokenizer import ContentTokenizer, Tokenizer
from penstock.plugins.manager import Evidence, Plugins
from penstock.serving.context import Workers
from penstock.serving.limits import KeyRing
from penstock.serving.observability.tracing import check_tracing
from penstock.serving.options import Arguments, ServerOptions
from penstock.serving.prompts import RESERVED_KWARGS
from penstock.serving.responses.store import ResponseStore, StoreLimits
from penstock.serving.templates.rendering import ChatTemplate, load_chat_template, with_open_reasoning
from penstock.serving.tools import ToolPrompt

log = logging.getLogger(__name__)

UNLEARNED_THINKING_BUDGET = 64


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model before it is loaded. `template` is the operator's own, or None."""

    directory: Path
    tokenizer: Tokenizer
    template: str | None

    @classmethod
    def of(cls, arguments: Arguments) -> "ModelFiles":
        """Fetches the model where it is not here. Raises `ConfigurationError`."""
        config = arguments.engine
        template = template_of(arguments)
        directory = resolve_model(config.model, config.trust_remote_code, verify=arguments.verify_weights)
        try:
            tokenizer = Tokenizer.load(directory, config.trust_remote_code)
        except ConfigurationError:
            from penstock.engine.model.config import check_kind, read_config  # imports torch, which API servers do without

            check_kind(read_config(directory, config.trust_remote_code))  # models with audio may have other files in its place
            raise
        return cls(directory, tokenizer, template)


def template_of(arguments: Arguments) -> str | None:
    """The operator's own chat template."""
    return None if arguments.chat_template is None else load_chat_template(arguments.chat_template)


def model_fields(arguments: Arguments, files: ModelFiles, unlearned: ReasoningParser | None = None) -> dict[str, Any]:
    """What of any `ModelContext` is known before the model is loaded. Raises `ConfigurationError`."""
    return {
        "tokenizer": files.tokenizer,
        "chat_template": build_chat_template(files.template, files.tokenizer, unlearned),
        "model_names": served_names(arguments),
        "options": server_options(arguments),
        "workers": Workers(),
    }


def context_fields(arguments: Arguments, plugins: Plugins, files: ModelFiles) -> dict[str, Any]:
    """What of a `ServerContext` is known before the model is loaded. The parsers are selected. Raises `ConfigurationError`."""
    tokenizer = files.tokenizer
    plugins.recognize(format_evidence(tokenizer, files.template), Turn(response_template=tokenizer.response_template))
    unlearned = unlearned_parser(plugins.reasoning_parser, tokenizer)
    fields = model_fields(arguments, files, unlearned)
    chat_template: ChatTemplate = fields["chat_template"]
    if chat_template.source is None:
        log.warning("the model has no chat template: chat requests are refused; --chat-template gives it one")
    return {
        **fields,
        "chat_template": replace(chat_template, tool_prompt=tool_prompt(plugins, tokenizer)),
        "plugins": plugins,
        "reasoning_parser": plugins.reasoning_parser,
        "tool_parser": plugins.tool_parser,
        "default_thinking_budget": thinking_budget(arguments.thinking_token_budget, unlearned, chat_template.source),
        "responses": response_store(arguments),
        "system_fingerprint": system_fingerprint(arguments.engine),
        "content_tokenizer": ContentTokenizer(tokenizer) if arguments.content_special_tokens == "text" else None,
    }


def response_store(arguments: Arguments) -> ResponseStore:
    """Raises `ConfigurationError` where the operator's file cannot be used."""
    server = arguments.server
    limits = StoreLimits(
        max_bytes=server.response_store_size,
        max_count=server.response_store_count,
        max_age=server.response_store_age,
        num_owners=max(1, len({key.owner for key in KeyRing.of(server)})),
    )
    return ResponseStore(server.response_store, limits, is_shared=arguments.api_servers > 0)


def served_names(arguments: Arguments) -> tuple[str, ...]:
    """The operator's own names, else the model's, and what it was asked for by where that is a short name of ours."""
    asked = arguments.engine.model
    return arguments.served_model_names or tuple(dict.fromkeys((model_name(asked), *(name for name in PACKAGED_MODELS if name == asked))))


def server_options(arguments: Arguments) -> ServerOptions:
    """With what follows from several options. Raises `ConfigurationError` for options that contradict each other."""
    server = arguments.server
    check_tracing(server.otlp_endpoint)
    if reserved := RESERVED_KWARGS & server.default_chat_template_kwargs.keys():
        raise ConfigurationError(f"--default-chat-template-kwargs: {', '.join(sorted(reserved))}: no argument for the template")
    KeyRing.of(server, counts=not arguments.api_servers)  # raises before the model is loaded
    if server.isolate_keys and not server.requires_key:
        raise ConfigurationError("--isolate-keys: there are no API keys: give them by --api-key or --keys")
    if server.isolate_keys and server.share_prefix_cache:
        raise ConfigurationError("--isolate-keys and --share-prefix-cache contradict each other")
    return replace(server, min_priority=min_priority(server), allowed_hosts=allowed_hosts(arguments))


def allowed_hosts(arguments: Arguments) -> tuple[str, ...]:
    """The operator's choice and the server's own. Without a choice any, except where a loopback address is the only protection: a page
    in a browser reaches that too, but knows no key.
    """
    server = arguments.server
    if not server.allowed_hosts and (server.requires_key or not is_loopback(arguments.host)):
        return ("*",)
    return (*server.allowed_hosts, arguments.host.lower())


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens at this name or address."""
    address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4][0]
    return ipaddress.ip_address(address).is_loopback


def min_priority(server: ServerOptions) -> int | None:
    """The operator's bound; by default no client goes before those of other API keys."""
    return 0 if server.min_priority is None and server.has_several_keys else server.min_priority


def system_fingerprint(config: EngineConfig) -> str:
    """The same at each start of this version with this model and these options of the engine."""
    versions_and_options = repr((__version__, version("torch"), config))
    return f"fp_{hashlib.sha256(versions_and_options.encode('utf-8', 'surrogateescape')).hexdigest()[:10]}"


def format_evidence(tokenizer: Tokenizer, template: str | None) -> Evidence:
    """The model's own templates; the operator's `template` says what the model writes only where the model brings none."""
    own = tuple(tokenizer.chat_templates.values())
    asked = () if template is None else (template,)
    declared = (tokenizer.response_template or {}).get("fields")
    fields = frozenset(declared) if isinstance(declared, dict) else frozenset[str]()
    return Evidence(own or asked, frozenset(token.text for token in tokenizer.added_tokens.values()), fields)


def build_chat_template(override: str | None, tokenizer: Tokenizer, unlearned: ReasoningParser | None = None) -> ChatTemplate:
    """The operator's template, else the model's own, which may bring another one for conversations with tools.

    Where the model never learned to begin its reasoning as `unlearned` expects, its own template begins it.
    """
    if override is not None:
        return ChatTemplate(override, tokenizer.special_tokens_map)
    own, with_tools = tokenizer.chat_template, tokenizer.chat_templates.get("tool_use")
    if unlearned is not None and unlearned.start_marker.strip():
        own, with_tools = (
            source and with_open_reasoning(source, unlearned.start_marker, unlearned.end_marker) for source in (own, with_tools)
        )
    return ChatTemplate(own, tokenizer.special_tokens_map, tool_source=with_tools)


def tool_prompt(plugins: Plugins, tokenizer: Tokenizer) -> ToolPrompt:
    """The format that describes tools to the model if its chat template does not: that of the tool parser, if there is one."""
    registry = plugins.tool_parsers
    if registry.active is None or registry.active_factory is None:
        return ToolPrompt()
    tool_format = registry.active_factory(Turn(response_template=tokenizer.response_template)).tool_format
    info = registry.infos.get(registry.active)
    return ToolPrompt(tool_format, "" if info is None else info.example, is_default=registry.is_default)


def unlearned_parser(factory: ReasoningParserFactory | None, tokenizer: Tokenizer) -> ReasoningParser | None:
    """The reasoning parser, where neither the model's vocabulary nor its own template knows its markers."""
    parser = None if factory is None else factory(Turn(response_template=tokenizer.response_template))
    return parser if parser is not None and parser.end_marker and not knows_marker(parser.end_marker, tokenizer) else None


def thinking_budget(asked: int | None, unlearned: ReasoningParser | None, template: str | None) -> int | None:
    """The operator's default budget; without one, a fixed budget for a model that would never close its reasoning by itself.

    Warns where nothing in the chat template begins the reasoning of such a model.
    """
    if unlearned is None:
        return asked
    budget = UNLEARNED_THINKING_BUDGET if asked is None else asked
    marker = unlearned.end_marker
    is_opened = template is not None and marker.strip() in template
    log.log(
        logging.INFO if is_opened else logging.WARNING,
        "the model was not trained to reason in this format: neither its vocabulary nor its own chat template knows %r. %s "
        "The server ends the reasoning after %d tokens (--thinking-token-budget)",
        marker,
        "The chat template begins the reasoning." if is_opened else "A --chat-template could begin the reasoning.",
        budget,
    )
    return budget


def knows_marker(marker: str, tokenizer: Tokenizer) -> bool:
    """By its vocabulary, which has the marker or what it is made of, or its own template. The operator's teaches the model nothing."""
    text = marker.strip()
    has_token = any(token.text in text for token in tokenizer.added_tokens.values())
    return has_token or any(text in template for template in tokenizer.chat_templates.values())
