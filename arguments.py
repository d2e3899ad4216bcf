"""The command line: every flag, its default and its meaning. Imports nothing heavy, so that `--help` answers at once."""

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

from penstock import __version__
from penstock.engine.config import CompileMode, Dtype, EngineConfig, KVCacheDtype, NativeKernels, QuantizationMode, SpeculationMode
from penstock.engine.errors import ConfigurationError
from penstock.engine.grammar import AdditionalProperties
from penstock.serving.requests import ReasoningField
from penstock.vllm_arguments import ALL as VLLM_ARGUMENTS
from penstock.vllm_arguments import flag_of, to_our_flags

API_KEY_VARIABLE = "PENSTOCK_API_KEY"
COMMANDS = ("serve", "plugins", "parse", "grammar", "new-plugin")  # all but the first have flags of their own: see `commands`
Runner = Literal["auto", "generate", "pooling"]
ContentSpecialTokens = Literal["parse", "text"]
LOG_LEVELS = ("debug", "info", "warning", "error")
# As vLLM has them: other names of the same values.
DTYPES = {"half": "float16", "float": "float32"}
KV_CACHE_DTYPES = {"fp8_e4m3": "fp8"}
TOKEN_UNITS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
SEVERAL: dict[str, Any] = {"action": "extend", "nargs": "+"}  # values after one flag, which may be given again
LIKENESS = 0.85  # of a flag to one that is offered in its place: below it, offers mislead
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What the command line said, parsed and checked. Sizes are in bytes, times in seconds."""

    engine: EngineConfig
    verify_weights: bool
    runner: Runner
    served_model_names: tuple[str, ...]
    plugins: tuple[str, ...]
    without: tuple[str, ...]
    reasoning_parser: str
    tool_parser: str
    chat_template: str | None
    default_chat_template_kwargs: dict[str, Any]
    generation_config: str
    override_generation_config: dict[str, Any]
    thinking_token_budget: int | None
    reasoning_field: ReasoningField
    max_tool_calls: int
    trust_request_chat_template: bool
    content_special_tokens: ContentSpecialTokens
    additional_properties: AdditionalProperties
    allow_unknown_fields: bool
    host: str
    port: int
    api_keys: tuple[str, ...]
    share_prefix_cache: bool
    min_priority: int | None
    metrics_without_key: bool
    allowed_hosts: tuple[str, ...]
    allowed_origins: tuple[str, ...]
    max_body_size: int
    max_connections: int | None
    read_timeout: float
    write_timeout: float
    keep_alive_timeout: float
    keep_alive_interval: float
    drain_timeout: float
    log_level: str
    access_log: bool


class CommandParser(argparse.ArgumentParser):
    """Names the nearest flag where one is unknown: before anything else, since argparse may first trip over the value that follows it.

    `near_flags` are offered beside its own. A mistake is one line, and exit code 2.
    """

    near_flags: tuple[str, ...] = ()

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        self.check_flags(words)
        return super().parse_args(words, namespace)

    def check_flags(self, words: Sequence[str]) -> None:
        for flag in (word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)):
            if flag not in self._option_string_actions:
                nearest = difflib.get_close_matches(flag, [*self._option_string_actions, *self.near_flags], n=1, cutoff=LIKENESS)
                self.error(f"unknown flag {flag}" + (f" (did you mean {nearest[0]}?)" if nearest else ""))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse_arguments(argv: list[str] | None = None, parser: CommandParser | None = None) -> Arguments:
    """Raises `ConfigurationError` for values that do not go together; argparse itself exits with code 2 for those it cannot read.

    `parser` is one that `build_parser` made.
    """
    parser = parser or build_parser()
    words = to_our_flags(sys.argv[1:] if argv is None else argv, parser._option_string_actions)
    parser.check_flags(words)
    given = parser.parse_intermixed_args(words)  # the model may follow the flags
    model = _model_of(parser, given)
    environment_keys = [key.strip() for key in os.environ.get(API_KEY_VARIABLE, "").split(",")]
    api_keys = tuple(given.api_key or [key for key in environment_keys if key])
    if any(not key.strip() for key in api_keys):
        raise ConfigurationError("--api-key is empty")
    return Arguments(
        engine=EngineConfig(
            model=model,
            dtype=given.dtype,
            quantization=given.quantization,
            device=given.device,
            max_model_len=given.max_model_len,
            max_num_seqs=given.max_num_seqs,
            max_num_batched_tokens=given.max_num_batched_tokens,
            kv_cache_memory=given.kv_cache_memory,
            kv_cache_dtype=given.kv_cache_dtype,
            enable_prefix_caching=given.prefix_caching,
            max_waiting_requests=given.max_waiting_requests,
            max_waiting_tokens=given.max_waiting_tokens,
            priority_aging=given.priority_aging,
            compile=given.compile,
            native_kernels=given.native_kernels,
            speculation=given.speculation,
            async_scheduling=given.async_scheduling,
            seed=given.seed,
            num_threads=given.threads,
            trust_remote_code=given.trust_remote_code,
            matryoshka=given.matryoshka,
        ),
        verify_weights=given.verify_weights,
        runner=given.runner,
        served_model_names=tuple(given.served_model_name),
        plugins=tuple(given.plugin),
        without=tuple(given.without),
        reasoning_parser=given.reasoning_parser,
        tool_parser=given.tool_parser,
        chat_template=given.chat_template,
        default_chat_template_kwargs=given.default_chat_template_kwargs,
        generation_config=given.generation_config,
        override_generation_config=given.override_generation_config,
        thinking_token_budget=given.thinking_token_budget,
        reasoning_field=given.reasoning_field,
        max_tool_calls=given.max_tool_calls,
        trust_request_chat_template=given.trust_request_chat_template,
        content_special_tokens=given.content_special_tokens,
        additional_properties=given.additional_properties,
        allow_unknown_fields=given.allow_unknown_fields,
        host=given.host,
        port=given.port,
        api_keys=api_keys,
        share_prefix_cache=given.share_prefix_cache,
        min_priority=given.min_priority,
        metrics_without_key=given.metrics_without_key,
        allowed_hosts=tuple(host.lower() for host in given.allowed_hosts),
        allowed_origins=tuple(origin for origins in given.allowed_origins for origin in origins),
        max_body_size=given.max_body_size,
        max_connections=given.max_connections,
        read_timeout=given.read_timeout,
        write_timeout=given.write_timeout,
        keep_alive_timeout=given.keep_alive_timeout,
        keep_alive_interval=given.keep_alive_interval,
        drain_timeout=given.drain_timeout,
        log_level=given.log_level,
        access_log=given.access_log,
    )


def _model_of(parser: CommandParser, given: argparse.Namespace) -> str | None:
    """The model, given by its flag or as a word after `serve`."""
    for word in filter(None, (given.command, *given.plugin, *given.without)):
        if word in COMMANDS and word != "serve":
            parser.error(f"`{word}` goes before all flags: see penstock {word} --help")
        if word != given.command and _is_model(word):
            parser.error(f"{word!r} is no plug-in; a model goes right after `serve`: penstock serve {word} ...")
    if given.command != "serve":
        near = [] if _is_model(given.command) else difflib.get_close_matches(given.command, COMMANDS, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"to serve a model: penstock serve {given.command}"
        parser.error(f"there is no command {given.command!r}; {hint}")
    if None not in (given.model, given.served_model) and given.model != given.served_model:
        parser.error(f"two models are given: {given.served_model!r}, and {given.model!r} by --model")
    model: str | None = given.model or given.served_model
    return model


def _is_model(word: str) -> bool:
    """Whether it names a model by its form: an id, a directory or a GGUF file."""
    return ("/" in word and not word.endswith(".py")) or word.endswith(".gguf")


def build_parser(kind: type[CommandParser] = CommandParser) -> CommandParser:
    """`kind` decides what becomes of mistakes."""
    parser = kind(
        prog="penstock",
        usage="%(prog)s [serve [MODEL]] [FLAG ...]",
        description="Serve a language model, or one that embeds, scores or classifies texts, over OpenAI's HTTP interface. Without flags: "
        "a small default model at http://127.0.0.1:8000/v1.",
        epilog="vLLM's flags that ask for what is the case here, such as those of automatic tool choice or of parallel sizes of 1, are "
        "accepted; each of the others is refused with what to use instead. "
        "`penstock plugins` lists the plug-ins that are loaded, and what each registers. Without a server, `penstock parse` reads "
        "a model's output, `penstock grammar` tries schemas and grammars, and `penstock new-plugin` begins a plug-in. Each has a --help.",
        allow_abbrev=False,
    )
    parser.near_flags = tuple(flag_of(name) for name in VLLM_ARGUMENTS if "*" not in name)
    parser.add_argument("command", nargs="?", default="serve", metavar="COMMAND", help=f"{', '.join(COMMANDS)} (default: serve)")
    parser.add_argument("served_model", nargs="?", metavar="MODEL", help="after `serve`: the same as --model")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    _add_model_flags(parser)
    _add_format_flags(parser)
    _add_http_flags(parser)
    _add_connection_flags(parser)
    _add_log_flags(parser)
    _add_engine_flags(parser)
    # Set here and not at the flags: some versions of argparse would add "(default: True)" to their help.
    parser.set_defaults(access_log=True, prefix_caching=True, async_scheduling=None)
    return parser


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    add_model_choice(group)
    group.add_argument(
        "--served-model-name",
        **SEVERAL,
        default=[],
        metavar="NAME",
        help="what clients call the model; the first is the one in responses (default: --model)",
    )
    group.add_argument(
        "--runner",
        choices=get_args(Runner),
        default="auto",
        help="refuse a model of another kind: generate is for those that write text, pooling for those that turn it into numbers "
        "(default: auto, whatever the model's files say)",
    )
    group.add_argument(
        "--dtype",
        type=lambda text: DTYPES.get(text, text),
        choices=get_args(Dtype),
        default="auto",
        help="of weights and activations; half and float are float16 and float32 (default: auto)",
    )
    group.add_argument(
        "--quantization",
        choices=get_args(QuantizationMode),
        default="auto",
        help="how a model on the CPU keeps its weights. auto: those that a GGUF file quantizes in 4 or 8 bits, close to its own precision, "
        "all others as --dtype says; none: all as --dtype says; int4, int8: rounded to so many bits, 32 at a time, where they do not "
        "have as few already (default: auto)",
    )
    group.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: auto, CUDA where there is one)")
    group.add_argument(
        "--max-model-len",
        type=lambda text: None if text in ("auto", "-1") else number_of_tokens(text),
        metavar="TOKENS",
        help="prompt and answer together, such as 8192, 8k (8000) or 8K (8192); auto, the default: the model's",
    )
    group.add_argument(
        "--verify-weights",
        action="store_true",
        help="at start, compare every file of a converted model in the cache with the checksum from its conversion (default: those whose "
        "size or time of modification has changed)",
    )
    group.add_argument("--matryoshka", action="store_true", help="embeddings may be cut short (default: where the model's files say so)")


def add_model_choice(group: argparse._ArgumentGroup) -> None:
    """What every command takes that needs a model's files."""
    group.add_argument(
        "--model",
        metavar="ID|DIR|GGUF",
        help="a Hugging Face id, a local directory, a .gguf file, or one that is fetched once: smollm2 (SmolLM2-135M-Instruct), "
        "qwen-coder (Qwen2.5-Coder-0.5B-Instruct, for tools and structured output) or minilm, which embeds texts (default: smollm2)",
    )
    group.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model (default: never)")


