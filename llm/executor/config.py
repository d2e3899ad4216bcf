"""How an executor is configured. Names, order and defaults are those of TensorRT-LLM's `ExecutorConfig` and what it holds."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Any

from penstock.engine.contracts.logits_processor import LogitsProcessor
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.transfer import SHARED_MEMORY
from penstock.llm.executor.requests import BATCHED, AdditionalModelOutput, BatchedCallback, batched_processor, row_processor

Refusals = Mapping[str, tuple[str, tuple[Any, ...]]]  # the reason, and the values that ask for nothing beside None


class ModelType(Enum):
    DECODER_ONLY = 0
    ENCODER_ONLY = 1
    ENCODER_DECODER = 2


class BatchingType(Enum):
    STATIC = 0
    INFLIGHT = 1


class CapacitySchedulerPolicy(Enum):
    MAX_UTILIZATION = 0
    GUARANTEED_NO_EVICT = 1
    STATIC_BATCH = 2


class CommunicationType(Enum):
    MPI = 0


class CommunicationMode(Enum):
    LEADER = 0
    ORCHESTRATOR = 1


@dataclass(slots=True)
class OrchestratorConfig:
    """How the process that makes the executor starts the others: by itself, or, unless it spawns processes, as they join.

    Whichever it is, it is rank 0 and computes its part: there is no process that only hands requests on.
    """

    is_orchestrator: bool = True
    worker_executable_path: str = ""
    orch_leader_comm: Any = None
    spawn_processes: bool = True


@dataclass(slots=True)
class ParallelConfig:
    """The ranks that share the model, one for each of `device_ids` or `participant_ids`, which count from 0.

    The process that makes the executor is rank 0, in either mode, and starts the others, by sockets rather than MPI. Each rank has a part
    of every layer; with `pipeline_parallel_size=N` beside the config, some of the layers.
    """

    communication_type: CommunicationType = CommunicationType.MPI
    communication_mode: CommunicationMode = CommunicationMode.LEADER
    device_ids: list[int] | None = None
    participant_ids: list[int] | None = None
    orchestrator_config: OrchestratorConfig | None = None
    num_nodes: int | None = None

    @property
    def num_ranks(self) -> int | None:
        """Raises `ConfigurationError` for ids that are not 0 to N - 1."""
        given = [(name, ids) for name in ("device_ids", "participant_ids") if (ids := getattr(self, name)) is not None]
        for name, ids in given:
            if ids != list(range(len(given[0][1]))) or not ids:
                raise ConfigurationError(f"`parallel_config.{name}`: rank r runs on device r, so that the ids are 0 to N - 1, not {ids}")
        return len(given[0][1]) if given else None

    def num_parts(self, given: Mapping[str, Any]) -> int | None:
        """Of each layer, unless the ranks are stages. Raises `ConfigurationError` for another number of stages than of ranks."""
        stages = given.get("pipeline_parallel_size") or 1
        if stages == 1 or self.num_ranks is None:
            return self.num_ranks
        if stages != self.num_ranks:
            raise ConfigurationError(f"`parallel_config` has {self.num_ranks} ranks, and `pipeline_parallel_size` is {stages}")
        return None

    def check(self, given: Mapping[str, Any]) -> None:
        """Raises `ConfigurationError` for what cannot be honoured beside the `given` arguments of `LLM`."""
        has_address = given.get("distributed_address") is not None
        _check(self, OF_RANKS, "parallel_config.")
        if not has_address:
            _check(self, OF_ONE_NODE, "parallel_config.")
        orchestrator = self.orchestrator_config
        if (orchestrator is not None) != (self.communication_mode is CommunicationMode.ORCHESTRATOR):
            raise ConfigurationError("`parallel_config.orchestrator_config` goes with `CommunicationMode.ORCHESTRATOR`, and with no other")
        if orchestrator is None:
            return
        _check(orchestrator, OF_ORCHESTRATORS, "parallel_config.orchestrator_config.")
        if orchestrator.spawn_processes is has_address:
            raise ConfigurationError(
                "`parallel_config.orchestrator_config.spawn_processes` is False where ranks join at a `distributed_address`, else True"
            )


@dataclass(slots=True)
class SchedulerConfig:
    """Whatever the policy, a sequence that finds no room in the KV cache waits, and one that loses its room is computed again."""

    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: Any = None
    dynamic_batch_config: Any = None


@dataclass(slots=True)
class KvCacheConfig:
    """`enable_block_reuse` is prefix caching; parts of blocks are not shared."""

    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = None
    host_cache_size: int | None = None
    onboard_blocks: bool = True
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    _: KW_ONLY
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False


@dataclass(slots=True)
class LogitsPostProcessorConfig:
    """Callbacks of TensorRT-LLM's form: of `processor_map` a request names one, and `Request.BATCHED_POST_PROCESSOR_NAME` is
    `processor_batched`. A `LogitsProcessor` is taken as well.
    """

    processor_map: Mapping[str, Any] | None = None
    processor_batched: BatchedCallback | None = None
    replicate: bool = True

    def processors(self) -> dict[str, LogitsProcessor]:
        """By the names that requests use. Raises `TypeError` for what is no callback."""
        named = {name: row_processor(callback, f"processor_map[{name!r}]") for name, callback in (self.processor_map or {}).items()}
        return named if self.processor_batched is None else {**named, BATCHED: batched_processor(self.processor_batched)}


@dataclass(slots=True)
class SpeculativeDecodingConfig:
    """Nothing has to be configured for a request's `external_draft_tokens_config`. No logits go from one executor to another."""

    fast_logits: bool = False


