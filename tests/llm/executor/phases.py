"""Models and requests whose prompts one process computes and another one answers; run as a program, it is the one that computes them.

`python -m tests.llm.executor.phases DIRECTORY MODEL ...` prints a line of JSON for each context phase, and keeps what it has exported
until its standard input ends.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file

from penstock.llm.executor import (
    ContextPhaseParams,
    Executor,
    GuidedDecodingParams,
    GuideType,
    LoraConfig,
    OutputConfig,
    Request,
    RequestType,
    Response,
    SamplingConfig,
)
from tests.llm.model_directory import SETTINGS

WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64}
# The architecture, the settings of the model, and those of the executor.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "float32": ("qwen3", {}, {"enable_lora": True}),
    "bfloat16": ("llama", WIDE, {"dtype": "bfloat16"}),
    "int8": ("qwen3", WIDE, {"dtype": "bfloat16", "quantization": "int8"}),
    "int4": ("llama", WIDE, {"quantization": "int4"}),
    "windows": ("gemma2", {}, {}),
    "latents": ("deepseek_v3", {}, {}),
}
SHARED_MEMORY = "int8"  # its blocks are handed over in it, those of the others in files
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
PROMPT = list(b"the quick brown fox jumps over the lazy dog and then it goes home to sleep")
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "short": {"input_token_ids": PROMPT[:9]},  # less than a block
    "whole": {"input_token_ids": PROMPT[:64]},
    "drawn": {"sampling_config": SamplingConfig(seed=5, temperature=0.9, num_return_sequences=3)},
    "penalties": {"sampling_config": SamplingConfig(repetition_penalty=1.3, min_tokens=4), "stop_words": [[30, 31]]},
    "schema": {"guided_decoding_params": GuidedDecodingParams(GuideType.JSON_SCHEMA, SCHEMA)},
    "salt": {"cache_salt": "a"},
    "log_probs": {"output_config": OutputConfig(exclude_input_from_output=True, return_log_probs=True)},
}
ADAPTED = "adapter"  # of float32 alone


def options(directory: Path, name: str, **others: Any) -> dict[str, Any]:
    transfer = "shm" if name == SHARED_MEMORY else str(directory / "transfer")
    return {**SETTINGS, **MODELS[name][2], "kv_transfer_dir": transfer, **others}


def cases(name: str) -> list[str]:
    return [*CASES, ADAPTED] if name == "float32" else ["greedy", "drawn"]


def request(directory: Path, case: str, kind: RequestType, params: ContextPhaseParams | None = None) -> Request:
    fields: dict[str, Any] = {
        "input_token_ids": PROMPT,
        "max_tokens": 16,
        "output_config": OutputConfig(exclude_input_from_output=True),
        "end_id": None if case == "schema" else -1,
        "type": kind,
        "context_phase_params": params,
    }
    if case == ADAPTED:
        packed = load_file(directory / "adapter.safetensors")
        return Request(**fields, lora_config=LoraConfig(1, packed["weights"], packed["config"]))
    return Request(**fields | CASES[case])


def answers(executor: Executor, asked: Request) -> list[Response]:
    responses = []
    request_id = executor.enqueue_request(asked)
    while more := executor.await_responses(request_id, timeout=120):
        responses += more
    return responses


class Line(msgspec.Struct):
    """What the context phase of one request has left."""

    model: str
    case: str
    first: list[int]
    state: bytes
    said: list[list[int]]

    @property
    def params(self) -> ContextPhaseParams:
        return ContextPhaseParams(self.first, 1, self.state)


def lines(directory: Path, executor: Executor, name: str) -> Iterator[Line]:
    for case in cases(name):
        responses = answers(executor, request(directory, case, RequestType.CONTEXT_ONLY))
        params = responses[-1].result.context_phase_params
        assert params is not None
        assert params.opaque_state is not None
        said = sorted((response.result.sequence_index, response.result.output_token_ids[0]) for response in responses)
        yield Line(name, case, list(params.first_gen_tokens), params.opaque_state, [ids for _, ids in said])


def main() -> None:
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    with ExitStack() as executors:
        for name in sys.argv[2:]:
            executor = executors.enter_context(Executor(directory / name, **options(directory, name)))
            for line in lines(directory, executor, name):
                print(msgspec.json.encode(line).decode(), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