def add_plugin_choice(group: argparse._ArgumentGroup, help: str, *, is_before_file: bool = True) -> None:
    """Where the command's file may follow, a flag takes one value."""
    several: dict[str, Any] = {"action": "append"} if is_before_file else SEVERAL
    group.add_argument("--plugin", **several, default=[], metavar="NAME|MODULE|FILE.py", help=help)
    group.add_argument("--without", **several, default=[], metavar="NAME", help="do not load this plug-in; repeatable")


def add_parser_choice(group: argparse._ArgumentGroup, *, has_model: bool) -> None:
    """What selects parsers. Where no model can decide, one that no flag names is None."""
    meaning = "load a plug-in and select the parser it names, such as deepseek_r1 or hermes; repeatable"
    if has_model:
        meaning += (
            ". auto, the default: choose unnamed parsers from the model's chat template and vocabulary; none: use only the parsers named"
        )
    add_plugin_choice(group, meaning, is_before_file=not has_model)
    options = "NAME|auto|none" if has_model else "NAME|none"
    default = "auto" if has_model else None
    default_help = "default: auto" if has_model else "default: the one that --plugin names, or none"
    opened = "; where the model was not trained on that, its chat template begins it" if has_model else ""
    group.add_argument(
        "--reasoning-parser", metavar=options, default=default, help=f"how the model writes its reasoning{opened} ({default_help})"
    )
    group.add_argument(
        "--tool-parser",
        "--tool-call-parser",
        metavar=options,
        default=default,
        help=f"how the model writes tool calls ({default_help}{', and hermes where its files show no format' if has_model else ''})",
    )


