"""`Executor(path, ModelType, ExecutorConfig)`, as TensorRT-LLM's bindings are called."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from penstock import ConfigurationError
from penstock.llm.executor import (
    BatchingType,
    CapacitySchedulerPolicy,
    CommunicationMode,
    Executor,
    ExecutorConfig,
    KvCacheConfig,
    LogitsPostProcessorConfig,
    ModelType,
    OrchestratorConfig,
    OutputConfig,
    ParallelConfig,
    Request,
    SchedulerConfig,
    SpeculativeDecodingConfig,
)
from penstock.llm.executor.config import OF_CACHES, OF_EXECUTORS, OF_SCHEDULERS
from tests.llm.executors import whole
from tests.llm.model_directory import SETTINGS

FORCED = 65


def test_the_ranks_of_a_parallel_config_share_the_model() -> None:
    for config in (
        ParallelConfig(device_ids=[0, 1]),
        ParallelConfig(participant_ids=[0, 1]),
        ParallelConfig(device_ids=[0, 1], num_nodes=1),
    ):
        assert ExecutorConfig(parallel_config=config).engine_arguments() == {"tensor_parallel_size": 2}
    assert ExecutorConfig(parallel_config=ParallelConfig()).engine_arguments() == {}


def test_an_executor_is_made_of_a_path_a_type_and_a_config(model_dir: Path) -> None:
    config = ExecutorConfig(1, kv_cache_config=KvCacheConfig(False), max_batch_size=3, max_num_tokens=40, iter_stats_max_iterations=2)
    with Executor(model_dir, ModelType.DECODER_ONLY, config, **SETTINGS) as executor:
        prompt = executor.tokenizer.encode("hello")
        assert prompt == executor.tokenizer.encode("hello", add_special_tokens=True)
        for _ in range(2):
            whole(executor, Request(prompt, 4, end_id=-1))
        scheduler = executor._context.engine.core.scheduler
        assert scheduler.max_num_seqs == 3
        assert scheduler.num_prefix_hits == 0
        assert len(executor.get_latest_iteration_stats()) == 2
        assert executor.get_latest_request_stats() == []


def test_every_field_has_the_originals_place_and_name() -> None:
    fields = list(ExecutorConfig.__dataclass_fields__)
    assert fields[:10] == [
        "max_beam_width",
        "scheduler_config",
        "kv_cache_config",
        "enable_chunked_context",
        "normalize_log_probs",
        "iter_stats_max_iterations",
        "request_stats_max_iterations",
        "batching_type",
        "max_batch_size",
        "max_num_tokens",
    ]
    assert len(fields) == 28
    assert {*OF_EXECUTORS} <= {*fields}
    assert {*OF_SCHEDULERS} <= {*SchedulerConfig.__dataclass_fields__}
    assert {*OF_CACHES} <= {*KvCacheConfig.__dataclass_fields__}


def test_a_config_becomes_engine_arguments() -> None:
    assert ExecutorConfig().engine_arguments() == ExecutorConfig(spec_dec_config=SpeculativeDecodingConfig()).engine_arguments() == {}
    policy = SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION)
    config = ExecutorConfig(scheduler_config=policy, max_batch_size=2, max_num_tokens=3, max_queue_size=4, enable_trt_overlap=True)
    assert config.engine_arguments() == {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 3,
        "max_waiting_requests": 4,
        "async_scheduling": True,
    }


def orchestrated(config: OrchestratorConfig | None) -> ParallelConfig:
    return ParallelConfig(communication_mode=CommunicationMode.ORCHESTRATOR, participant_ids=[0, 1], orchestrator_config=config)


def test_both_modes_start_ranks_from_this_process() -> None:
    spawning, joining = (ExecutorConfig(parallel_config=orchestrated(OrchestratorConfig(spawn_processes=own))) for own in (True, False))
    assert spawning.engine_arguments() == {"tensor_parallel_size": 2}
    assert joining.engine_arguments({"distributed_address": "10.0.0.1:29500"}) == {"tensor_parallel_size": 2}
    nodes = ExecutorConfig(parallel_config=ParallelConfig(participant_ids=[0, 1], num_nodes=2))
    assert nodes.engine_arguments({"distributed_address": "10.0.0.1:29500"}) == {"tensor_parallel_size": 2}


def test_participants_are_stages_where_these_are_asked_for() -> None:
    config = ExecutorConfig(parallel_config=ParallelConfig(participant_ids=[0, 1]))
    assert config.engine_arguments({"pipeline_parallel_size": 2}) == {}
    with pytest.raises(ConfigurationError, match="has 2 ranks, and `pipeline_parallel_size` is 3"):
        config.engine_arguments({"pipeline_parallel_size": 3})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (ExecutorConfig(batching_type=BatchingType.STATIC), "`batching_type`"),
        (ExecutorConfig(parallel_config=orchestrated(None)), "`parallel_config.orchestrator_config`"),
        (ExecutorConfig(parallel_config=ParallelConfig(orchestrator_config=OrchestratorConfig())), "`parallel_config.orchestrator_config`"),
        (ExecutorConfig(parallel_config=orchestrated(OrchestratorConfig(is_orchestrator=False))), r"orchestrator_config\.is_orchestrator`"),
        (ExecutorConfig(parallel_config=orchestrated(OrchestratorConfig(True, "/bin/x"))), r"orchestrator_config\.worker_executable_path`"),
        (ExecutorConfig(parallel_config=orchestrated(OrchestratorConfig(orch_leader_comm=1))), r"orchestrator_config\.orch_leader_comm`"),
        (ExecutorConfig(parallel_config=orchestrated(OrchestratorConfig(spawn_processes=False))), r"orchestrator_config\.spawn_processes`"),
        (ExecutorConfig(parallel_config=ParallelConfig(num_nodes=2)), "`parallel_config.num_nodes`"),
        (ExecutorConfig(parallel_config=ParallelConfig(device_ids=[1, 0])), "`parallel_config.device_ids`"),
        (ExecutorConfig(gpu_weights_percent=0.5), "`gpu_weights_percent`"),
        (ExecutorConfig(spec_dec_config=SpeculativeDecodingConfig(fast_logits=True)), "`spec_dec_config.fast_logits`"),
        (ExecutorConfig(kv_cache_config=KvCacheConfig(free_gpu_memory_fraction=0.5)), "`kv_cache_config.free_gpu_memory_fraction`"),
        (ExecutorConfig(kv_cache_config=KvCacheConfig(max_tokens=99)), "use `kv_cache_memory`"),
        (
            ExecutorConfig(scheduler_config=SchedulerConfig(CapacitySchedulerPolicy.STATIC_BATCH)),
            "`scheduler_config.capacity_scheduler_policy`",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(config: ExecutorConfig, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Executor("nowhere", ModelType.DECODER_ONLY, config)


def test_types_of_models_and_what_is_given_twice_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="ENCODER_DECODER is not served here"):
        Executor("nowhere", ModelType.ENCODER_DECODER)
    wrong: Any = "decoder"
    with pytest.raises(TypeError, match="`model_type` must be a ModelType"):
        Executor("nowhere", wrong)
    with pytest.raises(TypeError, match="`executor_config` must be an ExecutorConfig"):
        Executor("nowhere", None, wrong)
    with pytest.raises(TypeError, match="`max_num_seqs` is given twice"):
        Executor("nowhere", None, ExecutorConfig(max_batch_size=2), max_num_seqs=3)


def test_callbacks_of_the_originals_form_change_logits_in_place(model_dir: Path) -> None:
    seen: list[Any] = []

    def of_one(req_id: int, logits: Tensor, token_ids: list[list[int]], stream_ptr: int, client_id: int | None) -> None:
        logits[:] = float("-inf")
        logits[..., FORCED] = 0
        seen.append((req_id, tuple(logits.shape[:2]), len(token_ids[0]), stream_ptr, client_id))

    def of_all(req_ids: list[int], logits_batch: list[Tensor], token_ids: list[Any], stream_ptr: int, client_ids: list[Any]) -> None:
        for logits in logits_batch:
            logits[:, :, FORCED + 1] = 1000.0
        seen.append((req_ids, len(token_ids), token_ids[0][0][:1], stream_ptr, client_ids))

    processors = LogitsPostProcessorConfig({"forced": of_one}, of_all)
    with Executor(model_dir, ModelType.DECODER_ONLY, ExecutorConfig(logits_post_processor_config=processors), **SETTINGS) as executor:
        config = OutputConfig(exclude_input_from_output=True)
        [forced] = whole(executor, Request([70, 71], 2, client_id=9, logits_post_processor_name="forced", output_config=config, end_id=-1))
        assert forced.result.output_token_ids == [[FORCED] * 2]
        assert seen == [(1, (1, 1), 2, 0, 9), (1, (1, 1), 3, 0, 9)]
        seen.clear()
        name = Request.BATCHED_POST_PROCESSOR_NAME
        [all_] = whole(executor, Request([70], 2, client_id=5, logits_post_processor_name=name, output_config=config, end_id=-1))
        assert all_.result.output_token_ids == [[FORCED + 1] * 2]
        assert seen == [([2], 1, [70], 0, [5])] * 2
        own = Request([70], 1, logits_post_processor=of_one, output_config=config, end_id=-1)
        assert whole(executor, own)[0].result.output_token_ids == [[FORCED]]


def test_a_callback_that_is_none_is_refused_when_it_is_registered(model_dir: Path) -> None:
    def of_all(req_ids: Any, logits_batch: Any, token_ids: Any, stream: Any, client_ids: Any) -> None:
        raise AssertionError

    def of_two(token_ids: Any, logits: Any, third: Any) -> None:
        raise AssertionError

    with pytest.raises(ConfigurationError, match="given to an `Executor` in a `LogitsPostProcessorConfig`"):
        Executor(model_dir, logits_processors={"all": of_all}, **SETTINGS)  # type: ignore[dict-item]
    for config in (LogitsPostProcessorConfig({"x": of_two}), LogitsPostProcessorConfig(None, of_two)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"processor_map\['x'\]|processor_batched"):
            Executor(model_dir, None, ExecutorConfig(logits_post_processor_config=config), **SETTINGS)
