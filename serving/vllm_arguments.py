"""vLLM's arguments that Penstock does not have: what each means here, for the command line and the library alike. Imports nothing heavy."""

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import combinations
from typing import Any

from penstock.engine.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class VllmArgument:
    """Values in `neutral` request what Penstock does anyway and change nothing, as does None. `meanings` maps a value to one of our
    arguments, with that argument's value. Every other value is refused with `hint`: what to use instead, or the reason.

    In a hint, `{compile=off}` is one of our arguments, shown as the caller writes it. On the command line a switch takes no value and has a
    form with `--no-`.
    """

    hint: str
    neutral: tuple[Any, ...] = ()
    meanings: Sequence[tuple[Any, str, Any]] = field(default=(), kw_only=True)
    is_switch: bool = field(default=False, kw_only=True)

    def settings(self, value: Any, refuse: Callable[[str], ConfigurationError], *, is_dotted: bool = False) -> list[tuple[str, Any]]:
        """Our arguments that stand for this value, by name. Raises what `refuse` makes of the hint."""
        if value is None or (not is_dotted and value in self.neutral):
            return []
        for known, name, ours in self.meanings:
            if value == known:
                return [(name, ours)]
        raise refuse(self.hint)


def _switch(hint: str, *neutral: bool, meanings: Sequence[tuple[Any, str, Any]] = ()) -> VllmArgument:
    return VllmArgument(hint, neutral, meanings=meanings, is_switch=True)


LIKENESS = 0.85  # of a name to one that is offered in its place: below it, offers mislead
NO_MEDIA = tuple(dict.fromkeys(kinds, 0) for size in range(3) for kinds in combinations(("video", "audio"), size))
WITHOUT_EFFECT = _switch("it is True or False", True, False)
ONE_DEVICE = VllmArgument("a model is shared among ranks by {tensor_parallel_size} or {pipeline_parallel_size} alone", (1,))
ONE_PROCESS = VllmArgument("a model is shared among ranks by {tensor_parallel_size} or {pipeline_parallel_size} alone")
NO_MEDIA_SETTINGS = VllmArgument("images are read by the model's processor; there are no other media", ("", {}, False))
OWN_TOKENIZER = VllmArgument("the tokenizer in the model's directory is used")
OWN_KERNELS = VllmArgument("the device decides which kernels run", ("auto",))
OWN_LOADING = VllmArgument("models are read from safetensors or GGUF files, as they are")
SPECULATION = VllmArgument("use {speculation}: 'ngram', 'suffix', 'draft' with {draft_model}, 'mtp', or 'none'")
CACHE_STAYS = VllmArgument("the KV cache stays in this process")
GRAPHS = VllmArgument("{compile} controls the capture of CUDA graphs")
BACKEND = VllmArgument("a request chooses the grammar backend: `backend` in its structured outputs", ("auto", {}))
OWN_CONFIG = VllmArgument("change the model's config.json", ({},))
LOCAL_COPY = VllmArgument("name a local directory that holds this revision", ("main",))
TRACES = VllmArgument("{otlp_endpoint=URL} exports traces, with queue, prefill and decode; metrics are always counted", (False,))
NO_REQUEST_LOG = "the contents of requests are not logged; the access log, on by default, has a line for each ({access_log})"
TLS = VllmArgument("put a proxy in front that speaks TLS")

