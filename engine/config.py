"""What the operator decides about the engine, once, before it starts."""

from dataclasses import dataclass
from typing import Literal

CompileMode = Literal["auto", "off", "on"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]

MAX_NUM_SEQS_CPU = 64
MAX_NUM_SEQS_CUDA = 256  # a decode step of 64 rows leaves a GPU idle


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How much the engine may hold, and how it computes.

    None means the default model, or that the engine chooses: `max_model_len` from the model's config, `max_num_seqs` from the device,
    `kv_cache_memory` (bytes) from free memory, `num_threads` from the cores. `max_num_batched_tokens` is the token budget of one step;
    the scheduler raises it where it would not hold a token of every running sequence.
    `seed` is for requests that bring none; None makes every start different.
    `max_waiting_requests` bounds the queue: beyond it a request is refused with `QueueFull`.
    """

    model: str | None = None
    dtype: Dtype = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 2048
    kv_cache_memory: int | None = None
    block_size: int = 16
    enable_prefix_caching: bool = True
    max_waiting_requests: int = 1024
    compile: CompileMode = "auto"
    seed: int | None = None
    num_threads: int | None = None
    trust_remote_code: bool = False

    def num_seqs(self, device_type: str) -> int:
        """The bound on running sequences, given where the model runs: `"cpu"`, `"cuda"`, ..."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        return MAX_NUM_SEQS_CUDA if device_type == "cuda" else MAX_NUM_SEQS_CPU
