"""Tiny models that are trained within seconds, on tasks whose answers show in the text what a model has read.

The same seeds give the same examples, and training ends once its loss is low, so that rounding on another machine changes no answer.
"""

import functools
import random
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from tests.fakes import EOS, VOCAB_SIZE, ids
from tests.tiny_models import tiny_model

BATCH_SIZE = 16
LOW_LOSS = 0.003  # at which one answer in a thousand is wrong
MOST_STEPS = 1500


@dataclass(frozen=True)
class Task:
    """Strings of letters, of one of the `lengths`, and what comes after "=": their answer, then the end."""

    letters: str
    lengths: range
    answer: Callable[[str], str]

    def examples(self, chance: random.Random, number: int) -> list[tuple[str, str]]:
        """Prompts of one length, and their answers."""
        length = chance.choice(self.lengths)
        strings = ["".join(chance.choices(self.letters, k=length)) for _ in range(number)]
        return [(f"{string}=", self.answer(string)) for string in strings]


def copying(length: int) -> Task:
    """The answer is the last `length` letters. As many others may stand before them."""
    return Task("abcdefghijklmnopqrstuvwxyz", range(length, 2 * length + 1), lambda string: string[-length:])


def in_cases(answer: Callable[[str], str] = str) -> Task:
    """The answer is the last 12 letters, of either case, or what `answer` makes of them."""
    return Task("abcdefghABCDEFGH", range(12, 25), lambda string: answer(string[-12:]))


def sorting(letters: str, lengths: range) -> Task:
    """The answer is the letters that the string has, each once, in their order."""
    return Task(letters, lengths, lambda string: "".join(sorted(set(string))))


COPYING = copying(16)


def _sums(string: str) -> str:
    return "".join("abcd"[("abcd".index(one) + "abcd".index(other)) % 4] for one, other in pairwise(string[-9:]))


SUMS = Task("abcd", range(9, 19), _sums)  # which is not linear in the letters: the layers after attention have to compute it


@dataclass(frozen=True)
class Kind:
    """A kind of model: an architecture of `tiny_models`, and what it is trained for."""

    architecture: str
    task: Task = COPYING
    settings: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 6e-3
    only_states: bool = False  # layers with attention add nothing, so that what was read is in states alone


_LATENT = {"qk_rope_head_dim": 16, "qk_head_dim": 32, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
KINDS: dict[str, Kind] = {
    "llama": Kind("llama", settings={"num_hidden_layers": 2}),
    "sliding window": Kind("mistral", copying(8), {"num_hidden_layers": 2}),
    "windows and full attention": Kind("gemma3_text", copying(12)),
    "latents": Kind("deepseek_v3", settings={"num_hidden_layers": 2, **_LATENT}),
    "experts": Kind("qwen3_moe", SUMS, {"num_hidden_layers": 2}),
    "convolutions and attention": Kind("lfm2"),
    "convolutions": Kind("lfm2", copying(4), only_states=True),
    "delta net": Kind("qwen3_next", sorting("abcdef", range(3, 10)), only_states=True),
    "mamba": Kind("mamba2", sorting("abcdef", range(3, 10)), {"num_hidden_layers": 2, "chunk_size": 32}, 1e-2, only_states=True),
    "both cases": Kind("llama", in_cases(), {"num_hidden_layers": 2}),
    "draft": Kind("llama", settings={"num_hidden_layers": 1}),
}


def train(
    parameters: Iterable[Tensor],
    batch: Callable[[random.Random], tuple[Tensor, Tensor]],
    learning_rate: float,
) -> int:
    """Adjusts the parameters until answers are right, and says in how many steps.

    `batch` gives the logits [B, T, V] of answers and their tokens [B, T]. Raises AssertionError if they are not learned.
    """
    chance = random.Random(0)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in parameters if parameter.requires_grad], lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0
    )
    mean_loss = 1.0
    for step in range(MOST_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 30, 0.3 + mean_loss)
        logits_BTV, token_ids_BT = batch(chance)
        loss = cross_entropy(logits_BTV.flatten(0, 1), token_ids_BT.flatten())
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(chain.from_iterable(group["params"] for group in optimizer.param_groups), 1.0)
        optimizer.step()
        mean_loss += (float(loss.detach()) - mean_loss) / 10
        if mean_loss < LOW_LOSS:
            return step + 1
    raise AssertionError(f"not learned in {MOST_STEPS} steps: the loss is {mean_loss:.3f}")


def text_batch(model: PreTrainedModel, task: Task) -> Callable[[random.Random], tuple[Tensor, Tensor]]:
    """Batches of the task for `train`. Shorter answers are followed by more than one end."""

    def batch(chance: random.Random) -> tuple[Tensor, Tensor]:
        examples = task.examples(chance, BATCH_SIZE)
        longest = 1 + max(len(answer) for _, answer in examples)
        rows = [ids(prompt + answer) + [EOS] * (longest - len(answer)) for prompt, answer in examples]
        token_ids_BT = torch.tensor(rows)
        logits_BTV = model(token_ids_BT[:, :-1], use_cache=False).logits[:, -longest:]
        return logits_BTV, token_ids_BT[:, -longest:]

    return batch


@functools.cache
def _trained(name: str) -> PreTrainedModel:
    kind = KINDS[name]
    model = tiny_model(kind.architecture, vocab_size=VOCAB_SIZE, **kind.settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.5)  # drawn wider than what is learned soon
    for parameter_name, parameter in model.named_parameters():
        if kind.only_states and "self_attn.o" in parameter_name:
            parameter.requires_grad_(False).zero_()
    train(model.train().parameters(), text_batch(model, kind.task), kind.learning_rate)
    result: PreTrainedModel = torch.nn.Module.eval(model.requires_grad_(False))
    return result


def trained_model(name: str) -> PreTrainedModel:
    """A model of the kind, of the caller's own, with a vocabulary of the byte tokenizer in `fakes`. It is trained once in a process."""
    return deepcopy(_trained(name))


def held_out(task: Task, number: int = 8, seed: int = 1) -> list[tuple[str, str]]:
    """Prompts of several lengths, half of which begin with the string of another, and their answers."""
    chance = random.Random(f"held out {seed}")
    examples: list[tuple[str, str]] = []
    while len(examples) < number:
        [(prompt, answer)] = task.examples(chance, 1)
        string = prompt.removesuffix("=")
        examples.append((prompt, answer))
        if len(string) < task.lengths[-1]:
            longer = string + "".join(chance.choices(task.letters, k=task.lengths[-1] - len(string)))
            examples.append((f"{longer}=", task.answer(longer)))
    return examples[:number]