# Arguments of both `LLM` and the command line.
ENGINE: Mapping[str, VllmArgument] = {
    "additional_config": VllmArgument("nothing here is configured by it", ({},)),
    "all2all_backend": ONE_DEVICE,
    "allowed_local_media_path": VllmArgument("requests cannot name files of the server", ("",)),
    "allowed_media_domains": VllmArgument("{allow_image_urls} lets images be fetched from any public address", ("", [])),
    "attention_backend": OWN_KERNELS,
    "attention_config": OWN_KERNELS,
    "block_size": VllmArgument("blocks of the KV cache hold 16 tokens", (16,)),
    "calculate_kv_scales": _switch("the 8-bit KV cache needs no scales from a calibration", False),
    "code_revision": LOCAL_COPY,
    "collect_detailed_traces": TRACES,
    "compilation_config": VllmArgument("use {compile}", ({},)),
    "config_format": VllmArgument("models are read as transformers saves them", ("auto", "hf")),
    "convert": VllmArgument("the model's own files define its purpose", ("auto", "none")),
    "cpu_offload_gb": VllmArgument("weights stay where the model runs", (0,)),
    "cuda_graph_sizes": GRAPHS,
    "cudagraph_capture_sizes": GRAPHS,
    "data_parallel_size": ONE_DEVICE,
    "data_parallel_size_local": ONE_DEVICE,
    "data_parallel_*": ONE_PROCESS,
    "dbo_*": ONE_PROCESS,
    "dcp_*": ONE_PROCESS,
    "decode_context_parallel_size": ONE_DEVICE,
    "disable_async_output_proc": _switch("use {async_scheduling=False}", False),
    "disable_cascade_attn": WITHOUT_EFFECT,
    "disable_chunked_mm_input": WITHOUT_EFFECT,
    "disable_custom_all_reduce": WITHOUT_EFFECT,
    "disable_hybrid_kv_cache_manager": _switch("use {hybrid_kv_cache=False}", False, meanings=[(True, "hybrid_kv_cache", False)]),
    "disable_log_requests": _switch(NO_REQUEST_LOG, True),
    "disable_log_stats": WITHOUT_EFFECT,  # none are logged, and they are always counted
    "disable_mm_preprocessor_cache": WITHOUT_EFFECT,
    "disable_sliding_window": _switch("the model's own windows are kept", False),
    "distributed_executor_backend": VllmArgument("ranks are processes: see {tensor_parallel_size}", ("uni", "mp", "external_launcher")),
    "download_dir": VllmArgument("models are kept where huggingface_hub keeps them: set HF_HOME"),
    "ec_*": CACHE_STAYS,
    "enable_chunked_prefill": _switch("long prompts are always computed in chunks", True),
    "enable_dbo": _switch("a model runs on one device", False),
    "enable_eplb": _switch("a model runs on one device", False),
    "enable_expert_parallel": _switch("a model runs on one device", False),
    "enable_flashinfer_autotune": WITHOUT_EFFECT,
    "enable_log_requests": _switch(NO_REQUEST_LOG, False),
    "enable_lora_bias": _switch("only the weights of layers can be changed, not their biases", False),
    "enable_mm_embeds": _switch("images are accepted, but not their embeddings", False),
    "enable_prompt_adapter": _switch("a request of the Executor may have a table of prompt tuning: `prompt_tuning_config`", False),
    "enable_return_routed_experts": _switch("use `additional_outputs` of the sampling parameters", False),
    "enable_sleep_mode": WITHOUT_EFFECT,  # `sleep` is always there
    "enforce_eager": _switch("use {compile=off}", False, meanings=[(True, "compile", "off")]),
    "expert_placement_strategy": ONE_PROCESS,
    "eplb_config": ONE_PROCESS,
    "fully_sharded_loras": _switch("a model runs on one device", False),
    "gpu_memory_utilization": VllmArgument("use {kv_cache_memory=8GiB}, the size of the KV cache alone"),
    "guided_decoding_backend": BACKEND,
    "guided_decoding_*": BACKEND,
    "hf_config_path": OWN_CONFIG,
    "hf_overrides": OWN_CONFIG,
    "hf_token": VllmArgument("set HF_TOKEN in the environment"),
    "ignore_patterns": OWN_LOADING,
    "io_processor_plugin": VllmArgument("{plugin} loads parsers, logits processors and grammar backends", ("",)),
    "kv_cache_dtype_skip_layers": VllmArgument("{kv_cache_dtype} is for all layers"),
    "kv_cache_metrics": TRACES,
    "kv_cache_metrics_sample": TRACES,
    "kv_offloading_*": VllmArgument("use {kv_cache_dir=/var/cache/kv}, which keeps blocks on disk"),
    "kv_sharing_fast_prefill": _switch("all layers compute the prompt", False),
    "kv_events_config": VllmArgument("use {kv_events=tcp://*:5557}, {kv_events_topic=TOPIC} and {kv_events_replay=tcp://*:5558}"),
    "kv_transfer_*": CACHE_STAYS,
    "limit_mm_per_prompt": VllmArgument(
        "a request may have 32 images if the model takes images, and no other media; {language_model_only} refuses all",
        ("", *NO_MEDIA),
        meanings=[({"image": 0, **other}, "language_model_only", True) for other in NO_MEDIA],
    ),
    "linear_backend": OWN_KERNELS,
    "load_format": VllmArgument("models are read from safetensors or GGUF files", ("auto", "safetensors")),
    "logits_processors": VllmArgument("{plugin=FILE.py} registers them, and requests name them"),
    "logprobs_mode": VllmArgument("log probabilities are computed from the raw logits", ("raw_logprobs",)),
    "long_prefill_token_threshold": VllmArgument("{max_num_batched_tokens} bounds every step", (0,)),
    "lora_dtype": VllmArgument("adapters have the type of the model's activations", ("auto",)),
    "lora_extra_vocab_size": VllmArgument("embeddings cannot be changed", (0,)),
    "mamba_*": VllmArgument("recurrences are kept in float32, convolutions in the type of the activations", ("auto",)),
    "master_*": ONE_PROCESS,
    "max_cudagraph_capture_size": GRAPHS,
    "max_logprobs": VllmArgument("there are at most 20", (20,)),
    "max_long_partial_prefills": VllmArgument("{max_num_batched_tokens} bounds every step", (1,)),
    "max_num_partial_prefills": VllmArgument("{max_num_batched_tokens} bounds every step", (1,)),
    "max_parallel_loading_workers": ONE_DEVICE,
    "max_seq_len_to_capture": GRAPHS,
    "media_*": NO_MEDIA_SETTINGS,
    "mm_*": NO_MEDIA_SETTINGS,
    "model_impl": VllmArgument("models are transformers' own", ("auto", "transformers")),
    "model_loader_extra_config": OWN_LOADING,
    "moe_backend": OWN_KERNELS,
    "nnodes": ONE_DEVICE,
    "node_rank": VllmArgument("a model runs on one device", (0,)),
    "ngram_prompt_lookup_*": SPECULATION,
    "num_gpu_blocks_override": VllmArgument("use {kv_cache_memory=8GiB}"),
    "num_lookahead_slots": VllmArgument("use {speculation}: 'ngram', 'suffix', 'draft' with {draft_model}, 'mtp', or 'none'", (0,)),
    "num_scheduler_steps": VllmArgument("use {async_scheduling}", (1,)),
    "num_speculative_tokens": SPECULATION,
    "optimization_level": VllmArgument("use {compile}"),
    "otlp_*": VllmArgument("use {otlp_endpoint=http://127.0.0.1:4318}, and OpenTelemetry's environment variables"),
    "override_pooler_config": VllmArgument("the model's own files say how it pools", ({},)),
    "performance_mode": VllmArgument("it cannot be chosen", ("balanced",)),
    "pooler_config": VllmArgument("the model's own files say how it pools", ({},)),
    "pp_*": ONE_PROCESS,
    "prefill_context_parallel_size": ONE_DEVICE,
    "prefix_caching_hash_algo": VllmArgument("the hash of prefixes cannot be chosen", ("builtin", "sha256")),
    "preemption_mode": VllmArgument("preempted sequences are recomputed", ("recompute",)),
    "profiler_config": VllmArgument("take a profile with `penstock admin profile`", ({},)),
    "pt_load_map_location": OWN_LOADING,
    "quantization_param_path": VllmArgument("the 8-bit KV cache needs no scales from a calibration"),
    "ray_*": ONE_PROCESS,
    "revision": LOCAL_COPY,
    "rope_*": OWN_CONFIG,
    "safetensors_load_strategy": OWN_LOADING,
    "scheduler_cls": VllmArgument("there is one scheduler"),
    "scheduler_reserve_full_isl": WITHOUT_EFFECT,
    "scheduling_policy": VllmArgument(
        "lower `priority` goes first, and requests of equal priority in turn", ("priority",), meanings=[("fcfs", "min_priority", 0)]
    ),
    "skip_mm_profiling": WITHOUT_EFFECT,
    "skip_tokenizer_init": _switch("a model is always loaded with its tokenizer", False),
    "spec_*": SPECULATION,
    "speculative_*": SPECULATION,
    "stream_interval": VllmArgument("each step's tokens are sent at once; a request may set `stream_interval`", (1,)),
    "structured_outputs_config": BACKEND,
    "swap_space": VllmArgument("sequences that do not fit the KV cache are preempted and recomputed", (0, 4)),
    "task": VllmArgument(
        "use {runner}, 'generate', 'pooling' or 'transcription'",
        ("auto",),
        meanings=[
            ("generate", "runner", "generate"),
            ("transcription", "runner", "transcription"),
            *((task, "runner", "pooling") for task in ("embed", "embedding", "classify", "score", "reward")),
        ],
    ),
    "tokenizer": OWN_TOKENIZER,
    "tokenizer_mode": VllmArgument("the tokenizer in the model's directory is used", ("auto",)),
    "tokenizer_*": OWN_TOKENIZER,
    "ubatch_size": ONE_PROCESS,
    "use_tqdm_on_load": WITHOUT_EFFECT,
    "use_v2_block_manager": WITHOUT_EFFECT,
    "weight_transfer_config": OWN_LOADING,
    "worker_*": ONE_PROCESS,
}
# What only a server has.
SERVER: Mapping[str, VllmArgument] = {
    "allow_credentials": _switch("pages may call without credentials: see {allowed_origins}", False),
    "allowed_headers": VllmArgument("pages may send any header: see {allowed_origins}", (["*"], "*")),
    "allowed_methods": VllmArgument("pages may use any method: see {allowed_origins}", (["*"], "*")),
    "api_server_count": VllmArgument("use {api_servers}, which counts processes besides the engine's", (1,)),
    "chat_template_content_format": VllmArgument("the template decides", ("auto",)),
    "disable_access_log_for_endpoints": VllmArgument("use {access_log=False}"),
    "disable_fastapi_docs": _switch("use {docs=False}", False, meanings=[(True, "docs", False)]),
    "disable_frontend_multiprocessing": _switch("use {api_servers}", True),
    "disable_uvicorn_access_log": _switch("use {access_log=False}", False, meanings=[(True, "access_log", False)]),
    "enable_auto_tool_choice": _switch("use {tool_parser=none}", True),
    "enable_force_include_usage": _switch("a client asks for usage in streams: `stream_options`", False),
    "enable_log_deltas": WITHOUT_EFFECT,
    "enable_log_outputs": _switch("answers are not logged", False),
    "enable_offline_docs": WITHOUT_EFFECT,
    "enable_prompt_tokens_details": _switch("usage always includes them", True),
    "enable_reasoning": _switch("use {reasoning_parser=none}", True),
    "enable_request_id_headers": _switch("answers always have x-request-id", True),
    "enable_server_load_tracking": _switch("/metrics has the numbers of running and waiting requests", False),
    "enable_ssl_refresh": TLS,
    "enable_tokenizer_info_endpoint": _switch("use /tokenize; /tokenizer_info is not served", False),
    "exclude_tools_when_tool_choice_none": _switch("tools are not in the prompt if `tool_choice` is `none`", True),
    "grpc": _switch("only HTTP is served", False),
    "h11_*": VllmArgument("use {max_body_size}"),
    "headless": _switch("a model runs on one device, in this process", False),
    "log_config_file": VllmArgument("use {log_level}"),
    "log_error_stack": _switch("use {log_level=debug}", False),
    "max_log_len": VllmArgument("requests are not logged"),
    "max_num_queued_*": VllmArgument("use {max_waiting_requests}, which does not count running requests"),
    "middleware": VllmArgument("put a proxy in front", ([],)),
    "prompt_adapters": VllmArgument("a request of the Executor may have a table of prompt tuning: `prompt_tuning_config`"),
    "reasoning_parser_plugin": VllmArgument("{plugin=FILE.py} loads a parser, written as docs/plugins.md says", ("",)),
    "response_role": VllmArgument("answers are the assistant's", ("assistant",)),
    "return_tokens_as_token_ids": _switch("a request asks for it", False),
    "root_path": VllmArgument("let the proxy remove the prefix", ("",)),
    "ssl_*": TLS,
    "tokens_only": _switch("all routes are served", False),
    "tool_parser_plugin": VllmArgument("{plugin=FILE.py} loads a parser, written as docs/plugins.md says", ("",)),
    "tool_server": VllmArgument("tools are the client's to run"),
    "uds": VllmArgument("use {host} and {port}"),
    "uvicorn_log_level": VllmArgument("use {log_level}"),
}
ALL = {**ENGINE, **SERVER}
SHORT_FLAGS = {
    "-O": "optimization_level",
    "-ac": "attention_config",
    "-asc": "api_server_count",
    "-cc": "compilation_config",
    "-dcp": "decode_context_parallel_size",
    "-dp": "data_parallel_size",
    "-dpa": "data_parallel_address",
    "-dpl": "data_parallel_size_local",
    "-ep": "enable_expert_parallel",
    "-n": "nnodes",
    "-pcp": "prefill_context_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-q": "quantization",
    "-r": "node_rank",
    "-sc": "speculative_config",
    "-tp": "tensor_parallel_size",
}


