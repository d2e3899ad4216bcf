"""Trains the adapter on generated tasks: `python -m penstock_adapter_thinking.train --model DIR --output DIR`.

One core is enough. An interrupted run goes on from its last checkpoint when it is started again. The model has plain weights, as
`python benchmarks/plain_model.py DIR` of Penstock writes those of its default model. A server of that model, with `--plugin deepseek_r1`,
renders the prompts, so that they are those that the adapter will see.
"""

import argparse
import json
import os
import random
import statistics
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.helpers import disable_input_dtype_casting
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from penstock_adapter_thinking.tasks import Task, training_task

START, END, END_OF_TURN = "<think>", "</think>", "<|im_end|>"
# How many batches of each pool: calls of tools, whose prompts are the longest, and the others, which share their batches.
POOL_BATCHES = {("tool",): 1, ("arithmetic", "arithmetic", "comparison", "date"): 11}
DIRECT_SHARE = 0.15  # of examples with `enable_thinking: false`: answers without reasoning
# Without `gate_proj`, so that rank 8 in 16 bits stays below 4 MB.
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
NO_LOSS = -100
WARMUP_STEPS = 10
DECAY_SHARE = 0.3  # of the steps, the last ones: the learning rate falls to zero
CHECKPOINT_SECONDS = 180


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with its answer as tokens; only the answer is learned."""

    token_ids: list[int]
    num_prompt_tokens: int


class Examples:
    """Batches of training examples, the same for the same seed. Prompts are those that the server renders."""

    def __init__(self, server: str, batch_size: int, seed: int) -> None:
        self._server = server
        self._batch_size = batch_size
        self._seed = seed

    def batches(self, first: int) -> Iterator[list[Example]]:
        """From the batch of this number on, without end."""
        size = sum(POOL_BATCHES.values())
        while True:
            pool, place = divmod(first, size)
            yield from self._pool(pool)[place:]
            first = (pool + 1) * size

    def _pool(self, number: int) -> list[list[Example]]:
        """Sorted by length, so that a batch holds little padding, and then shuffled."""
        chance = random.Random(f"{self._seed} {number}")
        batches = []
        for kinds, count in POOL_BATCHES.items():
            tasks = [training_task(chance, chance.choice(kinds)) for _ in range(count * self._batch_size)]
            examples = [self.example(task, is_direct=chance.random() < DIRECT_SHARE) for task in tasks]
            examples.sort(key=lambda example: len(example.token_ids))
            batches += [examples[start : start + self._batch_size] for start in range(0, len(examples), self._batch_size)]
        chance.shuffle(batches)
        return batches

    def example(self, task: Task, *, is_direct: bool) -> Example:
        messages = [{"role": "user", "content": task.question}]
        tools = {"tools": list(task.tools)} if task.tools else {}
        prompt = self._tokens(messages=messages, chat_template_kwargs={"enable_thinking": False} if is_direct else {}, **tools)
        answer = task.answer if is_direct else f"{task.reasoning}\n{END}\n\n{task.answer}"
        # A prompt that opens the reasoning is learned with the opening: so the model opens it by itself as well.
        learned = [] if is_direct else self._tokens(prompt=f"{START}\n", add_special_tokens=False)
        return Example(prompt + self._tokens(prompt=answer + END_OF_TURN, add_special_tokens=False), len(prompt) - len(learned))

    def _tokens(self, **body: Any) -> list[int]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._server}/tokenize", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            tokens: list[int] = json.load(answer)["tokens"]
        return tokens


def tensors_of(batch: list[Example]) -> tuple[Tensor, Tensor]:
    """Token ids and targets [B, T], padded at the end, where nothing that counts looks."""
    longest = max(len(example.token_ids) for example in batch)
    token_ids_BT = torch.zeros(len(batch), longest, dtype=torch.int64)
    targets_BT = torch.full((len(batch), longest), NO_LOSS)
    for row, example in enumerate(batch):
        size, start = len(example.token_ids), example.num_prompt_tokens
        token_ids_BT[row, :size] = torch.tensor(example.token_ids)
        targets_BT[row, start:size] = token_ids_BT[row, start:size]
    return token_ids_BT, targets_BT


def loss_of(model: Any, token_ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Of the learned tokens alone, for which alone the vocabulary's logits are computed."""
    causal_model = model.get_base_model()
    hidden_BTH = causal_model.model(input_ids=token_ids_BT, use_cache=False).last_hidden_state
    is_learned_BT = targets_BT[:, 1:] != NO_LOSS
    logits_NV = causal_model.get_output_embeddings()(hidden_BTH[:, :-1][is_learned_BT])
    return nn.functional.cross_entropy(logits_NV.float(), targets_BT[:, 1:][is_learned_BT])


