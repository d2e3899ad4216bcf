"""Probes of a soak: requests whose answers are compared, token for token, with what an idle server computes.

Where two tokens are about equally likely, rounding decides, and rounding depends on what else is in a step. All that follows is another
text then. So a different text is no fault, and nor is it a sign of one if it differs much: the first soak compared the content alone, and
reported an answer whose content was clearly another, because its reasoning had begun with "The wind" instead of "The original", which were
0.1 nats apart. What tells a fault is how likely each token was after those before it. That is compared for all tokens of all answers. Where
an answer has tokens that no idle server has given, the server scores them as a prompt once it is idle: it computes every position anew,
without cached blocks, draft tokens or other sequences.

This sees what changes answers. A block of keys and values in the place of another one may change them by less than rounding does, where
the texts are alike; `tests/engine/kv_cache/test_persisted_blocks.py` compares the contents of blocks.
"""

import json
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.attacker import CHAT, COMPLETIONS, Fields
from benchmarks.target import TargetError

EMBEDDINGS, TOKENIZE = "/v1/embeddings", "/tokenize"
NUM_PROBES = 12
NUM_TOKENS = 12  # of an answer
WORDS = ("wind", "over", "the", "harbour", "of", "Oslo", "is", "light", "today", "boats", "lie", "still")
MIN_COSINE = 0.9999  # of two vectors of one text; rounding depends on what else is in a step
# Of a token's log probability, in nats. Logits are bfloat16, in steps of 0.125 at 16 and above, and rounding moves them by a few of those.
MAX_ROUNDING = 0.75

Request = Callable[[str, str, bytes], Awaitable[tuple[str, bytes]]]  # method, path and body: the status and the body of the answer


@dataclass(frozen=True, slots=True)
class SaidToken:
    """A token of an answer: its log probability, and how much more likely the most likely token was, both in nats.

    They are None where it was not sampled, as the markers that end the reasoning are not.
    """

    token_id: int
    logprob: float | None
    behind: float | None


@dataclass(frozen=True, slots=True)
class SaidTokens:
    """All tokens of an answer, its reasoning first, of which `num_reasoning` tokens are."""

    tokens: tuple[SaidToken, ...]
    num_reasoning: int = 0

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.tokens)

    def __str__(self) -> str:
        return " ".join(f"{token.token_id}" if token.logprob is None else f"{token.token_id}:{token.logprob:.2f}" for token in self.tokens)

    def difference(self, alone: "SaidTokens") -> float:
        """The largest one from the log probabilities of the same tokens as an idle server gives them."""
        pairs = zip(self.tokens, alone.tokens, strict=True)
        return max((abs(a.logprob - b.logprob) for a, b in pairs if a.logprob is not None and b.logprob is not None), default=0.0)

    def is_greedy(self) -> bool:
        """Whether each token that was sampled is about the most likely one. The content may not begin with a stop token."""
        return all(
            token.behind is None or token.behind <= MAX_ROUNDING
            for place, token in enumerate(self.tokens)
            if place != self.num_reasoning or not self.num_reasoning
        )


Answer = SaidTokens | tuple[float, ...]


def read_answer(answer: bytes | Any) -> Answer:
    """What is compared of the body of an answer: its tokens, or its vector."""
    decoded = json.loads(answer) if isinstance(answer, bytes) else answer
    if "choices" not in decoded:
        return tuple(decoded["data"][0]["embedding"])
    logprobs = decoded["choices"][0]["logprobs"]
    reasoning = logprobs.get("reasoning_content") or []
    return SaidTokens(tuple(map(_said, [*reasoning, *logprobs["content"]])), len(reasoning))


def _said(entry: dict[str, Any]) -> SaidToken:
    token_id, logprob, top = int(entry["token"].removeprefix("token_id:")), entry["logprob"], entry["top_logprobs"]
    return SaidToken(token_id, logprob, top[0]["logprob"] - logprob) if top else SaidToken(token_id, None, None)


def are_far_apart(vector: tuple[float, ...], other: tuple[float, ...]) -> bool:
    product = sum(a * b for a, b in zip(vector, other, strict=True))
    return bool(product < MIN_COSINE * math.hypot(*vector) * math.hypot(*other))


