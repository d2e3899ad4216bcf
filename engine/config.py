"""How options are declared, and the engine's own: for each its flag, range, default and help."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

Group = Literal[
    "model", "formats and plug-ins", "HTTP", "connections and their limits", "stored responses", "files and batches", "log", "engine"
]
_METADATA = "option"
_TOKEN_UNITS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
_SIZE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One choice of the operator.

    `name` is the flag and the keyword argument in snake case, `field` the dataclass field; `aliases` are further names, most of them
    vLLM's or SGLang's, and `synonyms` other spellings of values. `kind` is the annotation without None: bool is a switch, a Literal has
    choices, a tuple takes several values. `read` makes a value, or one of several, from text, and raises `ValueError`.
    `default_help` says what the default is where the value does not.
    A server option has no meaning in the library. One that `needs_generation` is refused where a pooling model is asked for more than the
    default or a value in `neutral`.
    """

    help: str
    group: Group
    name: str = ""
    field: str = ""
    kind: Any = str
    default: Any = None
    default_help: str = ""
    metavar: str | None = None
    read: Callable[[str], Any] = str
    aliases: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_server_only: bool = False
    needs_generation: bool = False
    neutral: tuple[Any, ...] = ()

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def flags(self) -> tuple[str, ...]:
        return (self.flag, *(f"--{alias.replace('_', '-')}" for alias in self.aliases))

    @property
    def is_switch(self) -> bool:
        return self.kind is bool

    @property
    def is_repeatable(self) -> bool:
        return get_origin(self.kind) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def values_help(self) -> str | None:
        """What stands for a value in help."""
        return f"{{{','.join(self.choices)}}}" if self.choices else self.metavar

    @property
    def whole_help(self) -> str:
        """With the default."""
        shown = self.default_help
        if not shown and not self.is_switch and isinstance(self.default, str | int | float):
            shown = f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
        return f"{self.help} (default: {shown})".strip() if shown else self.help

    def value_of(self, text: str) -> Any:
        """What a word of the command line means: one item where several may be given. Raises `ValueError`."""
        text = self.synonyms.get(text, text)
        if self.choices and text not in self.choices:
            raise ValueError(f"invalid choice: {text!r} (choose from {', '.join(self.choices)})")
        return self.read(text)

    def asks_for_generation(self, value: Any) -> bool:
        """Whether this value asks for what only a model that generates text can do."""
        if not self.needs_generation:
            return False
        return any(item not in self.neutral for item in value) if self.is_repeatable else value not in (self.default, *self.neutral)

    def shown(self, value: Any) -> str:
        """As the command line says it; the value only where it is one of a few."""
        return f"{self.flag} {value}" if self.choices else self.flag


def option(
    default: Any,
    help: str,
    group: Group,
    *,
    name: str = "",
    default_help: str = "",
    metavar: str | None = None,
    read: Callable[[str], Any] = str,
    aliases: tuple[str, ...] = (),
    synonyms: Mapping[str, str] | None = None,
    is_server_only: bool = False,
    needs_generation: bool = False,
    neutral: tuple[Any, ...] = (),
) -> Any:
    """A dataclass field that is an `Option`. Its flag is named after the field, but for `name`."""
    declared = Option(
        help=help,
        group=group,
        name=name,
        default=default,
        default_help=default_help,
        metavar=metavar,
        read=read,
        aliases=aliases,
        synonyms=synonyms or {},
        is_server_only=is_server_only,
        needs_generation=needs_generation,
        neutral=neutral,
    )
    metadata = {_METADATA: declared}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@cache
def options_of(kind: type) -> tuple[Option, ...]:
    """The options that a dataclass declares, in its order."""
    types, options = get_type_hints(kind), []
    for each in dataclasses.fields(kind):
        if _METADATA in each.metadata:
            declared: Option = each.metadata[_METADATA]
            options.append(replace(declared, name=declared.name or each.name, field=each.name, kind=without_none(types[each.name])))
    return tuple(options)


def without_none(annotation: Any) -> Any:
    """`T` of `T | None`; any other annotation is itself."""
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
    return kinds[0] if NoneType in get_args(annotation) and len(kinds) == 1 else annotation


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter of the operator's: its name for clients, and peft's directory."""

    name: str
    path: str


def adapter_source(text: str) -> AdapterSource:
    """`NAME=DIR`, or an object of `name` and `path`, which is another spelling of vLLM's."""
    name, _, path = text.partition("=")
    if text.startswith("{"):
        given = json_object(text)
        name, path = str(given.get("name") or ""), str(given.get("path") or "")
    if not name or not path:
        raise ValueError(f"{text!r} is not NAME=DIR")
    return AdapterSource(name, path)


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    bounds = f"an integer of {low} or more" if high is None else f"an integer from {low} to {high}"

    def convert(text: str) -> int:
        if not re.fullmatch(r"-?\d+", text) or int(text) < low or (high is not None and int(text) > high):
            raise ValueError(f"{text!r} is not {bounds}")
        return int(text)

    return convert