def find(name: str, table: Mapping[str, VllmArgument]) -> VllmArgument | None:
    """The argument of this name in snake case, or of the first pattern that it fits."""
    if name in table:
        return table[name]
    return next((argument for pattern, argument in table.items() if "*" in pattern and fnmatch(name, pattern)), None)


def to_our_flags(words: Sequence[str], known: Container[str]) -> list[str]:
    """The words of a command line with vLLM's flags put as ours, or left out where they change nothing. `known` are our own flags, which
    may be written with underscores, as vLLM's.

    Raises `ConfigurationError` for one that is not supported. Unknown flags stay as they are.
    """
    translated: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, text = word.partition("=")
        own = _own_flag(flag, known)
        is_negated, argument = (False, None) if own is not None else _flag_argument(flag)
        if argument is None:
            translated.append(f"{own or flag}{equals}{text}")
            continue
        if argument.is_switch and not equals:
            value: Any = not is_negated
        elif equals or (rest and not rest[0].startswith("-")):
            value = _value(text if equals else rest.pop(0))
        else:
            raise ConfigurationError(f"{flag} needs a value")
        is_dotted = "." in flag
        refused = f"{flag} {value}" if _is_about_value(argument, value) and not is_dotted else f"{flag} is not supported"
        for ours, setting in argument.settings(value, _refusal(refused, flag_shown), is_dotted=is_dotted):
            translated += flag_words(ours, setting)
    return translated