def add_reading_choice(group: argparse._ActionsContainer, when: str, default: AdditionalProperties) -> None:
    group.add_argument(
        "--additional-properties",
        choices=get_args(AdditionalProperties),
        default=default,
        help=f"how a JSON Schema is read that names properties and says nothing of others; {when}closed generates none of them, "
        "open may generate any (default: %(default)s)",
    )


def _add_format_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("formats and plug-ins")
    add_parser_choice(group, has_model=True)
    group.add_argument("--chat-template", metavar="FILE|NAME", help="a Jinja file, or one of: think, chatml (default: the model's own)")
    group.add_argument(
        "--default-chat-template-kwargs",
        type=_json_object,
        default={},
        metavar="JSON",
        help="arguments for the chat template that requests do not give, such as '{\"enable_thinking\": false}'",
    )
    group.add_argument(
        "--generation-config",
        default="auto",
        metavar="auto|vllm|PATH",
        help="where defaults for sampling and max_tokens come from. auto: the model's generation_config.json; vllm: nowhere, which means "
        "temperature 1 and no bound but the context; PATH: another generation_config.json, or its directory (default: auto)",
    )
    group.add_argument(
        "--override-generation-config",
        type=_json_object,
        default={},
        metavar="JSON",
        help='defaults that go before those of --generation-config, such as \'{"temperature": 0.5, "max_new_tokens": 512}\'',
    )
    group.add_argument(
        "--thinking-token-budget",
        type=integer(0),
        metavar="TOKENS",
        help="reasoning is closed after so many tokens, or after half of max_tokens, where a request does not say (default: no bound, "
        "or 64 on a model that was not trained on the parser's markers)",
    )
    group.add_argument(
        "--reasoning-field",
        choices=get_args(ReasoningField),
        default="reasoning_content",
        help="what answers call the reasoning; reasoning is vLLM's newer name (default: %(default)s)",
    )
    group.add_argument(
        "--max-tool-calls",
        type=integer(1),
        default=16,
        metavar="N",
        help="end an answer that has to call tools after N calls, and any answer after N equal calls in a row; a request may bound its "
        "calls itself (default: %(default)s)",
    )
    group.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="let requests bring a template, which is rendered in a process of its own with 256 MiB and 5 s of CPU time (default: refused)",
    )
    group.add_argument(
        "--content-special-tokens",
        choices=get_args(ContentSpecialTokens),
        default="parse",
        help="what the text of a special token is in messages, such as <|im_end|>. parse: that token; text: the characters that it is "
        "written with, so that only the chat template opens and ends turns (default: %(default)s)",
    )
    add_reading_choice(group, "where a request does not say: ", "closed")
    group.add_argument(
        "--allow-unknown-fields",
        action="store_true",
        help="ignore fields that the server does not know and name them in x-ignored-fields (default: 400)",
    )


