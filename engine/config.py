"""The engine's configuration: the operator's choices, fixed before it starts."""

from dataclasses import dataclass
from typing import Literal

CompileMode = Literal["auto", "off", "on"]
KVCacheDtype = Literal["auto", "fp8"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
SpeculationMode = Literal["ngram", "none"]
NativeKernels = Literal["auto", "none"]
QuantizationMode = Literal["auto", "none", "int4", "int8"]

MAX_NUM_SEQS_CPU = 64
MAX_NUM_SEQS_CUDA = 256  # a decode step of 64 rows leaves a GPU idle
MAX_NUM_BATCHED_TOKENS_CPU = 1024  # a step's length is what a prompt makes other streams wait, and larger matrices are no faster
MAX_NUM_BATCHED_TOKENS_CUDA = 2048
# What a decode step costs whatever its size, in rows: reading the weights, and starting whatever it runs. On a CPU with weights of 4 bits
# it is 8 over contexts of 150 tokens and 5 over 1,000; with 16 bits, more. Too low a number costs less than too high a one.
ROWS_FOR_WEIGHTS_CPU = 6.0
ROWS_FOR_WEIGHTS_CUDA = 64.0
WAITING_CACHES = 32  # how often the prompts that wait may fill the KV cache


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How much the engine may hold, and how it computes.

    None means the default model, or that the engine chooses: `max_model_len` from the model's config, `max_num_seqs`,
    `max_num_batched_tokens` and `async_scheduling` from the device, `kv_cache_memory` (bytes) from free memory, `max_waiting_tokens` from
    the size of the KV cache, `num_threads` from the cores. `max_num_batched_tokens` is the token budget of one step; the scheduler raises
    it where it would not hold a token of every running sequence. With `async_scheduling`, a step is put together while the one before it
    is computed.
    `kv_cache_dtype` is the model's, or 8 bits on a GPU.
    `seed` is for requests that bring none; None makes every start different.
    `matryoshka` lets requests cut embeddings short though the model's files do not say that it was trained for that.
    `max_waiting_requests` and `max_waiting_tokens` bound the queue, in sequences and in tokens of their prompts: where one is reached, a
    request is refused with `QueueFull`. A request that has waited for `priority_aging` seconds goes first whatever its priority; 0: never.
    """

    model: str | None = None
    dtype: Dtype = "auto"
    quantization: QuantizationMode = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_memory: int | None = None
    kv_cache_dtype: KVCacheDtype = "auto"
    block_size: int = 16
    enable_prefix_caching: bool = True
    max_waiting_requests: int = 1024
    max_waiting_tokens: int | None = None
    priority_aging: float = 60.0
    compile: CompileMode = "auto"
    native_kernels: NativeKernels = "auto"
    speculation: SpeculationMode = "ngram"
    async_scheduling: bool | None = None
    seed: int | None = None
    num_threads: int | None = None
    trust_remote_code: bool = False
    matryoshka: bool = False

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
