"""Asks a running server the held-out tasks, with and without reasoning, and prints what share of the answers is right:

    python -m penstock_adapter_thinking.evaluate SmolLM2-135M-Instruct thinking

The server runs with `--plugin deepseek_r1 --adapter thinking=DIR`. Needs `pip install openai`.
"""

import argparse
import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import OpenAI

from penstock_adapter_thinking.tasks import KINDS, Task, held_out_tasks

MAX_TOKENS = 200
Z = 1.96  # of an interval of 95 %


def ask(client: OpenAI, model: str, task: Task, *, thinks: bool, penalty: float) -> tuple[bool, int]:
    """Whether the answer is right, and its tokens, reasoning included. Greedy."""
    options: dict[str, Any] = {"tools": list(task.tools)} if task.tools else {}
    completion = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": task.question}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        extra_body={"repetition_penalty": penalty, "chat_template_kwargs": {"enable_thinking": thinks}},
        **options,
    )
    message = completion.choices[0].message
    if task.tools:
        calls = [(call.function.name, _decoded(call.function.arguments)) for call in message.tool_calls or () if call.type == "function"]
        is_right = calls == [task.expected]
    else:
        is_right = task.is_right(message.content or "")
    return is_right, 0 if completion.usage is None else completion.usage.completion_tokens


def _decoded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return None


def interval(right: int, total: int) -> tuple[float, float]:
    """Wilson's, of the share."""
    center, spread = right + Z**2 / 2, Z * math.sqrt(right * (total - right) / total + Z**2 / 4)
    return (center - spread) / (total + Z**2), (center + spread) / (total + Z**2)


def cell(right: int, total: int) -> str:
    low, high = interval(right, total)
    return f"{right / total:.0%} ({low:.0%} to {high:.0%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="as in /v1/models: the base model, the adapter")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--tasks", type=int, default=50, help="of each kind, or as many as there are (default: %(default)s)")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="(default: %(default)s)")
    parser.add_argument("--streams", type=int, default=8, help="requests at once (default: %(default)s)")
    options = parser.parse_args()

    tasks = {kind: held_out_tasks(kind, options.tasks) for kind in KINDS}
    counts = ", ".join(f"{len(own)} {kind}" for kind, own in tasks.items())
    print(f"Held-out tasks ({counts}), greedy; share of right answers with its interval of 95 %\n")
    print(f"| model | reasoning | {' | '.join(tasks)} | all | tokens per answer |")
    print(f"|---|---|{'---|' * (len(tasks) + 2)}")
    with OpenAI(base_url=options.base_url, api_key=options.api_key) as client, ThreadPoolExecutor(options.streams) as threads:
        for model in options.models:
            for thinks in (True, False):

                def answer(task: Task, model: str = model, thinks: bool = thinks) -> tuple[bool, int]:
                    return ask(client, model, task, thinks=thinks, penalty=options.repetition_penalty)

                answers = {kind: list(threads.map(answer, own)) for kind, own in tasks.items()}
                everything = [each for own in answers.values() for each in own]
                cells = [cell(sum(right for right, _ in own), len(own)) for own in (*answers.values(), everything)]
                tokens = sum(number for _, number in everything) / len(everything)
                print(f"| {model} | {'yes' if thinks else 'no'} | {' | '.join(cells)} | {tokens:.0f} |", flush=True)


if __name__ == "__main__":
    main()
