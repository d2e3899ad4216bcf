"""Streams one answer, its reasoning apart from its content: `python examples/chat.py "Tell me about Mars."`.

The server has a reasoning parser: `python server.py --plugin deepseek_r1`. Needs `pip install openai`.
"""

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description="Stream one answer with its reasoning.")
    parser.add_argument("question", nargs="?", default="Tell me about Mars.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none", help="what the server was started with; any text where it asks for none")
    parser.add_argument("--thinking-token-budget", type=int, default=32, help="tokens of reasoning, after which the answer has to come")
    parser.add_argument("--max-tokens", type=int, default=120, help="tokens of reasoning and answer together")
    arguments = parser.parse_args()

    with OpenAI(base_url=arguments.base_url, api_key=arguments.api_key) as client:
        stream = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": arguments.question}],
            temperature=0,
            max_tokens=arguments.max_tokens,
            stream=True,
            extra_body={"thinking_token_budget": arguments.thinking_token_budget},
        )
        shown = None
        for chunk in stream:
            delta = chunk.choices[0].delta
            # OpenAI's client has no field for reasoning and keeps it with what it does not know.
            reasoning = (delta.model_extra or {}).get("reasoning_content")
            for kind, text in (("reasoning", reasoning), ("content", delta.content)):
                if text:
                    print("" if kind == shown else f"\n[{kind}]\n", text, sep="", end="", flush=True)
                    shown = kind
        print()


if __name__ == "__main__":
    main()