def _add_http_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("HTTP")
    group.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    group.add_argument("--port", type=integer(0, 65535), default=8000, help="0 takes a free one (default: %(default)s)")
    group.add_argument(
        "--api-key",
        **SEVERAL,
        metavar="KEY",
        help=f"ask for it on every route but /health and /ping; repeatable (default: those in {API_KEY_VARIABLE}, separated by commas)",
    )
    group.add_argument(
        "--share-prefix-cache",
        action="store_true",
        help="reuse prefixes between API keys (default: only within one, if there are several)",
    )
    group.add_argument(
        "--min-priority",
        type=integer(-(2**31), 2**31 - 1),
        metavar="N",
        help="refuse requests with a lower `priority`; the lower runs first (default: 0 with several API keys, else none is refused)",
    )
    group.add_argument("--metrics-without-key", action="store_true", help="answer /metrics without an API key (default: with one)")
    group.add_argument(
        "--allowed-hosts",
        **SEVERAL,
        default=[],
        metavar="NAME",
        help="hosts that requests may be addressed to, without port; *.example.com for all below it, * for any. localhost and IP addresses "
        "are always allowed (default: --host alone at a loopback address without an API key, else any)",
    )
    group.add_argument(
        "--allowed-origins",
        type=origins,
        **SEVERAL,
        default=[],
        metavar="ORIGIN",
        help="CORS: origins that may call, or *; several, or a JSON list of them (default: none)",
    )