def to_our_keywords(
    name: str, value: Any, table: Mapping[str, VllmArgument], shown: Callable[[str, str | None], str]
) -> list[tuple[str, Any]]:
    """Arguments of ours that stand for one of vLLM's in `table`; hints have ours as `shown` writes them.

    Raises `ConfigurationError` where it is not supported.
    """
    argument = find(name, table)
    assert argument is not None
    refused = f"`{name}={value!r}`" if _is_about_value(argument, value) else f"`{name}` is not supported"
    return argument.settings(value, _refusal(refused, shown))


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def flag_words(name: str, value: Any) -> list[str]:
    """One of our arguments as words of a command line."""
    if isinstance(value, bool):
        return [flag_of(name if value else f"no_{name}")]
    return [flag_of(name), str(value)]


def flag_shown(name: str, value: str | None) -> str:
    if value in ("True", "False"):
        return flag_words(name, value == "True")[0]
    return " ".join(filter(None, (flag_of(name), value)))


def keyword_shown(name: str, value: str | None) -> str:
    if value is None:
        return f"`{name}`"
    return f"`{name}={value}`" if value in ("True", "False") else f"`{name}={value!r}`"


def filled(hint: str, shown: Callable[[str, str | None], str]) -> str:
    """A hint with our arguments as `shown` writes them."""
    return re.sub(r"\{(\w+)(?:=([^}]*))?\}", lambda found: shown(found[1], found[2]), hint)