class CacheTransceiverBackendType(Enum):
    DEFAULT = 0
    MPI = 1
    UCX = 2
    NIXL = 3


@dataclass(slots=True)
class CacheTransceiverConfig:
    """Has the blocks of prompts handed over between executors of this machine, through shared memory, for requests of one phase alone.

    Without it `kv_transfer_dir` does the same through a directory.
    """

    backend: CacheTransceiverBackendType | None = None
    max_tokens_in_buffer: int | None = None


@dataclass(slots=True)
class ExecutorConfig:
    """`max_batch_size`, `max_num_tokens` and `max_queue_size` bound sequences, tokens of a step, and requests that wait.

    Requests of any beam width run, prompts are always computed in chunks, and any request may ask for outputs: `max_beam_width`,
    `enable_chunked_context`, `additional_model_outputs` and `gather_generation_logits` change nothing, nor do `normalize_log_probs`,
    `recv_poll_period_ms` and `max_seq_idle_microseconds`. What cannot be honoured is refused by its name when the executor is made.
    """

    max_beam_width: int = 1
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    enable_chunked_context: bool = False
    normalize_log_probs: bool = True
    iter_stats_max_iterations: int = 1000
    request_stats_max_iterations: int = 0
    batching_type: BatchingType = BatchingType.INFLIGHT
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    parallel_config: ParallelConfig | None = None
    peft_cache_config: Any = None
    logits_post_processor_config: LogitsPostProcessorConfig | None = None
    decoding_config: Any = None
    use_gpu_direct_storage: bool = False
    gpu_weights_percent: float = 1.0
    max_queue_size: int | None = None
    extended_runtime_perf_knob_config: Any = None
    debug_config: Any = None
    recv_poll_period_ms: int = 0
    max_seq_idle_microseconds: int = 180_000_000
    spec_dec_config: SpeculativeDecodingConfig | None = None
    guided_decoding_config: Any = None
    additional_model_outputs: list[AdditionalModelOutput] | None = None
    cache_transceiver_config: CacheTransceiverConfig | None = None
    gather_generation_logits: bool = False
    prompt_table_offloading: bool = False
    enable_trt_overlap: bool = False

    def engine_arguments(self, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """As keyword arguments of `LLM`, beside those that are `given`.

        Raises `ConfigurationError` for the first field that cannot be honoured.
        """
        _check(self, OF_EXECUTORS, "")
        if self.spec_dec_config is not None:
            _check(self.spec_dec_config, OF_DRAFTS, "spec_dec_config.")
        if self.parallel_config is not None:
            self.parallel_config.check(given or {})
        if self.cache_transceiver_config is not None:
            _check(self.cache_transceiver_config, OF_TRANSFERS, "cache_transceiver_config.")
        _check(self.scheduler_config, OF_SCHEDULERS, "scheduler_config.")
        _check(self.kv_cache_config, OF_CACHES, "kv_cache_config.")
        arguments = {
            "max_num_seqs": self.max_batch_size,
            "max_num_batched_tokens": self.max_num_tokens,
            "max_waiting_requests": self.max_queue_size,
            "prefix_caching": None if self.kv_cache_config.enable_block_reuse else False,
            "async_scheduling": self.enable_trt_overlap or None,
            "kv_transfer_dir": None if self.cache_transceiver_config is None else SHARED_MEMORY,
            "tensor_parallel_size": None if self.parallel_config is None else self.parallel_config.num_parts(given or {}),
        }
        return {name: value for name, value in arguments.items() if value is not None}


OF_EXECUTORS: Refusals = {
    "batching_type": ("sequences are batched in flight", (BatchingType.INFLIGHT,)),
    "peft_cache_config": ("use `max_loras` and `max_cpu_loras`", ()),
    "decoding_config": ("each request says how it is decoded, and `speculation` how tokens are drafted", ()),
    "use_gpu_direct_storage": ("weights are read through memory", (False,)),
    "gpu_weights_percent": ("weights stay where the model runs", (1,)),
    "extended_runtime_perf_knob_config": ("use `compile`", ()),
    "debug_config": ("`additional_model_outputs` of a request show what the model computes", ()),
    "guided_decoding_config": ("guided decoding is always there: leave it out", ()),
    "prompt_table_offloading": ("there are no prompt tables", (False,)),
}
OF_TRANSFERS: Refusals = {
    "backend": (
        "blocks are handed over in shared memory, or in a directory: use `kv_transfer_dir`",
        (CacheTransceiverBackendType.DEFAULT,),
    ),
    "max_tokens_in_buffer": ("use `kv_transfer_dir_size`, in bytes or such as '8GiB'", ()),
}
OF_RANKS: Refusals = {"communication_type": ("ranks are connected by sockets", (CommunicationType.MPI,))}
OF_ONE_NODE: Refusals = {"num_nodes": ("use `distributed_address`, where ranks of other machines join", (1,))}
OF_ORCHESTRATORS: Refusals = {
    "is_orchestrator": ("another rank is the program `penstock worker`", (True,)),
    "worker_executable_path": ("other ranks run as this process does, by `penstock worker`", ("",)),
    "orch_leader_comm": ("ranks are connected by sockets", ()),
}
OF_DRAFTS: Refusals = {"fast_logits": ("a draft token is accepted where the sampled one equals it", (False,))}
OF_SCHEDULERS: Refusals = {
    "capacity_scheduler_policy": (
        "sequences are batched in flight",
        (CapacitySchedulerPolicy.MAX_UTILIZATION, CapacitySchedulerPolicy.GUARANTEED_NO_EVICT),
    ),
    "context_chunking_policy": ("prompts are computed in turn", ()),
    "dynamic_batch_config": ("`max_batch_size` and `max_num_tokens` bound every step", ()),
}
OF_CACHES: Refusals = {
    "max_tokens": ("use `kv_cache_memory`, in bytes or such as '8GiB'", ()),
    "max_attention_window": ("the model's own windows are kept", ()),
    "sink_token_length": ("the model's own attention is kept", (0,)),
    "free_gpu_memory_fraction": ("use `kv_cache_memory`, in bytes or such as '8GiB'", ()),
    "host_cache_size": ("what does not fit is computed again", (0,)),
    "cross_kv_cache_fraction": ("there are no encoders", ()),
    "secondary_offload_min_priority": ("what does not fit is computed again", ()),
    "event_buffer_max_size": ("there are no events of the KV cache", (0,)),
    "use_uvm": ("the KV cache lies where the model runs", (False,)),
}


def check_model_type(model_type: object) -> None:
    """Raises `ConfigurationError` for models that an executor does not serve, `TypeError` for what is no type of model."""
    if not isinstance(model_type, ModelType | None):
        raise TypeError(f"`model_type` must be a ModelType, got {model_type!r:.100}")
    if model_type not in (None, ModelType.DECODER_ONLY):
        raise ConfigurationError(f"`model_type`: {model_type.name} is not served here; `LLM` serves models that embed, score or classify")


def _check(config: object, refusals: Refusals, path: str) -> None:
    for name, (reason, neutral) in refusals.items():
        value = getattr(config, name)
        if value is not None and value not in neutral:
            raise ConfigurationError(f"`{path}{name}` is not supported: {reason}")
