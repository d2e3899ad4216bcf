"""Searches for the likeliest answers instead of drawing one: `python examples/beam_search.py "The capital of France is"`."""

import argparse

from penstock import LLM, BeamSearchParams, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time there was"]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Find the likeliest continuations of prompts.")
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--model", help="a Hugging Face id, a directory or a .gguf file (default: a small one, fetched once)")
    parser.add_argument("--width", type=int, default=4, help="how many texts are kept at once")
    arguments = parser.parse_args(argv)

    with LLM(arguments.model) as llm:
        greedy = llm.generate(arguments.prompts, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
        # Without a length penalty an answer is as good as it is likely; above 0 the length counts less against it.
        params = BeamSearchParams(arguments.width, max_tokens=12, length_penalty=1.0, early_stopping=False)
        for first, output in zip(greedy, llm.beam_search(arguments.prompts, params), strict=True):
            print(f"{first.prompt!r}\n    one token after the other: {first.outputs[0].text!r}")
            for answer in output.sequences:
                print(f"    {answer.cum_logprob:7.2f} {answer.text[len(first.prompt or '') :]!r}, ended by {answer.finish_reason}")


if __name__ == "__main__":
    main()
