"""Every option of the operator, declared once: flags of the command line, keyword arguments of the library, docs/flags.md."""

import ipaddress
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.engine.config import EngineConfig
from penstock.engine.contracts.grammar import AdditionalProperties
from penstock.engine.options import Option, integer, json_object, option, options_of, origins, seconds, size
from penstock.engine.sampling.params import check_sampling_defaults
from penstock.serving.requests import ReasoningField

Runner = Literal["auto", "generate", "pooling", "transcription"]
ContentSpecialTokens = Literal["parse", "text"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
MetricPrefix = Literal["penstock", "vllm"]
SleepLevel = Literal["1", "2"]


@dataclass(frozen=True, slots=True)
class AdminAddress:
    """Where the admin interface is: a host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def read(cls, text: str) -> "AdminAddress":
        """`HOST:PORT`, `[HOST]:PORT` or `unix:PATH`."""
        if text.startswith("unix:") and text != "unix:":
            return cls(path=text.removeprefix("unix:"))
        host, _, port = text.rpartition(":")
        if not host or "/" in text or ("[" not in host and ":" in host):
            raise ValueError(f"{text!r} is not HOST:PORT, [HOST]:PORT or unix:PATH")
        return cls(host.strip("[]"), integer(0, 65535)(port))

    @property
    def is_own(self) -> bool:
        """Whether only this machine reaches it."""
        return bool(self.path) or self.host == "localhost" or _is_loopback(self.host)

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_toml(text: str) -> dict[str, Any]:
    """A file of the operator's. Raises `ValueError`."""
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def sampling_defaults(text: str) -> dict[str, Any]:
    """A JSON object of values by generation_config's names. Raises `ValueError`."""
    values = json_object(text)
    check_sampling_defaults(values)
    return values


def collector(text: str) -> str:
    """The URL of a collector of traces. Raises `ValueError`."""
    if not text.startswith(("http://", "https://")):
        hint = "; OTEL_EXPORTER_OTLP_PROTOCOL=grpc chooses gRPC" if text.startswith("grpc:") else ""
        raise ValueError(f"{text!r} is not a URL such as http://127.0.0.1:4318{hint}")
    return text


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of the request handlers. Sizes are in bytes, times in seconds; a time of 0 is no bound."""

    default_chat_template_kwargs: Mapping[str, Any] = option(
        {},
        "default arguments of the chat template, for requests that do not set them, such as '{\"enable_thinking\": false}'",
        "formats and plug-ins",
        metavar="JSON",
        read=json_object,
    )
    reasoning_field: ReasoningField = option(
        "reasoning_content",
        "the name of the reasoning's field in answers; reasoning is vLLM's newer name",
        "formats and plug-ins",
        is_server_only=True,
    )
    max_tool_calls: int = option(
        16,
        "end an answer that has to call tools after N calls, and any answer after N equal calls in a row; a request may bound its calls "
        "itself",
        "formats and plug-ins",
        metavar="N",
        read=integer(1),
    )
    trust_request_chat_template: bool = option(
        False,
        "accept chat templates in requests; each is rendered in a separate process with 256 MiB and 5 s of CPU time",
        "formats and plug-ins",
        default_help="refused",
        is_server_only=True,
    )
    allow_image_urls: bool = option(
        False,
        "fetch images that requests name by an https URL, from public addresses only",
        "formats and plug-ins",
        default_help="data URLs only",
    )
    additional_properties: AdditionalProperties = option(
        "closed",
        "properties that a JSON Schema does not mention, if it names some: closed generates none of them, open may generate any",
        "formats and plug-ins",
        default_help="closed, unless a request says",
    )
    allow_unknown_fields: bool = option(
        False,
        "ignore unknown fields of requests and name them in x-ignored-fields",
        "formats and plug-ins",
        default_help="400",
        is_server_only=True,
    )
    adapter_dir: str | None = option(
        None,
        "allow clients to load adapters from this directory, and unload them, by /v1/load_lora_adapter and /v1/unload_lora_adapter; not "
        "with --api-servers",
        "model",
        default_help="those of --adapter alone",
        metavar="DIR",
        is_server_only=True,
        needs_generation=True,
    )
    response_store: str | None = option(
        None,
        "a file that keeps stored responses over restarts",
        "stored responses",
        default_help="they are kept in memory",
        metavar="FILE",
        is_server_only=True,
    )
    response_store_size: int = option(
        256 * 2**20,
        "the largest size of all stored responses together; the least recently used are evicted first, running ones never",
        "stored responses",
        default_help="256MiB",
        metavar="SIZE",
        read=size,
        is_server_only=True,
    )
    response_store_count: int = option(
        10_000, "the largest number of stored responses", "stored responses", metavar="N", read=integer(1), is_server_only=True
    )
    response_store_age: float = option(
        7 * 86400.0,
        "evict stored responses that have not been used for this time; 0: never",
        "stored responses",
        default_help="7 days",
        metavar="SECONDS",
        read=seconds,
        is_server_only=True,
    )
    api_keys: tuple[str, ...] = option(
        (),
        "require this key on every route but /health, /ping, /ready, /docs, /openapi.json and the files of the playground; repeatable",
        "HTTP",
        name="api_key",
        default_help="none",
        metavar="KEY",
        is_server_only=True,
        is_secret=True,
    )
    keys_file: str | None = option(
        None,
        "accept the API keys of this file, which has their names, hashes and limits; read again at SIGHUP",
        "HTTP",
        name="keys",
        default_help="those of --api-key alone",
        metavar="FILE.toml",
        is_server_only=True,
    )
    share_prefix_cache: bool = option(
        False,
        "share cached prefixes between API keys",
        "HTTP",
        default_help="only within one, if there are several",
        is_server_only=True,
    )
    isolate_keys: bool = option(
        False,
        "share cached prefixes within one API key only, even if there is one key: other servers may use the same --kv-cache-dir",
        "HTTP",
        default_help="if there are several keys",
        is_server_only=True,
    )
    min_priority: int | None = option(
        None,
        "refuse requests with a lower `priority`; the lower runs first",
        "HTTP",
        default_help="0 with several API keys, else any is accepted",
        metavar="N",
        read=integer(-(2**31), 2**31 - 1),
        is_server_only=True,
    )
    playground: bool = option(
        True,
        "serve a page at / to try the model in a browser; its requests need an API key like any others",
        "HTTP",
        default_help="on",
        is_server_only=True,
    )
    metrics_without_key: bool = option(False, "answer /metrics without an API key", "HTTP", default_help="with one", is_server_only=True)
    metric_prefix: MetricPrefix = option(
        "penstock",
        "the names in /metrics. vllm: metrics that vLLM has are also shown under its names and with its labels, for dashboards and routers "
        "made for it",
        "observability",
        is_server_only=True,
    )
    otlp_endpoint: str | None = option(
        None,
        "export traces to this collector over OTLP, such as http://127.0.0.1:4318; takes the extra `otel`",
        "observability",
        default_help="as OpenTelemetry's environment variables say",
        metavar="URL",
        read=collector,
        aliases=("otlp_traces_endpoint",),
        is_server_only=True,
    )
    docs: bool = option(
        True,
        "serve a page of the API at /docs, and its OpenAPI document at /openapi.json, without an API key",
        "HTTP",
        default_help="on",
        is_server_only=True,
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "hosts that requests may be addressed to, without port; *.example.com for all its subdomains, * for any. localhost and IP "
        "addresses are always allowed",
        "HTTP",
        default_help="--host alone at a loopback address without an API key, else any",
        metavar="NAME",
        read=str.lower,
        is_server_only=True,
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "CORS: origins that may call, or *; several, or a JSON list of them",
        "HTTP",
        default_help="none",
        metavar="ORIGIN",
        read=origins,
        is_server_only=True,
    )
    max_connections: int | None = option(
        None,
        "connections open at the same time; further ones wait until some close",
        "connections and their limits",
        default_help="what the limit of file descriptors allows, 16384 at most",
        metavar="N",
        read=integer(1),
        is_server_only=True,
    )
    max_body_size: int = option(
        16 * 2**20,
        "the largest body of a request, such as 1MiB",
        "connections and their limits",
        default_help="16MiB",
        metavar="SIZE",
        read=size,
        is_server_only=True,
    )
    read_timeout: float = option(
        30.0,
        "time for a client to send the headers of a request, and then its body, plus a second for each 16 KiB of it; 0: no limit",
        "connections and their limits",
        metavar="SECONDS",
        read=seconds,
        is_server_only=True,
    )
    request_timeout: float = option(
        0.0,
        "end every answer this long after its request's arrival, even if the request's `timeout` is longer; 0: no limit",
        "connections and their limits",
        metavar="SECONDS",
        read=seconds,
        is_server_only=True,
    )
    write_timeout: float = option(
        60.0,
        "abort an answer that its client has not read from for this time; 0: never",
        "connections and their limits",
        metavar="SECONDS",
        read=seconds,
        is_server_only=True,
    )
    keep_alive_timeout: float = option(
        75.0,
        "close a connection that has had no request for this time, which should be longer than a proxy in front keeps it open; 0: never",
        "connections and their limits",
        metavar="SECONDS",
        read=seconds,
        is_server_only=True,
    )
    files_dir: str | None = option(
        None,
        "keep files here, and serve /v1/files and /v1/batches; for one server at a time, and not with --api-servers",
        "files and batches",
        default_help="no files, no batches",
        metavar="DIR",
        is_server_only=True,
    )
    max_file_size: int = option(
        200 * 2**20,
        "the largest file that may be uploaded, such as 1GiB",
        "files and batches",
        default_help="200MiB",
        metavar="SIZE",
        read=size,
        is_server_only=True,
    )
    files_quota: int = option(
        10 * 2**30,
        "refuse uploads and batches once all files together have this size",
        "files and batches",
        default_help="10GiB",
        metavar="SIZE",
        read=size,
        is_server_only=True,
    )
    max_batch_requests: int = option(
        32,
        "requests of batches that the engine has at the same time",
        "files and batches",
        metavar="N",
        read=integer(1),
        is_server_only=True,
    )
    keep_alive_interval: float = option(
        15.0,
        "interval at which idle streams get a comment, so that proxies keep them open; 0: never",
        "connections and their limits",
        metavar="SECONDS",
        read=seconds,
        aliases=("sse_keep_alive_interval",),
        is_server_only=True,
    )

    @property
    def requires_key(self) -> bool:
        return bool(self.api_keys) or self.keys_file is not None

    @property
    def has_several_keys(self) -> bool:
        """Whether there may be clients that do not trust each other."""
        return len(self.api_keys) > 1 or self.keys_file is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """All options, from the command line or a caller of the library. Times are in seconds."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerOptions = field(default_factory=ServerOptions)
    served_model_names: tuple[str, ...] = option(
        (),
        "the model's names for clients; responses have the first",
        "model",
        name="served_model_name",
        default_help="--model; of a directory its name, of a GGUF file the name in it (general.name), else the file's",
        metavar="NAME",
    )
    models: str | None = option(
        None,
        "serve the models of this file in place of one: each is loaded when a request first names it, and unloaded when another one "
        "needs its memory; see docs/several-models.md. Not with --api-servers",
        "model",
        default_help="the one of --model",
        metavar="FILE.toml",
        is_server_only=True,
    )
    models_memory: int | None = option(
        None,
        "for --models: the maximum memory of all loaded models together, with their KV caches, such as 24GiB",
        "model",
        default_help="the file's, else 80 % of the memory free at start",
        metavar="SIZE",
        read=size,
        is_server_only=True,
    )
    models_wait: float | None = option(
        None,
        "for --models: how long a request waits for its model to be loaded before it gets a 503; 0: no bound",
        "model",
        default_help="the file's, else 300",
        metavar="SECONDS",
        read=seconds,
        is_server_only=True,
    )
    runner: Runner = option(
        "auto",
        "refuse a model of another kind: generate is for models that generate text, pooling for models that embed, score or classify it, "
        "transcription for Whisper",
        "model",
        default_help="auto, as the model's files say",
    )
    verify_weights: bool = option(
        False,
        "at start, compare every file of a converted model in the cache with the checksum from its conversion",
        "model",
        default_help="those whose size or time of modification has changed",
    )
    plugins: tuple[str, ...] = option(
        (),
        "load a plug-in and select the parser it names, such as deepseek_r1 or hermes; repeatable. auto: choose unnamed parsers from the "
        "model's chat template and vocabulary; none: use only the parsers named",
        "formats and plug-ins",
        name="plugin",
        default_help="auto",
        metavar="NAME|MODULE|FILE.py",
        needs_generation=True,
        neutral=("auto", "none"),
    )
    without: tuple[str, ...] = option((), "do not load this plug-in; repeatable", "formats and plug-ins", metavar="NAME")
    reasoning_parser: str = option(
        "auto",
        "the format of the model's reasoning; for a model that was not trained on it, the chat template begins the reasoning",
        "formats and plug-ins",
        metavar="NAME|auto|none",
        needs_generation=True,
        neutral=("none",),
    )
    tool_parser: str = option(
        "auto",
        "the format of the model's tool calls",
        "formats and plug-ins",
        default_help="auto, and hermes if its files show no format",
        metavar="NAME|auto|none",
        aliases=("tool_call_parser",),
        needs_generation=True,
        neutral=("none",),
    )
    chat_template: str | None = option(
        None,
        "a Jinja file, or one of: think, chatml",
        "formats and plug-ins",
        default_help="the model's own",
        metavar="FILE|NAME",
    )
    generation_config: str = option(
        "auto",
        "the source of defaults for sampling and max_tokens. auto: the model's generation_config.json; vllm: none, which means "
        "temperature 1 and no bound but the context; PATH: another generation_config.json, or its directory",
        "formats and plug-ins",
        metavar="auto|vllm|PATH",
    )
    override_generation_config: dict[str, Any] = option(
        {},
        'defaults that override those of --generation-config, such as \'{"temperature": 0.5, "max_new_tokens": 512}\'',
        "formats and plug-ins",
        metavar="JSON",
        read=sampling_defaults,
        needs_generation=True,
    )
    thinking_token_budget: int | None = option(
        None,
        "close the reasoning after this many tokens, or after half of max_tokens, unless a request sets a budget",
        "formats and plug-ins",
        default_help="no bound, or 64 on a model that was not trained on the parser's markers",
        metavar="TOKENS",
        read=integer(0),
        needs_generation=True,
    )
    content_special_tokens: ContentSpecialTokens = option(
        "parse",
        "how the text of a special token, such as <|im_end|>, is read in messages. parse: as that token; text: as ordinary characters, so "
        "that only the chat template opens and ends turns",
        "formats and plug-ins",
        needs_generation=True,
    )
    host: str = option("127.0.0.1", "address to listen on", "HTTP", metavar="HOST", is_server_only=True)
    port: int = option(8000, "0: a free port", "HTTP", metavar="PORT", read=integer(0, 65535), is_server_only=True)
    api_servers: int = option(
        0,
        "serve HTTP in N processes besides the engine's: for more tokens per second than one process can write to its clients",
        "HTTP",
        default_help="0: the engine's process serves",
        metavar="N",
        read=integer(0, 64),
        is_server_only=True,
        needs_generation=True,
    )
    drain_timeout: float = option(
        30.0,
        "time for running requests to finish at shutdown",
        "connections and their limits",
        metavar="SECONDS",
        read=seconds,
        aliases=("shutdown_timeout",),
        is_server_only=True,
    )
    admin: AdminAddress | None = option(
        None,
        "serve the admin interface at this address, separately from the API: see docs/admin.md. A socket is for its user alone; an "
        "address that other machines can reach needs --admin-key",
        "administration",
        default_help="no admin interface",
        metavar="HOST:PORT|unix:PATH",
        read=AdminAddress.read,
        is_server_only=True,
    )
    admin_key: str | None = option(
        None,
        "require this key for the admin interface; it must differ from every --api-key",
        "administration",
        default_help="none",
        metavar="KEY",
        is_server_only=True,
        is_secret=True,
    )
    sleep_idle_seconds: float = option(
        0.0,
        "free memory once no request has come for this time; the next one waits until the model is awake again; 0: never",
        "administration",
        metavar="SECONDS",
        read=seconds,
        is_server_only=True,
        needs_generation=True,
    )
    sleep_idle_level: SleepLevel = option(
        "2",
        "memory that --sleep-idle-seconds frees: 1: the KV cache; 2: also the weights, which are written to the cache directory once",
        "administration",
        is_server_only=True,
        needs_generation=True,
        neutral=("1",),
    )
    log_level: LogLevel = option("info", "the lowest level that is logged", "observability", is_server_only=True)
    log_format: LogFormat = option(
        "text", "format of the log's lines. json: each as one object, for programs", "observability", is_server_only=True
    )
    access_log: bool = option(
        True,
        "log one line per request, with the reason if it is refused; successful polls of /health, /ping, /ready and /metrics only with "
        "--log-level debug",
        "observability",
        default_help="on",
        is_server_only=True,
    )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Arguments":
        """From values by the names of their options."""

        def chosen(kind: type) -> dict[str, Any]:
            return {each.field: values[each.name] for each in options_of(kind) if each.name in values}

        return cls(engine=EngineConfig(**chosen(EngineConfig)), server=ServerOptions(**chosen(ServerOptions)), **chosen(cls))

    def values(self) -> Iterator[tuple[Option, Any]]:
        """Each option with its value."""
        for holder in (self.engine, self, self.server):
            kind: type = type(holder)
            yield from ((each, getattr(holder, each.field)) for each in options_of(kind))


OPTIONS: Mapping[str, Option] = {each.name: each for kind in (EngineConfig, Arguments, ServerOptions) for each in options_of(kind)}
# Also under the names of aliases and, as the library takes them, of fields.
OPTIONS_BY_ANY_NAME: Mapping[str, Option] = {name: each for each in OPTIONS.values() for name in (each.name, each.field, *each.aliases)}
