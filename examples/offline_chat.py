"""Answers conversations in this process, with reasoning and tool calls told apart: `python examples/offline_chat.py`."""

import argparse

from penstock import LLM, SamplingParams

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Answer conversations.")
    parser.add_argument("questions", nargs="*", default=["What is the capital of France?", "Name a fruit."])
    parser.add_argument("--model", default="qwen-coder", help="an id, a directory or a .gguf file (default: %(default)s, fetched once)")
    parser.add_argument("--max-tokens", type=int, default=60)
    parser.add_argument("--reasoning-parser", default="deepseek_r1", help="or auto: the one that the model's own files show")
    parser.add_argument("--tool-parser", default="hermes", help="or auto")
    arguments = parser.parse_args(argv)

    formats = {"reasoning_parser": arguments.reasoning_parser, "tool_parser": arguments.tool_parser}
    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)
    with LLM(arguments.model, thinking_token_budget=16, **formats) as llm:
        conversations = [[{"role": "user", "content": question}] for question in arguments.questions]
        for question, output in zip(arguments.questions, llm.chat(conversations, params), strict=True):
            answer = output.outputs[0]
            print(f"{question}\n  reasoning: {answer.reasoning_content!r}\n  content:   {answer.text!r}")

        asked = [{"role": "user", "content": "What is the weather in Oslo?"}]
        params = SamplingParams(temperature=0, max_tokens=120)
        [output] = llm.chat(asked, params, tools=TOOLS, tool_choice="required", use_tqdm=False)
        for call in output.outputs[0].tool_calls:
            print(f"call: {call.function.name}({call.function.arguments})")


if __name__ == "__main__":
    main()