def number_of_tokens(text: str) -> int:
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)([{''.join(_TOKEN_UNITS)}]?)", text)
    num_tokens = float(match[1]) * _TOKEN_UNITS[match[2]] if match else 0.0
    if num_tokens < 1 or not num_tokens.is_integer():
        raise ValueError(f"{text!r} is not a number of tokens of 1 or more, such as 8192 or 8K")
    return int(num_tokens)


def context_length(text: str) -> int | None:
    """Tokens; None is the model's own length."""
    return None if text in ("auto", "-1") else number_of_tokens(text)


def size(text: str) -> int:
    """Bytes from `2GiB`, `512M`, `1.5gb` or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _SIZE_UNITS:
        raise ValueError(f"{text!r} is not a size such as 2GiB, 512MB or a number of bytes")
    num_bytes = int(float(match[1]) * _SIZE_UNITS[match[2]])
    if num_bytes < 1:
        raise ValueError("must be more than 0 bytes")
    return num_bytes


def seconds(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise ValueError(f"{text!r} is not a number of seconds")
    return float(text)


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    return value


def origins(text: str) -> list[str]:
    """One origin, or a JSON list of them, which is vLLM's spelling."""
    if not text.startswith("["):
        return [text]
    try:
        listed = json.loads(text)
    except ValueError:
        listed = None
    if not isinstance(listed, list) or not all(isinstance(origin, str) for origin in listed):
        raise ValueError(f'{text!r} is no JSON list of strings, such as ["https://example.com"]')
    return listed


def flattened(values: Sequence[Any]) -> tuple[Any, ...]:
    """The items of a repeatable option, of which a word may hold several."""
    return tuple(item for value in values for item in (value if isinstance(value, list) else [value]))


