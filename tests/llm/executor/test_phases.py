"""A prompt that one process has computed is answered by another one, as by one process; what does not fit is refused by name."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import save_file

from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache import transfer
from penstock.llm.executor import (
    CacheTransceiverBackendType,
    CacheTransceiverConfig,
    ContextPhaseParams,
    Executor,
    ExecutorConfig,
    ModelType,
    OutputConfig,
    Request,
    RequestType,
    Response,
    SamplingConfig,
)
from tests.llm.executor.phases import MODELS, PROMPT, SHARED_MEMORY, Line, answers, cases, options, request
from tests.llm.executor.test_adapters import packed
from tests.llm.model_directory import SETTINGS, write_model
from tests.tiny_adapters import write_adapter
from tests.tiny_models import tiny_model

ROOT = Path(__file__).parents[3]
WHOLE = RequestType.CONTEXT_AND_GENERATION


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("phases")
    for name, (architecture, settings, _) in MODELS.items():
        write_model(directory / name, architecture, **settings)
    weights, config = packed(write_adapter(tiny_model("qwen3", vocab_size=262), directory / "adapter"))
    save_file({"weights": weights.contiguous(), "config": config.contiguous()}, directory / "adapter.safetensors")
    return directory


@contextmanager
def another_process(directory: Path, names: Sequence[str]) -> Iterator[list[Line]]:
    """What another process, which lives as long, has left of each prompt."""
    command = [sys.executable, "-m", "tests.llm.executor.phases", str(directory), *names]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            expected = sum(len(cases(name)) for name in names)
            yield [msgspec.json.decode(process.stdout.readline(), type=Line) for _ in range(expected)]
        finally:
            process.communicate()
    assert process.returncode == 0


QUICK = ("float32", SHARED_MEMORY, "windows")
OTHERS = tuple(name for name in MODELS if name not in QUICK)


@pytest.fixture(scope="module")
def computed(directory: Path) -> Iterator[list[Line]]:
    with another_process(directory, QUICK) as lines:
        yield lines


@pytest.fixture(scope="module")
def computed_too(directory: Path) -> Iterator[list[Line]]:
    with another_process(directory, OTHERS) as lines:
        yield lines


def said(responses: list[Response]) -> list[list[int]]:
    assert not any(response.has_error() for response in responses), responses
    results = sorted((response.result for response in responses), key=lambda result: result.sequence_index)
    return [result.output_token_ids[0] for result in results]


def num_reused(responses: list[Response]) -> int:
    metrics = responses[0].result.request_perf_metrics
    assert metrics is not None
    return metrics.kv_cache_metrics.num_reused_blocks


@pytest.mark.parametrize("name", QUICK)
def test_another_process_answers_as_one_that_does_both(directory: Path, computed: list[Line], name: str) -> None:
    check_answers(directory, computed, name)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OTHERS)
def test_another_process_answers_as_one_for_more_models(directory: Path, computed_too: list[Line], name: str) -> None:
    check_answers(directory, computed_too, name)


def check_answers(directory: Path, computed: list[Line], name: str) -> None:
    own = [line for line in computed if line.model == name]
    settings = options(directory, name)
    folder = transfer.transfer_directory(settings["kv_transfer_dir"])
    exports = {line.case: folder / f"{json.loads(line.state)['export']}.kvx" for line in own}
    assert all(path.exists() for path in exports.values())
    assert name != SHARED_MEMORY or folder.parent == Path("/dev/shm")
    with Executor(directory / name, **settings) as executor, Executor(directory / name, **settings) as alone:
        for line in own:
            expected = said(answers(alone, request(directory, line.case, WHOLE)))
            generation = request(directory, line.case, RequestType.GENERATION_ONLY, line.params)
            generation.output_config.return_perf_metrics = True
            responses = answers(executor, generation)
            assert said(responses) == expected
            assert line.said == [ids[:1] for ids in expected]
            assert num_reused(responses) == (len(generation.input_token_ids) - 1) // 16
            assert not exports[line.case].exists()
        executor._context.engine.check_integrity()


def test_a_streamed_answer_begins_with_the_first_token_of_the_context_phase(pair: tuple[Executor, Executor]) -> None:
    one, other = pair
    config = SamplingConfig(temperature=2.0)  # without a seed: nothing but the first token is given
    params = hand_over(one, sampling_config=config)
    generation = ask(type=RequestType.GENERATION_ONLY, context_phase_params=params, sampling_config=config, streaming=True)
    responses = answers(other, generation)
    assert responses[0].result.output_token_ids == [list(params.first_gen_tokens)]
    assert sum(len(response.result.output_token_ids[0]) for response in responses) == 8


def test_what_the_receiving_process_has_itself_is_not_written_again(pair: tuple[Executor, Executor]) -> None:
    one, other = pair
    prompt = list(reversed(PROMPT))
    expected = said(answers(other, ask(input_token_ids=prompt)))
    num_cached = other._context.engine.core.scheduler.pool.num_cached
    params = hand_over(one, input_token_ids=prompt)
    generation = ask(input_token_ids=prompt, type=RequestType.GENERATION_ONLY, context_phase_params=params)
    assert said(answers(other, generation)) == expected
    assert other._context.engine.core.scheduler.pool.num_cached == num_cached


def test_blocks_that_are_to_be_exported_are_not_evicted(directory: Path) -> None:
    settings = options(directory, "float32", kv_cache_memory=16 * 3 * 2 * 2 * 16 * 4 * 6, max_model_len=96)  # six blocks
    with Executor(directory / "float32", **settings) as small, Executor(directory / "float32", **options(directory, "float32")) as other:
        prompts = [[number, *PROMPT] for number in range(6)]
        ids = small.enqueue_requests([ask(input_token_ids=prompt, type=RequestType.CONTEXT_ONLY) for prompt in prompts])
        left = [responses[-1].result.context_phase_params for responses in (small.await_responses(number, 120) for number in ids)]
        for prompt, params in zip(prompts, left, strict=True):
            generation = ask(input_token_ids=prompt, type=RequestType.GENERATION_ONLY, context_phase_params=params)
            assert said(answers(other, generation)) == said(answers(small, ask(input_token_ids=prompt, max_tokens=8)))
        core = small._context.engine.core
        core.check_integrity()
        assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks


def ask(**fields: Any) -> Request:
    given: dict[str, Any] = {"input_token_ids": PROMPT, "max_tokens": 8, "end_id": -1}
    return Request(**given | {"output_config": OutputConfig(exclude_input_from_output=True)} | fields)


def hand_over(executor: Executor, **fields: Any) -> ContextPhaseParams:
    params = answers(executor, ask(type=RequestType.CONTEXT_ONLY, **fields))[-1].result.context_phase_params
    assert params is not None
    return params


@pytest.fixture(scope="module")
def pair(directory: Path) -> Iterator[tuple[Executor, Executor]]:
    settings = options(directory, "float32")
    with Executor(directory / "float32", **settings) as one, Executor(directory / "float32", **settings) as other:
        yield one, other


def error(executor: Executor, params: ContextPhaseParams | None, **fields: Any) -> str:
    (response,) = answers(executor, ask(**{"type": RequestType.GENERATION_ONLY, "context_phase_params": params} | fields))
    assert response.error_msg is not None, response
    return response.error_msg


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"input_token_ids": [7, *PROMPT]}, "of another prompt"),
        ({"input_token_ids": PROMPT[:20]}, "of another prompt"),
        ({"cache_salt": "b"}, "cache_salt"),
        ({"num_return_sequences": 2}, "first_gen_tokens` has 1 tokens for 2"),
        ({"type": WHOLE}, "go with the type GENERATION_ONLY"),
        ({"sampling_config": SamplingConfig(2)}, "not supported with beams"),
    ],
)
def test_another_request_than_that_of_the_context_phase_is_refused(
    pair: tuple[Executor, Executor], fields: dict[str, Any], reason: str
) -> None:
    one, other = pair
    params = hand_over(one)
    assert reason in error(other, params, **fields)
    assert said(answers(other, ask(type=RequestType.GENERATION_ONLY, context_phase_params=params)))  # it is still there


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"opaque_state": None}, "opaque_state` is missing"),
        ({"opaque_state": b"{"}, "no export has made it"),
        ({"opaque_state": b"x" * 2000}, "2000 bytes"),
        ({"opaque_state": b'{"version":1,"export":"../../../../../../../../../etc/pa"}'}, "names no export"),
        ({"opaque_state": b'{"version":9,"export":""}'}, "version 9"),
        ({"opaque_state": b'{"version":1,"export":"' + b"0" * 32 + b'"}'}, "no such export"),
        ({"first_gen_tokens": [10**6]}, "first_gen_tokens"),
        ({"draft_tokens": [1]}, "draft_tokens` is not supported"),
    ],
)
def test_params_that_no_context_phase_has_left_are_refused(pair: tuple[Executor, Executor], changes: dict[str, Any], reason: str) -> None:
    one, other = pair
    assert reason in error(other, replace(hand_over(one), **changes))


def damaged(content: bytes) -> Iterator[tuple[bytes, str]]:
    """Other contents of a file of an export, and why it is refused."""
    size = struct.unpack_from("<8sII", content)[2]
    start = struct.calcsize("<8sII")
    header = json.loads(content[start : start + size])

    def with_header(**changes: Any) -> bytes:
        encoded = json.dumps(header | changes).encode()
        return struct.pack("<8sII", b"PNSTKKVX", 1, len(encoded)) + encoded + content[start + size :]

    yield b"", "it is empty"
    yield content[:7], "it has no header"
    yield b"x" + content[1:], "does not begin as one"
    yield content[: start + 20], "its header is not whole"
    yield content[:12] + struct.pack("<I", 2**31) + content[start:], "its header is not whole"
    yield content[:8] + struct.pack("<I", 7) + content[12:], "version 7"
    yield content[:-1], f"has {len(content) - 1} bytes instead of {len(content)}"
    yield content + b"x", "bytes instead of"
    yield content[:-100] + bytes([content[-100] ^ 1]) + content[-99:], "its checksum"
    yield with_header(num_blocks=2**40), "of another prompt"
    yield with_header(num_blocks=-1), "of another prompt"
    yield with_header(keys=[]), "its header"
    yield with_header(block_size=32), "of 32 tokens, and here they are of 16"
    yield with_header(dtype="bfloat16"), "bfloat16, and here they are float32"
    yield with_header(model="0" * 32), "of another model"
    yield with_header(fingerprint="0" * 32), "sliding windows"


def test_a_damaged_export_is_refused_with_what_is_wrong(pair: tuple[Executor, Executor], directory: Path) -> None:
    one, other = pair
    params = hand_over(one)
    assert params.opaque_state is not None
    path = directory / "transfer" / f"{json.loads(params.opaque_state)['export']}.kvx"
    content = path.read_bytes()
    for changed, reason in damaged(content):
        path.write_bytes(changed)
        assert reason in error(other, params), reason
    path.write_bytes(content)
    path.chmod(0o666)
    assert "can be written by other users" in error(other, params)
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert "cannot be read" in error(other, params)
    path.unlink()
    other._context.engine.check_integrity()


def other_dtype(directory: Path) -> tuple[Path, dict[str, Any]]:
    return directory / "float32", {"dtype": "bfloat16", "enable_lora": False}


def other_model(directory: Path) -> tuple[Path, dict[str, Any]]:
    return write_model(directory / "other", "qwen3", rope_parameters={"rope_type": "default", "rope_theta": 500.0}), {}


@pytest.mark.parametrize(("other", "reason"), [(other_dtype, "keys and values are float32"), (other_model, "of another model")])
def test_an_executor_of_another_model_refuses_the_blocks(
    pair: tuple[Executor, Executor], directory: Path, other: Callable[[Path], tuple[Path, dict[str, Any]]], reason: str
) -> None:
    path, changes = other(directory)
    with Executor(path, **options(directory, "float32") | changes) as executor:
        assert reason in error(executor, hand_over(pair[0]))


def test_exports_are_bounded_and_leave_nothing_behind(directory: Path, tmp_path: Path) -> None:
    folder = tmp_path / "transfer"
    settings = options(directory, "float32", kv_transfer_dir=str(folder), kv_transfer_dir_size="128KiB")
    with Executor(directory / "float32", **settings) as executor:
        for number in range(6):
            hand_over(executor, input_token_ids=[number, *PROMPT])
            assert sum(path.stat().st_size for path in folder.iterdir()) <= 128 * 2**10
        assert 1 < len(list(folder.iterdir())) < 6
        too_long = ask(input_token_ids=PROMPT * 3, type=RequestType.CONTEXT_ONLY)
        (response,) = answers(executor, too_long)
        assert "--kv-transfer-dir-size is 131072" in str(response.error_msg)
    assert not list(folder.iterdir())


def test_a_phase_alone_needs_somewhere_to_hand_the_prompt_over(directory: Path) -> None:
    with Executor(directory / "float32", **SETTINGS) as executor:
        (response,) = answers(executor, ask(type=RequestType.CONTEXT_ONLY))
    assert "`type` needs an executor with `cache_transceiver_config`" in str(response.error_msg)


def test_the_originals_config_hands_over_in_shared_memory(directory: Path) -> None:
    config = ExecutorConfig(cache_transceiver_config=CacheTransceiverConfig(CacheTransceiverBackendType.DEFAULT))
    with Executor(directory / "float32", ModelType.DECODER_ONLY, config, **SETTINGS) as executor:
        params = hand_over(executor)
        assert said(answers(executor, ask(type=RequestType.GENERATION_ONLY, context_phase_params=params)))
    with pytest.raises(ConfigurationError, match=r"cache_transceiver_config\.backend"):
        ExecutorConfig(cache_transceiver_config=CacheTransceiverConfig(CacheTransceiverBackendType.UCX)).engine_arguments()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"prefix_caching": False}, "--no-prefix-caching"),
        ({"tensor_parallel_size": 2}, "--kv-transfer-dir cannot be combined with --tensor-parallel-size"),
    ],
)
def test_options_that_do_not_go_with_a_transfer_are_refused(directory: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        Executor(directory / "float32", **options(directory, "float32") | settings)
