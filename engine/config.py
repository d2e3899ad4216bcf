"""The engine's own options."""

from dataclasses import dataclass
from typing import Literal

from penstock.engine.options import context_length, host_and_port, integer, json_object, number_of_tokens, option, seconds, size

CompileMode = Literal["auto", "off", "on"]
KVCacheDtype = Literal["auto", "fp8", "int8"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
NativeKernels = Literal["auto", "none"]
PinThreads = Literal["auto", "on", "off"]
QuantizationMode = Literal["auto", "none", "int4", "int8"]

DRAFT, MTP = "draft", "mtp"  # values of --speculation that take a second model, or heads of the first
MAX_NUM_SEQS_CPU = 64
MAX_NUM_SEQS_CUDA = 256  # a decode step of 64 rows leaves a GPU idle
MAX_NUM_BATCHED_TOKENS_CPU = 1024  # a step's length is what a prompt makes other streams wait, and larger matrices are no faster
MAX_NUM_BATCHED_TOKENS_CUDA = 2048
# What a decode step costs whatever its size, in rows: reading the weights, and starting whatever it runs. On a CPU with weights of 4 bits
# it is 8 over contexts of 150 tokens and 5 over 1,000; with 16 bits, more. Too low a number costs less than too high a one.
ROWS_FOR_WEIGHTS_CPU = 6.0
ROWS_FOR_WEIGHTS_CUDA = 64.0
KV_CACHE_DIR_SIZE = 16 * 2**30
KV_TRANSFER_DIR_SIZE = 16 * 2**30
WAITING_CACHES = 32  # how often the prompts that wait may fill the KV cache


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter of the operator's: its name for clients, and peft's directory."""

    name: str
    path: str

    def __str__(self) -> str:
        return f"{self.name}={self.path}"


def adapter_source(text: str) -> AdapterSource:
    """`NAME=DIR`, or an object of `name` and `path`, which is another spelling of vLLM's."""
    name, _, path = text.partition("=")
    if text.startswith("{"):
        given = json_object(text)
        name, path = str(given.get("name") or ""), str(given.get("path") or "")
    if not name or not path:
        raise ValueError(f"{text!r} is not NAME=DIR")
    return AdapterSource(name, path)


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
        "qwen-coder (Qwen2.5-Coder-0.5B-Instruct, for tools and structured output), qwen-coder-1.5b (the same with 1.5B parameters), "
        "minilm, which embeds texts, or whisper-tiny.en, which transcribes speech; scripted:FILE.jsonl "
        "answers as written in the file, for tests of clients",
        "model",
        default_help="smollm2",
        metavar="ID|DIR|GGUF",
    )
    trust_remote_code: bool = option(False, "run Python code that comes with the model", "model", default_help="never")
    language_model_only: bool = option(
        False,
        "serve the language model of a multimodal model alone, whose other parts are dropped once they are loaded, and refuse images",
        "model",
        needs_generation=True,
    )
    dtype: Dtype = option(
        "auto",
        "type of weights and activations; half and float are float16 and float32. auto: on a GPU the type of the stored weights if it has "
        "16 bits, else bfloat16; on a CPU bfloat16 if it has instructions for it or runs native kernels, else float32. Embedding models "
        "differ",
        "model",
        synonyms={"half": "float16", "float": "float32"},  # vLLM's
    )
    quantization: QuantizationMode = option(
        "auto",
        "how weights are stored. auto: quantized weights of GGUF files (Q3_K in 6 bits, Q2_K and rarer types in 8) and of GPTQ, AWQ, "
        "FP8, MXFP4 and compressed-tensors checkpoints as they are, all others in --dtype; none: all in --dtype; int4, int8, on the CPU "
        "only: quantized to that many bits in groups of 32, unless they have fewer already",
        "model",
    )
    device: str = option("auto", "cpu, cuda, cuda:1, ...", "model", default_help="auto, CUDA if available", metavar="DEVICE")
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
        "serve peft's LoRA adapter, or tuned prompt, in DIR as a model of this NAME, in addition to the model itself; repeatable; "
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
        "allow requests for fewer dimensions, even if the model was not trained for it",
        "model",
        default_help="if the model's files say so",
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
        default_help="on CUDA the memory that the model leaves free, on CPU 512 MiB or the size of one sequence of the full length",
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
        needs_generation=True,
    )
    kv_cache_dir: str | None = option(
        None,
        "write full blocks of the prefix cache to this directory asynchronously and load cached prompt prefixes from it, also after a "
        "restart; several servers may share it; see docs/kv-cache.md",
        "engine",
        default_help="in memory only",
        metavar="DIR",
        needs_generation=True,
    )
    kv_cache_dir_size: int | None = option(
        None,
        "the maximum size of --kv-cache-dir, for all models together, such as 100GiB; the least recently used blocks are deleted",
        "engine",
        default_help="16GiB",
        metavar="SIZE",
        read=size,
        needs_generation=True,
    )
    kv_transfer_dir: str | None = option(
        None,
        "send the KV cache of prompts to other servers, and receive theirs, as files in this directory, in shared memory (shm), or "
        "over torch.distributed, unencrypted (tcp://HOST:PORT): one computes prompts, another the answers; see docs/scale.md",
        "engine",
        default_help="no transfer",
        metavar="DIR|shm|tcp://HOST:PORT",
        needs_generation=True,
    )
    kv_transfer_dir_size: int | None = option(
        None,
        "the maximum size of --kv-transfer-dir; the oldest prompts in it are deleted",
        "engine",
        default_help="16GiB",
        metavar="SIZE",
        read=size,
        needs_generation=True,
    )
    kv_events: str | None = option(
        None,
        "publish over ZeroMQ which blocks the prefix cache has, in vLLM's format, for routers; such as tcp://*:5557, or an address to "
        "connect to. The events have the tokens of prompts: see docs/observability.md",
        "observability",
        default_help="no events",
        metavar="ADDRESS",
        needs_generation=True,
    )
    kv_events_topic: str = option("", "topic of the messages of --kv-events", "observability", metavar="TOPIC", needs_generation=True)
    kv_events_replay: str | None = option(
        None,
        "answer requests for earlier messages of --kv-events at this address, such as tcp://*:5558",
        "observability",
        default_help="no replay",
        metavar="ADDRESS",
        needs_generation=True,
    )
    block_size: int = 16
    enable_prefix_caching: bool = option(
        True,
        "reuse the KV cache of prompts with the same prefix",
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
        "free the blocks that have left a layer's sliding window; without, all layers keep every block",
        "engine",
        default_help="on",
    )
    max_waiting_requests: int = option(
        1024,
        "refuse further requests with 429 when N are waiting; each of the `n` answers counts",
        "engine",
        metavar="N",
        read=integer(1),
    )
    max_waiting_tokens: int | None = option(
        None,
        "refuse further requests with 429 when the waiting prompts have this many tokens together",
        "engine",
        default_help=f"{WAITING_CACHES} times the tokens in the KV cache; with a model for pooling, no bound",
        metavar="TOKENS",
        read=number_of_tokens,
    )
    max_queue_time: float = option(
        0.0,
        "refuse further requests with 429 when the estimated queueing time exceeds this; 0: no bound",
        "engine",
        metavar="SECONDS",
        read=seconds,
        needs_generation=True,
    )
    priority_aging: float = option(
        60.0,
        "a request that has waited this long runs before all others, regardless of `priority`; 0: never",
        "engine",
        metavar="SECONDS",
        read=seconds,
    )
    compile: CompileMode = option(
        "auto",
        "run a CPU model's decoder layers as compiled code, kept in the cache directory. auto: if there is a C++ compiler, another "
        "process compiles them while the server already answers; on: wait for it, or refuse to start; off: never, and no CUDA graphs on "
        "a GPU either",
        "engine",
        needs_generation=True,
        neutral=("off",),
    )
    native_kernels: NativeKernels = option(
        "auto",
        "run a CPU model on kernels that are built for this processor. auto: if there is a C++ compiler; none: on torch's portable "
        "code, which is slower. The two round differently, so answers may differ after some tokens",
        "engine",
    )
    speculation: str = option(
        "suffix",
        "speculative decoding: draft tokens are checked in one step, as long as enough of them are accepted; the answers are the same. "
        "ngram: from n-grams of the prompt and answer; suffix: also from earlier prompts and answers; draft: from --draft-model; "
        "mtp: from the model's own layer for multi-token prediction, on the CPU; none: one token per step; or a plug-in's proposer",
        "engine",
        metavar="NAME",
        needs_generation=True,
        neutral=("none",),
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
    adaptive_speculation: bool = option(
        True,
        "give a sequence draft tokens only where they are expected to pay for themselves. --no-adaptive-speculation: always, which is "
        "slower, for tests of speculative decoding",
        "engine",
        default_help="on",
    )
    async_scheduling: bool | None = option(
        None,
        "overlap scheduling: schedule the next step while one is in flight, unless it depends on that step's tokens",
        "engine",
        default_help="on CUDA",
    )
    tensor_parallel_size: int = option(
        1,
        "share the model among N processes, or ranks: each has a part of every layer, and of the KV cache. The server starts them on this "
        "machine, one for each GPU; see docs/scale.md",
        "engine",
        metavar="N",
        read=integer(1, 1024),
    )
    pipeline_parallel_size: int = option(
        1,
        "share the model among N ranks, each of which has some of the layers: it needs less network traffic than --tensor-parallel-size; "
        "as many steps are in flight as there are ranks",
        "engine",
        metavar="N",
        read=integer(1, 1024),
        needs_generation=True,
    )
    distributed_address: str | None = option(
        None,
        "address at which ranks of other machines join, started by `penstock worker`; their traffic is not encrypted",
        "engine",
        default_help="the server starts all ranks itself",
        metavar="HOST:PORT",
        read=host_and_port,
    )
    distributed_timeout: float = option(
        600.0,
        "refuse to start if a rank has not joined after this time",
        "engine",
        metavar="SECONDS",
        read=seconds,
        aliases=("distributed_timeout_seconds",),
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
        "run each of these threads on a physical core of its own. auto: from 8 threads on, unless a CPU quota suggests that others use "
        "the same cores; on: always, for a server with exclusive cores; off: the operating system decides",
        "engine",
    )

    @property
    def num_ranks(self) -> int:
        """How many processes compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

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
        if self.pipeline_parallel_size > 1:
            return False  # steps of other sequences are in flight
        return device_type == "cuda" if self.async_scheduling is None else self.async_scheduling

    def rows_for_weights(self, device_type: str) -> float:
        """What `Speculation` goes by, given where the model runs."""
        return ROWS_FOR_WEIGHTS_CUDA if device_type == "cuda" else ROWS_FOR_WEIGHTS_CPU

    def num_batched_tokens(self, device_type: str) -> int:
        """The token budget of one step, given where the model runs."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return MAX_NUM_BATCHED_TOKENS_CUDA if device_type == "cuda" else MAX_NUM_BATCHED_TOKENS_CPU
