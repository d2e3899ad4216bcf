"""Finds the passages that are nearest to a question: `python examples/embeddings.py "Who wrote Hamlet?"`. Needs `pip install openai`.

The server runs a model that embeds: `python server.py --model minilm`.
"""

import argparse

from openai import OpenAI

PASSAGES = [
    "Shakespeare's plays were written for a theatre beside the Thames.",
    "The Eiffel Tower was finished in 1889, for a world's fair.",
    "Bread rises because yeast turns sugar into gas.",
    "The capital of France lies on the river Seine.",
    "A cat sleeps for more than half of the day.",
]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Order passages by how near they are to a question.")
    parser.add_argument("question", nargs="?", default="Which city is Paris in the vicinity of?")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none", help="what the server was started with; any text where it asks for none")
    arguments = parser.parse_args(argv)

    with OpenAI(base_url=arguments.base_url, api_key=arguments.api_key) as client:
        model = client.models.list().data[0].id
        answer = client.embeddings.create(model=model, input=[arguments.question, *PASSAGES])
    question, *passages = (entry.embedding for entry in answer.data)
    # The vectors have length 1, so that their product is the cosine of the angle between them.
    cosines = [sum(x * y for x, y in zip(question, passage, strict=True)) for passage in passages]
    for cosine, passage in sorted(zip(cosines, PASSAGES, strict=True), reverse=True):
        print(f"{cosine:6.3f}  {passage}")
    print(f"{len(question)} dimensions, {answer.usage.prompt_tokens} tokens")


if __name__ == "__main__":
    main()
