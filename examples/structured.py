"""An answer that is an instance of a pydantic model, after reasoning where there is any: `python examples/structured.py`.

The server runs a model that is good at it: `python server.py --model qwen-coder`. Needs `pip install openai`.
"""

import argparse
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class City(BaseModel):
    name: str = Field(max_length=20)
    country: str = Field(max_length=20)
    continent: Literal["Africa", "America", "Asia", "Europe", "Oceania"]
    is_capital: bool


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Ask for an answer that follows a schema.")
    parser.add_argument("question", nargs="?", default="Describe the city of Paris.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none", help="what the server was started with; any text where it asks for none")
    arguments = parser.parse_args(argv)

    with OpenAI(base_url=arguments.base_url, api_key=arguments.api_key) as client:
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": arguments.question}],
            temperature=0,
            max_tokens=300,
            extra_body={"guided_json": City.model_json_schema(), "thinking_token_budget": 32},
        )
    message = answer.choices[0].message
    print("reasoning:", (message.model_extra or {}).get("reasoning_content"))
    print("content:  ", message.content)
    print("parsed:   ", City.model_validate_json(message.content or ""))


if __name__ == "__main__":
    main()
