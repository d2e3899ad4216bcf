"""Orders documents by how well they answer a query: `python examples/rerank.py "What makes bread rise?"`.

The server runs a cross-encoder, or a model that embeds: `python server.py --model minilm`. The request is Jina's, so that clients for
that API work too; Cohere's send theirs to /v2/rerank.
"""

import argparse
import json
import urllib.request

DOCUMENTS = [
    "Yeast turns the sugar in dough into gas.",
    "The river rises in the mountains of the north.",
    "Bread is sold by weight in this market.",
    "The Eiffel Tower was finished in 1889.",
]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Order documents by how well they answer a query.")
    parser.add_argument("query", nargs="?", default="What makes bread rise?")
    parser.add_argument("--top-n", type=int, default=3)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none", help="what the server was started with; any text where it asks for none")
    arguments = parser.parse_args(argv)

    body = {"query": arguments.query, "documents": DOCUMENTS, "top_n": arguments.top_n}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {arguments.api_key}"}
    request = urllib.request.Request(f"{arguments.base_url}/rerank", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)
    for result in answer["results"]:
        print(f"{result['relevance_score']:6.3f}  {result['document']['text']}")


if __name__ == "__main__":
    main()
