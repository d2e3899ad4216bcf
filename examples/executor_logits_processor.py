"""Logits processors of one's own, by name and by client: `python examples/executor_logits_processor.py`."""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock import LogitsProcessor, LogitsRow, per_row
from penstock.llm.executor import Executor, LogitsProcessorConfig, OutputConfig, Request

NO_INPUT = OutputConfig(exclude_input_from_output=True)


def house_rules(row: LogitsRow, logits: Tensor, *, banned: list[int]) -> None:
    """Keeps `banned` tokens from every client but the editors. One call for each sequence and token."""
    if row.client_id != "editors":
        logits[banned] = float("-inf")


class Preference(LogitsProcessor):
    """Makes tokens likelier. One call for each step, with the rows of all sequences that ask for it."""

    def __init__(self) -> None:
        self.largest_batch = 0

    def begin(self, token_ids: list[int], by: float) -> tuple[list[int], float]:
        return token_ids, by

    def process(self, rows: Sequence[LogitsRow], logits: Tensor) -> Tensor:
        self.largest_batch = max(self.largest_batch, len(rows))
        bias = torch.zeros_like(logits)
        for place, row in enumerate(rows):
            token_ids, by = row.state
            bias[place, token_ids] = by
        return logits + bias


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Change what may be said, by name.")
    parser.add_argument("--model", help="a local directory or GGUF file, or a Hugging Face id (default: a small model)")
    arguments = parser.parse_args(argv)

    preference = Preference()
    with Executor(arguments.model, logits_processors={"house_rules": per_row(house_rules), "preference": preference}) as executor:

        def ids(text: str) -> list[int]:
            return executor.tokenizer.encode(text, add_special_tokens=False)

        prompt = ids("The capital of France is")
        ban = LogitsProcessorConfig("house_rules", {"banned": ids(" Paris")})
        prefer = LogitsProcessorConfig("preference", {"token_ids": ids(" not"), "by": 30.0})
        requests = {
            "without": Request(prompt, 6, output_config=NO_INPUT),
            "with house rules": Request(prompt, 6, output_config=NO_INPUT, logits_processors=[ban], client_id="guests"),
            "for editors": Request(prompt, 6, output_config=NO_INPUT, logits_processors=[ban], client_id="editors"),
            "preferring": Request(prompt, 6, output_config=NO_INPUT, logits_processors=[prefer]),
            "both": Request(prompt, 6, output_config=NO_INPUT, logits_processors=[ban, prefer]),
            "unknown": Request(prompt, 6, output_config=NO_INPUT, logits_processors="not_registered"),
        }
        request_ids = executor.enqueue_requests(requests.values())
        for name, responses in zip(requests, executor.await_responses(request_ids), strict=True):
            [response] = responses
            said = response.error_msg if response.has_error() else repr(executor.tokenizer.decode(response.result.output_token_ids[0]))
            print(f"{name}: {said}")
        print(f"rows in one call: {preference.largest_batch}")


if __name__ == "__main__":
    main()
