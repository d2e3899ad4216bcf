"""Embeds and compares texts in this process, without a server: `python examples/embed_offline.py`."""

import argparse

from penstock import LLM

TEXTS = ["A dog runs after a ball.", "A puppy chases its toy.", "The bank raised its interest rates."]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Embed texts, and score pairs of them.")
    parser.add_argument("--model", default="minilm", help="a model that embeds: a directory, a Hugging Face id, or minilm")
    arguments = parser.parse_args(argv)

    with LLM(arguments.model) as llm:
        for text, output in zip(TEXTS, llm.embed(TEXTS), strict=True):
            print(f"{text!r}: {output.outputs.hidden_size} numbers from {len(output.prompt_token_ids)} tokens")
        first, *others = TEXTS
        for text, score in zip(others, llm.score(first, others), strict=True):
            print(f"{score.outputs.score:6.3f}  {first!r} and {text!r}")


if __name__ == "__main__":
    main()
