"""Generated requests of a published trace's shape, for `simulation.py`: lengths, conversations, and how much of their prompts is shared."""

import hashlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from penstock.engine.kv_cache.blocks import HASH_BYTES, NO_KEY

BLOCK_SIZE = 512  # tokens, as in Mooncake's traces; the server's own blocks are smaller, and find up to 511 tokens more


@dataclass(frozen=True, slots=True)
class Shape:
    """Traffic of the shape of Mooncake's trace (arXiv:2407.00079, §4.2): 7,590 tokens of input and 182 of output on average, of which a
    cache without bounds has half. Conversations of an application share its system prompt; turns follow after `mean_think_seconds`.
    """

    num_apps: int = 200
    app_exponent: float = 1.1  # Zipf's: how unequally applications are used
    mean_app_tokens: float = 1000
    mean_turns: float = 1.9
    mean_first_tokens: float = 4400  # of the first turn: documents, files
    mean_next_tokens: float = 2400
    mean_output_tokens: float = 182
    sigma: float = 1.0  # of the logarithm of these lengths
    mean_think_seconds: float = 15.0  # tools and readers; not published
    max_tokens: int = 60_000


@dataclass(slots=True)
class Conversation:
    """All turns so far: the application's `num_app_tokens` tokens of its system prompt, then others that no conversation shares.

    `tokens` have their number alone: what two prompts have in common is in the hashes of their blocks, chained as the server's are.
    """

    number: int
    app: int
    num_app_tokens: int
    num_turns_left: int
    tokens: bytearray = field(init=False)
    hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = bytearray(self.num_app_tokens)

    def extend(self, num_tokens: int) -> list[bytes]:
        """The hashes of the blocks of a prompt with so many new tokens."""
        self.tokens += bytes(num_tokens)
        hashes = self.hashes
        num_shared = self.num_app_tokens // BLOCK_SIZE
        for place in range(len(hashes), len(self.tokens) // BLOCK_SIZE):
            parent = hashes[-1] if hashes else NO_KEY.root
            own = -1 - self.app if place < num_shared else self.number
            hashes.append(hashlib.blake2b(parent + own.to_bytes(8, signed=True), digest_size=HASH_BYTES).digest())
        return hashes

    def forget(self) -> None:
        """Nothing follows: a million of them would take as much memory as the server's cache."""
        self.tokens, self.hashes = bytearray(), []


@dataclass(slots=True)
class Turn:
    """A request: its conversation, what is new in it, and how much it says. Times are the clock's, in seconds."""

    arrival: float
    is_first: bool
    conversation: Conversation
    num_new_tokens: int
    num_output_tokens: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    replica: int = -1
    first_token: float = math.nan
    end: float = math.nan


class Traffic:
    """Requests in the order of their arrival. The next turn of a conversation follows its answer, so it is known when that has ended."""

    def __init__(self, shape: Shape, conversations_per_second: float, seed: int) -> None:
        self.shape = shape
        self.rate = conversations_per_second
        self.random = random.Random(seed)
        weights = [1 / (rank + 1) ** shape.app_exponent for rank in range(shape.num_apps)]
        self._weights = list(accumulate(weights))
        self._app_tokens = [self._length(shape.mean_app_tokens) for _ in weights]
        self._number = shape.num_apps

    def _length(self, mean: float) -> int:
        sigma = self.shape.sigma
        return max(1, min(self.shape.max_tokens, int(self.random.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))

    def first_turns(self) -> Iterator[Turn]:
        """Poisson arrivals of conversations."""
        now = 0.0
        while True:
            now += self.random.expovariate(self.rate)
            app = self.random.choices(range(self.shape.num_apps), cum_weights=self._weights)[0]
            self._number += 1
            turns = 1 + int(math.log(1 - self.random.random()) / math.log(1 - 1 / self.shape.mean_turns))
            conversation = Conversation(self._number, app, self._app_tokens[app], turns - 1)
            yield self._turn(now, conversation, self.shape.mean_first_tokens, is_first=True)

    def next_turn(self, turn: Turn, now: float) -> Turn | None:
        """What follows an answer that has ended now."""
        conversation = turn.conversation
        if not conversation.num_turns_left or len(conversation.tokens) > self.shape.max_tokens:
            conversation.forget()
            return None
        conversation.num_turns_left -= 1
        think = self.random.expovariate(1 / self.shape.mean_think_seconds)
        return self._turn(now + think, conversation, self.shape.mean_next_tokens)

    def _turn(self, arrival: float, conversation: Conversation, mean_new: float, *, is_first: bool = False) -> Turn:
        return Turn(arrival, is_first, conversation, self._length(mean_new), self._length(self.shape.mean_output_tokens))


@dataclass(frozen=True, slots=True)
class Statistics:
    """What is published of a trace. `best_hit_rate` is that of one cache for all, without bounds."""

    mean_prompt: float
    mean_output: float
    best_hit_rate: float


PUBLISHED = Statistics(7590, 182, 0.5)  # arXiv:2407.00079, §4.2 and table 1


def statistics_of(shape: Shape, num_requests: int = 20_000, seed: int = 0) -> Statistics:
    """Of generated traffic whose answers take no time."""
    traffic = Traffic(shape, 1.0, seed)
    known: set[bytes] = set()
    num_prompt = num_output = num_cached = count = 0
    for first in traffic.first_turns():
        turn: Turn | None = first
        while turn is not None and count < num_requests:
            hashes = turn.conversation.extend(turn.num_new_tokens)
            num_cached += BLOCK_SIZE * next((place for place, value in enumerate(hashes) if value not in known), len(hashes))
            known.update(hashes)
            num_prompt += len(turn.conversation.tokens)
            num_output += turn.num_output_tokens
            turn.conversation.tokens += bytes(turn.num_output_tokens)
            count += 1
            turn = traffic.next_turn(turn, 0.0)
        if count >= num_requests:
            break
    return Statistics(num_prompt / count, num_output / count, num_cached / num_prompt)