def _own_flag(flag: str, known: Container[str]) -> str | None:
    """Ours, however it is written: as vLLM's short one, or with underscores."""
    if flag in known:
        return flag
    if not (flag in SHORT_FLAGS or flag.startswith("--")):
        return None
    ours = flag_of(SHORT_FLAGS[flag]) if flag in SHORT_FLAGS else flag.replace("_", "-")
    return ours if ours in known else None


def _flag_argument(flag: str) -> tuple[bool, VllmArgument | None]:
    """Whether a flag is negated, and what it means, None for a word that is no flag of vLLM's."""
    if not (flag in SHORT_FLAGS or flag.startswith("--")):
        return False, None
    name = SHORT_FLAGS.get(flag, flag[2:].partition(".")[0].replace("-", "_"))
    argument = find(name, ALL)
    if argument is None and name.startswith("no_"):
        positive = find(name.removeprefix("no_"), ALL)
        if positive is not None and positive.is_switch:
            return True, positive
    return False, argument


def _value(text: str) -> Any:
    """As a Python caller would give it: JSON where it is some, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _is_about_value(argument: VllmArgument, value: Any) -> bool:
    """Whether another value would be taken, so that an error has to show this one; no long one."""
    return bool(argument.neutral) and not argument.is_switch and isinstance(value, str | int | float) and len(str(value)) <= 40


def _refusal(refused: str, shown: Callable[[str, str | None], str]) -> Callable[[str], ConfigurationError]:
    def refuse(hint: str) -> ConfigurationError:
        return ConfigurationError(f"{refused}: {filled(hint, shown)}")

    return refuse
