"""Continues prompts in this process, without a server: `python examples/offline.py "The capital of France is"`."""

import argparse

from penstock import LLM, SamplingParams, StructuredOutputsParams

PROMPTS = ["The capital of France is", "Water boils at", "The first person on the moon was"]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Continue prompts, freely and held to a form.")
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--model", help="a Hugging Face id, a directory or a .gguf file (default: a small one, fetched once)")
    arguments = parser.parse_args(argv)

    with LLM(arguments.model) as llm:
        for output in llm.generate(arguments.prompts, SamplingParams(temperature=0, max_tokens=16, logprobs=0)):
            answer, metrics = output.outputs[0], output.metrics
            print(f"{output.prompt!r} ... {answer.text!r}")
            print(f"    {len(answer.token_ids)} tokens, log probability {answer.cumulative_logprob:.2f}, ended by {answer.finish_reason}")
            print(f"    first token after {(metrics.first_token_latency or 0) * 1000:.0f} ms")

        # Each prompt may have its own parameters: here several answers, a pattern, and one of two words.
        params = [
            SamplingParams(n=2, max_tokens=8, seed=1),
            SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(regex=r" [0-9]{2,4}")),
            SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(choice=[" yes", " no"])),
        ]
        for output in llm.generate(["Once upon a time", "The year is", "Is the sky blue? Answer:"], params, use_tqdm=False):
            print(f"{output.prompt!r} ... {' | '.join(repr(answer.text) for answer in output.outputs)}")


if __name__ == "__main__":
    main()
