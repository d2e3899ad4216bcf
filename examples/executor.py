"""Requests of several kinds in one batch, in the manner of TensorRT-LLM's Executor API: `python examples/executor.py`."""

import argparse
from collections import defaultdict

from penstock.llm.executor import (
    Executor,
    FinishReason,
    GuidedDecodingParams,
    GuideType,
    OutputConfig,
    Request,
    SamplingConfig,
)

PROMPTS = ["The capital of France is", "Water boils at", "The first ten prime numbers are"]
NO_INPUT = OutputConfig(exclude_input_from_output=True)


def several(executor: Executor, prompts: list[list[int]]) -> None:
    """One response for each request, as they come."""
    request_ids = executor.enqueue_requests([Request(prompt, 12, output_config=NO_INPUT) for prompt in prompts])
    texts: dict[int, str] = {}
    while len(texts) < len(request_ids):
        for response in executor.await_responses():
            texts[response.request_id] = executor.tokenizer.decode(response.result.output_token_ids[0])
    for prompt, request_id in zip(PROMPTS, request_ids, strict=True):
        print(f"{prompt} ... {texts[request_id].strip()!r}")


def streamed(executor: Executor, prompt: list[int]) -> None:
    """Three sequences of one prompt, drawn at a temperature. Their responses interleave."""
    sampling = SamplingConfig(num_return_sequences=3, temperature=0.8, seed=1)
    request_id = executor.enqueue_request(Request(prompt, 12, streaming=True, sampling_config=sampling))
    tokens: defaultdict[int, list[int]] = defaultdict(list)
    while responses := executor.await_responses(request_id):
        for response in responses:
            tokens[response.result.sequence_index] += response.result.output_token_ids[0]
    for index in sorted(tokens):
        print(f"sequence {index}: {executor.tokenizer.decode(tokens[index])!r}")


def searched(executor: Executor, prompt: list[int]) -> None:
    """The two best of four beams, beside a request that is held to a pattern and one that has little time."""
    beams, guided, hurried = executor.enqueue_requests(
        [
            Request(prompt, 8, sampling_config=SamplingConfig(4, num_return_sequences=2), output_config=NO_INPUT),
            Request(prompt, 16, guided_decoding_params=GuidedDecodingParams(GuideType.REGEX, " [A-Z][a-z]{2,9}"), output_config=NO_INPUT),
            Request(prompt, 200, allotted_time=0.05, end_id=-1, output_config=NO_INPUT),
        ]
    )
    [[found], [held], [late]] = executor.await_responses([beams, guided, hurried])
    for beam in found.result.output_token_ids:
        print(f"beam: {executor.tokenizer.decode(beam)!r}")
    print(f"held to a pattern: {executor.tokenizer.decode(held.result.output_token_ids[0])!r}")
    assert late.result.finish_reasons[0] in (FinishReason.TIMED_OUT, FinishReason.LENGTH)
    print(f"in 50 ms: {len(late.result.output_token_ids[0])} tokens")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Serve requests of several kinds in one batch.")
    parser.add_argument("--model", help="a local directory or GGUF file, or a Hugging Face id (default: a small model)")
    arguments = parser.parse_args(argv)

    with Executor(arguments.model) as executor:
        prompts = [executor.tokenizer.encode(prompt, add_special_tokens=True) for prompt in PROMPTS]
        several(executor, prompts)
        streamed(executor, prompts[0])
        searched(executor, prompts[0])
        steps = executor.latest_iteration_stats()
        print(f"{len(steps)} steps, at most {max(step.inflight_batching_stats.num_scheduled_requests for step in steps)} sequences in one")


if __name__ == "__main__":
    main()