def _add_connection_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("connections and their limits")
    group.add_argument(
        "--max-connections",
        type=integer(1),
        metavar="N",
        help="that are open at the same time; further ones wait until some close (default: what the limit of file descriptors allows, "
        "16384 at most)",
    )
    group.add_argument(
        "--max-body-size", type=_size, default=16 * 2**20, metavar="SIZE", help="of a request, such as 1MiB (default: 16MiB)"
    )
    group.add_argument(
        "--read-timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="what a client gets to send the headers of a request, and then its body, plus a second for each 16 KiB of it; 0: as long as "
        "it takes (default: 30)",
    )
    group.add_argument(
        "--write-timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="end an answer that its client does not read for so long; 0: never (default: 60)",
    )
    group.add_argument(
        "--keep-alive-timeout",
        type=_seconds,
        default=75.0,
        metavar="SECONDS",
        help="close a connection that has had no request for so long; more than a proxy in front keeps it open; 0: never (default: 75)",
    )
    group.add_argument(
        "--keep-alive-interval",
        "--sse-keep-alive-interval",
        type=_seconds,
        default=15.0,
        metavar="SECONDS",
        help="a comment in silent streams so that proxies keep them open; 0: none (default: 15)",
    )
    group.add_argument(
        "--drain-timeout",
        "--shutdown-timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="what running requests get on shutdown (default: 30)",
    )