@dataclass(slots=True)
class Training:
    """The model with its adapter, the optimizer, and how far it is."""

    model: Any
    optimizer: torch.optim.AdamW
    schedule: torch.optim.lr_scheduler.LambdaLR
    step: int = 0
    seconds: float = 0.0

    @classmethod
    def begin(cls, model: Any, learning_rate: float, num_steps: int) -> "Training":
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)

        def rate(step: int) -> float:
            return min(1.0, (step + 1) / WARMUP_STEPS, (num_steps - step) / (num_steps * DECAY_SHARE))

        return cls(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate))

    def advance(self, batch: list[Example]) -> float:
        """One step; the loss."""
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16), disable_input_dtype_casting(self.model):
            loss = loss_of(self.model, *tensors_of(batch))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.step += 1
        self.seconds += time.perf_counter() - start
        return loss.item()

    def save(self, file: Path) -> None:
        state = {
            "adapter": get_peft_model_state_dict(self.model),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
        }
        torch.save(state, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)

    def load(self, file: Path) -> None:
        state = torch.load(file, weights_only=True)
        set_peft_model_state_dict(self.model, state["adapter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.step, self.seconds = state["step"], state["seconds"]


def write_adapter(training: Training, directory: Path, summary: dict[str, Any]) -> None:
    """As peft saves it, in 16 bits, with what was run beside it."""
    weights = {name: value.bfloat16().contiguous() for name, value in get_peft_model_state_dict(training.model).items()}
    save_file(weights, directory / "adapter_model.safetensors")
    config = training.model.peft_config["default"]
    config.base_model_name_or_path = BASE_MODEL  # peft put the directory there that the model was loaded from
    config.save_pretrained(str(directory))
    (directory / "training.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the adapter.")
    parser.add_argument("--model", type=Path, required=True, help="the directory of the model, with plain weights")
    parser.add_argument("--server", default="http://127.0.0.1:8000", help="a server of the model (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="the directory for the adapter, the log and checkpoints")
    parser.add_argument("--steps", type=int, default=170)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    options.output.mkdir(parents=True, exist_ok=True)

    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16, attn_implementation="sdpa")
    config = LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank,
        target_modules=TARGETS,
        task_type="CAUSAL_LM",
    )
    training = Training.begin(get_peft_model(base, config), options.learning_rate, options.steps)
    examples = Examples(options.server, options.batch_size, options.seed)
    checkpoint, log_file = options.output / "checkpoint.pt", options.output / "log.jsonl"
    if checkpoint.exists():
        training.load(checkpoint)

    saved = time.monotonic()
    losses: deque[float] = deque(maxlen=10)
    for batch in examples.batches(training.step):
        if training.step >= options.steps:
            break
        losses.append(training.advance(batch))
        if training.step % 10 == 0:
            line = {"step": training.step, "loss": round(statistics.mean(losses), 4), "seconds": round(training.seconds)}
            print(json.dumps(line), flush=True)
            with log_file.open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
        if time.monotonic() - saved > CHECKPOINT_SECONDS:
            training.save(checkpoint)
            saved = time.monotonic()
    training.save(checkpoint)
    summary = {
        **{name: value for name, value in vars(options).items() if name not in ("model", "server", "output")},
        "examples": training.step * options.batch_size,
        "loss": round(statistics.mean(losses), 4),  # of the last 10 steps
        "seconds": round(training.seconds),
        "cores": os.cpu_count(),
    }
    write_adapter(training, options.output, summary)


if __name__ == "__main__":
    main()