@dataclass(eq=False, slots=True)
class Probe:
    """A request, and what an idle server answered. `unscored` are answers of other tokens, with the kind of request that got them.

    `max_rounding` is the largest difference between log probabilities that was taken for rounding.
    """

    path: str
    body: bytes
    alone: list[Answer] = field(default_factory=list)
    unscored: list[tuple[str, SaidTokens]] = field(default_factory=list)
    max_rounding: float = 0.0

    @property
    def asked(self) -> Any:
        return json.loads(self.body)

    def mismatch(self, kind: str, answer: Answer) -> str | None:
        """What is wrong with an answer, in words. One that can only be judged by a score is kept for `score`."""
        if not isinstance(answer, SaidTokens):
            vectors = [alone for alone in self.alone if not isinstance(alone, SaidTokens)]
            return self._described(kind, "another vector") if all(are_far_apart(answer, alone) for alone in vectors) else None
        if len(answer.tokens) != NUM_TOKENS:
            return self._described(kind, f"{len(answer.tokens)} tokens instead of {NUM_TOKENS}")
        same = [alone for alone in self.alone if isinstance(alone, SaidTokens) and alone.ids == answer.ids]
        if not same:
            self.unscored.append((kind, answer))
            return None
        difference = min(answer.difference(alone) for alone in same)
        if difference > MAX_ROUNDING:
            return self._described(kind, f"{answer}; alone {same[0]}")
        self.max_rounding = max(self.max_rounding, difference)
        return None

    async def score(self, request: Request) -> list[str]:
        """Has the idle server score the tokens of answers that it has not given itself; returns what is wrong with them, in words."""
        found, (unscored, self.unscored) = [], (self.unscored, [])
        for kind, answer in unscored:
            if not any(isinstance(alone, SaidTokens) and alone.ids == answer.ids for alone in self.alone):
                scored = await self._scored(answer, request)
                if not scored.is_greedy():
                    found.append(self._described(kind, f"{answer} is not the most likely; alone {scored}"))
                    continue
                self.alone.append(scored)
            if (mismatch := self.mismatch(kind, answer)) is not None:
                found.append(mismatch)
        return found

    async def _scored(self, answer: SaidTokens, request: Request) -> SaidTokens:
        asked = self.asked
        prompt = {name: asked[name] for name in ("model", "messages")}
        prompt_ids = (await _posted(request, TOKENIZE, prompt))["tokens"]
        scored: Fields = {"model": asked["model"], "prompt": [*prompt_ids, *answer.ids], "max_tokens": 1, "prompt_logprobs": 1}
        entries = (await _posted(request, COMPLETIONS, scored))["choices"][0]["prompt_logprobs"][len(prompt_ids) :]
        tokens = []
        for said, entry in zip(answer.tokens, entries, strict=True):
            logprob = entry[str(said.token_id)]["logprob"]
            best = max(other["logprob"] for other in entry.values())
            tokens.append(said if said.logprob is None else SaidToken(said.token_id, logprob, best - logprob))
        return SaidTokens(tuple(tokens), answer.num_reasoning)

    def _described(self, kind: str, what: str) -> str:
        asked = self.asked
        return f"{kind}: {asked['model']}, {str(asked.get('messages', asked.get('input')))[-60:]}: {what}"


async def _posted(request: Request, path: str, fields: Fields) -> Any:
    """The decoded answer of a server that has to give one."""
    status, answer = await request("POST", path, json.dumps(fields).encode())
    if status != "200":
        raise TargetError(f"{path} answers {status}: {answer[:300].decode(errors='replace')}")
    return json.loads(answer)


@dataclass(slots=True)
class Probes:
    """Those of one server, and in words what was wrong with answers. `num_scored` counts the right ones of tokens that had to be scored."""

    all: list[Probe]
    mismatches: list[str] = field(default_factory=list)
    num_compared: int = 0
    num_scored: int = 0

    async def ask(self, request: Request) -> None:
        """Asks an idle server: for a prompt that is computed as a whole, and for one whose prefix is cached. Raises `TargetError`."""
        for probe in self.all * 2:
            probe.alone.append(read_answer(await _posted(request, probe.path, probe.asked)))

    @property
    def max_rounding(self) -> float:
        return max((probe.max_rounding for probe in self.all), default=0.0)

    def compare(self, kind: str, probe: Probe, answer: bytes | Any) -> None:
        """An answer from a busy server."""
        self.num_compared += 1
        if (mismatch := probe.mismatch(kind, read_answer(answer))) is not None:
            self.mismatches.append(mismatch)

    async def score(self, request: Request) -> None:
        """To be called while the server is idle."""
        for probe in self.all:
            num_unscored = len(probe.unscored)
            found = await probe.score(request)
            self.num_scored += num_unscored - len(found)
            self.mismatches += found


def chat_probes(model: str, adapters: list[str]) -> list[Probe]:
    """Of a server that generates. Prompts differ from each other soon, so that blocks of one make another answer in another's place."""
    asked: Fields = {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}
    asked |= {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    probes = []
    for number in range(NUM_PROBES):
        words = random.Random(number).choices(WORDS, k=len(WORDS) * (number % 4))
        question = [{"role": "user", "content": f"Count from {number}. " + " ".join(words)}]
        used = adapters[number % len(adapters)] if adapters and number % 3 == 0 else model
        probes.append(Probe(CHAT, json.dumps(asked | {"model": used, "messages": question}).encode()))
    return probes


def embedding_probes(model: str) -> list[Probe]:
    bodies = ({"model": model, "input": " ".join(WORDS[: number + 1])} for number in range(NUM_PROBES))
    return [Probe(EMBEDDINGS, json.dumps(body).encode()) for body in bodies]