def _add_log_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("log")
    group.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="(default: %(default)s)")
    group.add_argument(
        "--access-log",
        action=argparse.BooleanOptionalAction,
        help="one line per request, with the reason where it is refused; successful polls of /health, /ping and /metrics only with "
        "--log-level debug (default: on)",
    )


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--max-num-seqs", type=integer(1), metavar="N", help="sequences that run at the same time (default: 64 on CPU, 256 on CUDA)"
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=number_of_tokens,
        metavar="TOKENS",
        help="prompt and answer tokens in one step (default: 1024 on CPU, 2048 on CUDA)",
    )
    group.add_argument(
        "--kv-cache-memory",
        "--kv-cache-memory-bytes",
        type=_size,
        metavar="SIZE",
        help="such as 2GiB (default: on CUDA what the model leaves free, on CPU 512 MiB or what one sequence of the full length takes)",
    )
    group.add_argument(
        "--kv-cache-dtype",
        type=lambda text: KV_CACHE_DTYPES.get(text, text),
        choices=get_args(KVCacheDtype),
        default="auto",
        help="of keys and values. auto: as --dtype; fp8, or fp8_e4m3: 8 bits without scales, on GPUs of compute capability 8.9 and later: "
        "fits twice as many tokens at some cost in accuracy (default: %(default)s)",
    )
    group.add_argument(
        "--prefix-caching",
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="reuse what earlier prompts began with (default: on)",
    )
    group.add_argument(
        "--max-waiting-requests",
        type=integer(1),
        default=1024,
        metavar="N",
        help="reject further requests with 429 when N are waiting, each of the `n` answers to one counted (default: %(default)s)",
    )
    group.add_argument(
        "--max-waiting-tokens",
        type=number_of_tokens,
        metavar="TOKENS",
        help="the same when the prompts that wait have so many tokens together (default: 32 times what the KV cache holds; with a model "
        "for pooling, no bound)",
    )
    group.add_argument(
        "--priority-aging",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="a request that has waited for so long goes before all that have not, whatever their `priority`; 0: never (default: 60)",
    )
    group.add_argument(
        "--compile",
        choices=get_args(CompileMode),
        default="auto",
        help="run a CPU model's decoder layers as compiled code, kept in the cache directory. auto: where there is a C++ compiler, another "
        "process compiles them while the server already answers; on: wait for it, or refuse to start; off: never, and no CUDA graphs on a "
        "GPU either (default: auto)",
    )
    group.add_argument(
        "--native-kernels",
        choices=get_args(NativeKernels),
        default="auto",
        help="run a CPU model on kernels that are built for this processor. auto: where there is a C++ compiler; none: on torch's "
        "portable code, which is slower. The two round differently, so answers may part after some tokens (default: auto)",
    )
    group.add_argument(
        "--speculation",
        choices=get_args(SpeculationMode),
        default="ngram",
        help="ngram: where a text repeats itself, try several tokens in one step; the answers are the same, and nothing is tried where it "
        "does not pay; none: one token at a time (default: %(default)s)",
    )
    group.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="put the next step together while one is computed, where that does not depend on what comes of it (default: on CUDA)",
    )
    group.add_argument("--threads", type=integer(1), metavar="N", help="CPU threads of the model (default: one per core)")
    group.add_argument("--seed", type=integer(0, 2**63 - 1), help="for requests that bring none (default: every start is different)")


def origins(text: str) -> list[str]:
    """One origin, or a JSON list of them, which is vLLM's spelling."""
    if not text.startswith("["):
        return [text]
    try:
        listed = json.loads(text)
    except ValueError:
        listed = None
    if not isinstance(listed, list) or not all(isinstance(origin, str) for origin in listed):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON list of strings, such as ["https://example.com"]')
    return listed


def parse_size(text: str) -> int:
    """Bytes from `2GiB`, `512M`, `1.5gb` or a plain number. Raises `ValueError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 2GiB, 512MB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])


def _size(text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size < 1:
        raise argparse.ArgumentTypeError("must be more than 0 bytes")
    return size


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    bounds = f"an integer of {low} or more" if high is None else f"an integer from {low} to {high}"

    def convert(text: str) -> int:
        if not re.fullmatch(r"-?\d+", text) or int(text) < low or (high is not None and int(text) > high):
            raise argparse.ArgumentTypeError(f"{text!r} is not {bounds}")
        return int(text)

    return convert


def number_of_tokens(text: str) -> int:
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)([{''.join(TOKEN_UNITS)}]?)", text)
    num_tokens = float(match[1]) * TOKEN_UNITS[match[2]] if match else 0.0
    if num_tokens < 1 or not num_tokens.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens of 1 or more, such as 8192 or 8K")
    return int(num_tokens)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return float(text)