CompileMode = Literal["auto", "off", "on"]
KVCacheDtype = Literal["auto", "fp8", "int8"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
NativeKernels = Literal["auto", "none"]
PinThreads = Literal["auto", "on", "off"]
QuantizationMode = Literal["auto", "none", "int4", "int8"]

MAX_NUM_SEQS_CPU = 64
MAX_NUM_SEQS_CUDA = 256  # a decode step of 64 rows leaves a GPU idle
MAX_NUM_BATCHED_TOKENS_CPU = 1024  # a step's length is what a prompt makes other streams wait, and larger matrices are no faster
MAX_NUM_BATCHED_TOKENS_CUDA = 2048
# What a decode step costs whatever its size, in rows: reading the weights, and starting whatever it runs. On a CPU with weights of 4 bits
# it is 8 over contexts of 150 tokens and 5 over 1,000; with 16 bits, more. Too low a number costs less than too high a one.
ROWS_FOR_WEIGHTS_CPU = 6.0
ROWS_FOR_WEIGHTS_CUDA = 64.0
KV_CACHE_DIR_SIZE = 16 * 2**30
WAITING_CACHES = 32  # how often the prompts that wait may fill the KV cache


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How much the engine may hold, and how it computes. Each field that is an option says in its help what it means.

    None means the default model, or that the engine chooses: `max_model_len` from the model's config, `max_num_seqs`,
    `max_num_batched_tokens` and `async_scheduling` from the device, `kv_cache_memory` (bytes) from free memory, `max_waiting_tokens` from
    the size of the KV cache, `num_threads` from the CPUs that the process may use. `max_num_batched_tokens` is the token budget of one
    step; the scheduler raises it where it would not hold a token of every running sequence. `max_waiting_requests` and
    `max_waiting_tokens` bound the queue, in sequences and in tokens of their prompts: where one is reached, a request is refused with
    `QueueFull`.
    """

    model: str | None = option(
        None,
        "a Hugging Face id, a local directory, a .gguf file, or one that is fetched once: smollm2 (SmolLM2-135M-Instruct), "
        "qwen-coder (Qwen2.5-Coder-0.5B-Instruct, for tools and structured output) or minilm, which embeds texts; scripted:FILE.jsonl "
        "says what a file tells it to, for tests of clients",
        "model",
        default_help="smollm2",
        metavar="ID|DIR|GGUF",
    )
    trust_remote_code: bool = option(False, "run Python code that comes with the model", "model", default_help="never")
    dtype: Dtype = option(
        "auto",
        "type of weights and activations; half and float are float16 and float32. auto: on a GPU that of the stored weights if it has 16 "
        "bits, else bfloat16; on a CPU bfloat16 where it has instructions for it or runs native kernels, else float32. Models that make "
        "embeddings differ",
        "model",
        synonyms={"half": "float16", "float": "float32"},  # vLLM's
    )
    quantization: QuantizationMode = option(
        "auto",
        "how weights are stored on the CPU. auto: the quantized weights of a GGUF file as they are (Q3_K in 6 bits, Q2_K and rarer types "
        "in 8), and so are those of GPTQ, AWQ, FP8, MXFP4 and compressed-tensors checkpoints; all others as --dtype says; "
        "none: all as --dtype says; int4, int8: quantized to that many bits in groups of 32, unless they have fewer already",
        "model",
    )
    device: str = option("auto", "cpu, cuda, cuda:1, ...", "model", default_help="auto, CUDA where there is one", metavar="DEVICE")
    max_model_len: int | None = option(
        None,
        "prompt and answer together, such as 8192, 8k (8000) or 8K (8192)",
        "model",
        default_help="auto, the model's",
        metavar="TOKENS",
        read=context_length,
    )
    adapters: tuple[AdapterSource, ...] = option(
        (),
        "serve peft's LoRA adapter, or tuned prompt, in DIR as a model of this NAME, beside the model itself; repeatable; "
        "see docs/adapters.md",
        "model",
        name="adapter",
        default_help="none",
        metavar="NAME=DIR",
        read=adapter_source,
        aliases=("lora_modules",),
        needs_generation=True,
    )
    enable_lora: bool = option(
        False,
        "take adapters from requests of the library (`LoRARequest`)",
        "model",
        default_help="with --adapter or --adapter-dir",
        needs_generation=True,
    )
    max_loras: int = option(
        8,
        "adapters that running requests may have at the same time; a request for another one waits",
        "model",
        metavar="N",
        read=integer(1, 1024),
    )
    max_lora_rank: int = option(16, "the largest rank of an adapter", "model", metavar="N", read=integer(1, 1024))
    max_cpu_loras: int = option(
        64, "adapters that may be loaded at the same time, all of which stay in memory", "model", metavar="N", read=integer(1, 100_000)
    )
    matryoshka: bool = option(
        False,
        "allow requests for fewer dimensions, whatever the model was trained for",
        "model",
        default_help="where the model's files say so",
    )
    max_num_seqs: int | None = option(
        None,
        "sequences that run at the same time",
        "engine",
        default_help=f"{MAX_NUM_SEQS_CPU} on CPU, {MAX_NUM_SEQS_CUDA} on CUDA",
        metavar="N",
        read=integer(1),
    )
    max_num_batched_tokens: int | None = option(
        None,
        "token budget of one step: prompt tokens and new tokens together",
        "engine",
        default_help=f"{MAX_NUM_BATCHED_TOKENS_CPU} on CPU, {MAX_NUM_BATCHED_TOKENS_CUDA} on CUDA",
        metavar="TOKENS",
        read=number_of_tokens,
    )
    kv_cache_memory: int | None = option(
        None,
        "size of the KV cache, such as 2GiB",
        "engine",
        default_help="on CUDA what the model leaves free, on CPU 512 MiB or what one sequence of the full length takes",
        metavar="SIZE",
        read=size,
        aliases=("kv_cache_memory_bytes",),
    )
    kv_cache_dtype: KVCacheDtype = option(
        "auto",
        "type of keys and values. auto: as --dtype; fp8, or fp8_e4m3: 8 bits without scales, on GPUs of compute capability 8.9 and later; "
        "int8: 8 bits with a scale for each token and head, on CPUs with native kernels, bfloat16 and heads of 64 or 128 numbers. Either "
        "fits about twice as many tokens, at some cost in accuracy",
        "engine",
        synonyms={"fp8_e4m3": "fp8"},  # vLLM's
    )
    kv_cache_dir: str | None = option(
        None,
        "write full blocks of the prefix cache to this directory behind the requests, and load the beginnings of prompts from there, also "
        "after a restart and beside other servers; see docs/kv-cache.md",
        "engine",
        default_help="in memory only",
        metavar="DIR",
        needs_generation=True,
    )
    kv_cache_dir_size: int | None = option(
        None,
        "the most that --kv-cache-dir holds, of all models, such as 100GiB; the least recently used blocks are deleted",
        "engine",
        default_help="16GiB",
        metavar="SIZE",
        read=size,
        needs_generation=True,
    )
    block_size: int = 16
    enable_prefix_caching: bool = option(
        True,
        "reuse the KV cache of prompts with the same beginning",
        "engine",
        name="prefix_caching",
        default_help="on",
        aliases=("enable_prefix_caching",),
    )
    enable_prompt_embeds: bool = option(
        False,
        "take `prompt_embeds`, vectors in place of a prompt's tokens, in completions and in the library",
        "engine",
        needs_generation=True,
    )
    hybrid_kv_cache: bool = option(
        True,
        "free the blocks of layers with a sliding window that have left it; without, all layers keep every block",
        "engine",
        default_help="on",
    )
    max_waiting_requests: int = option(
        1024,
        "refuse further requests with 429 when N are waiting, where each of the `n` answers counts",
        "engine",
        metavar="N",
        read=integer(1),
    )
    max_waiting_tokens: int | None = option(
        None,
        "the same when the waiting prompts have this many tokens together",
        "engine",
        default_help=f"{WAITING_CACHES} times what the KV cache holds; with a model for pooling, no bound",
        metavar="TOKENS",
        read=number_of_tokens,
    )
    priority_aging: float = option(
        60.0,
        "a request that has waited this long runs before all that have not, whatever their `priority`; 0: never",
        "engine",
        metavar="SECONDS",
        read=seconds,
    )
    compile: CompileMode = option(
        "auto",
        "run a CPU model's decoder layers as compiled code, kept in the cache directory. auto: where there is a C++ compiler, another "
        "process compiles them while the server already answers; on: wait for it, or refuse to start; off: never, and no CUDA graphs on "
        "a GPU either",
        "engine",
        needs_generation=True,
        neutral=("off",),
    )
    native_kernels: NativeKernels = option(
        "auto",
        "run a CPU model on kernels that are built for this processor. auto: where there is a C++ compiler; none: on torch's portable "
        "code, which is slower. The two round differently, so answers may differ after some tokens",
        "engine",
    )
    speculation: str = option(
        "suffix",
        "speculative decoding: draft tokens are checked in one step, as long as enough of them are accepted; the answers are the same. "
        "ngram: where a text repeats itself, from its n-grams; suffix: also from earlier prompts and answers; draft: from --draft-model; "
        "mtp: from the model's own layer for multi-token prediction, on the CPU; none: one token per step; or a plug-in's proposer",
        "engine",
        metavar="NAME",
    )
    draft_model: str | None = option(
        None,
        "for --speculation draft, on the CPU: a smaller model with the same vocabulary, which proposes draft tokens, such as "
        "qwen-coder for Qwen2.5-Coder-1.5B-Instruct; or the directory of an EAGLE-3 head for the model",
        "engine",
        default_help="none",
        metavar="ID|DIR|GGUF",
        needs_generation=True,
    )
    async_scheduling: bool | None = option(
        None,
        "overlap scheduling: schedule the next step while one is in flight, where it does not depend on the tokens of that one",
        "engine",
        default_help="on CUDA",
    )
    seed: int | None = option(
        None,
        "seed of the requests that set none",
        "engine",
        default_help="every start is different",
        metavar="N",
        read=integer(0, 2**63 - 1),
    )
    num_threads: int | None = option(
        None,
        "CPU threads of the model",
        "engine",
        name="threads",
        default_help="$OMP_NUM_THREADS, else one per physical core, but no more than the container's CPU quota allows",
        metavar="N",
        read=integer(1),
    )
    pin_threads: PinThreads = option(
        "auto",
        "run each of these threads on a physical core of its own. auto: from 8 threads on, unless a CPU quota says that others use the "
        "same cores; on: always, for a server that has its cores to itself; off: wherever the operating system puts them",
        "engine",
    )

    @property
    def has_adapters(self) -> bool:
        """Whether requests may have adapters."""
        return self.enable_lora or bool(self.adapters)

    def num_waiting_tokens(self, num_cached_tokens: int) -> int:
        """The bound on tokens of prompts that wait, given how many tokens the KV cache holds."""
        return WAITING_CACHES * num_cached_tokens if self.max_waiting_tokens is None else self.max_waiting_tokens

    def num_seqs(self, device_type: str) -> int:
        """The bound on running sequences, given where the model runs: `"cpu"`, `"cuda"`, ..."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        return MAX_NUM_SEQS_CUDA if device_type == "cuda" else MAX_NUM_SEQS_CPU

    def is_async(self, device_type: str) -> bool:
        """Whether the next step may be scheduled while one is in flight, given where the model runs."""
        return device_type == "cuda" if self.async_scheduling is None else self.async_scheduling

    def rows_for_weights(self, device_type: str) -> float:
        """What `Speculation` goes by, given where the model runs."""
        return ROWS_FOR_WEIGHTS_CUDA if device_type == "cuda" else ROWS_FOR_WEIGHTS_CPU

    def num_batched_tokens(self, device_type: str) -> int:
        """The token budget of one step, given where the model runs."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return MAX_NUM_BATCHED_TOKENS_CUDA if device_type == "cuda" else MAX_NUM_BATCHED_TOKENS_CPU
