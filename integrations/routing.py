"""Which of several replicas answers a request: by the longest beginning of its prompt that a replica has in its cache, and by load.

It does not depend on Ray: `benchmarks/simulate.py` drives the same code as a deployment.
"""

import random
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, get_args

import msgspec

Replica = TypeVar("Replica", bound=Hashable)
RoutingName = Literal["prefix", "least-loaded", "round-robin", "random"]
ROUTING_NAMES: tuple[RoutingName, ...] = get_args(RoutingName)

CHUNK_BYTES = 256  # of a prompt's text: some 64 tokens, or four blocks of the KV cache
MAX_CHUNKS = 256  # what two prompts of 64 KiB share is not told apart beyond that
CAPACITY = 200_000  # prefixes that are remembered; each takes some 400 bytes
BALANCE = 1.25  # a replica has at most this multiple of the mean load, as in "Consistent Hashing with Bounded Loads" (arXiv:1608.01350)
SLACK = 4  # and this many requests more, below which loads are not told apart


def prefix_hashes(text: bytes, salt: Hashable = None, chunk_bytes: int = CHUNK_BYTES) -> tuple[int, ...]:
    """One hash for each whole chunk of the text together with all before it. They hold within this process alone.

    `salt` has whatever else must be equal for a cache to be of use, such as the adapter.
    """
    hashes = []
    value = hash(salt)
    for start in range(0, min(len(text) - chunk_bytes + 1, MAX_CHUNKS * chunk_bytes), chunk_bytes):
        value = hash((value, text[start : start + chunk_bytes]))
        hashes.append(value)
    return tuple(hashes)


class Router(ABC, Generic[Replica]):
    """Chooses among the replicas of `loads`, which has the requests that each is answering; there is at least one."""

    @abstractmethod
    def choose(self, prefixes: Sequence[int], loads: Mapping[Replica, int]) -> Replica:
        """`prefixes` are the prompt's `prefix_hashes`, or those of its blocks, the shortest first."""

    def routed(self, prefixes: Sequence[int], replica: Replica) -> None:
        """Notes that a replica has got this prompt. It need not be the one that was chosen, which may have refused it."""

    def forget(self, replica: Replica) -> None:
        """Notes that a replica is gone, with all that it had in its cache."""


class RandomRouter(Router[Replica]):
    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, prefixes: Sequence[int], loads: Mapping[Replica, int]) -> Replica:
        return self._random.choice(list(loads))


class RoundRobinRouter(Router[Replica]):
    def __init__(self) -> None:
        self._turn = -1

    def choose(self, prefixes: Sequence[int], loads: Mapping[Replica, int]) -> Replica:
        self._turn += 1
        return list(loads)[self._turn % len(loads)]


class LeastLoadedRouter(Router[Replica]):
    """Of several with equal loads one at random: the first would get all of a quiet hour."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, prefixes: Sequence[int], loads: Mapping[Replica, int]) -> Replica:
        least = min(loads.values())
        return self._random.choice([replica for replica, load in loads.items() if load == least])


class PrefixAffinityRouter(Router[Replica]):
    """The replica that got the longest beginning of this prompt before, unless it has much more to do than the others.

    Then the one with the next shorter beginning, and at last the least loaded. What replicas have in their caches is guessed from what they
    were sent: the least recently used prefixes are forgotten, as the caches evict them. Compare Preble (arXiv:2407.00023).
    """

    def __init__(self, capacity: int = CAPACITY, balance: float = BALANCE, slack: int = SLACK, seed: int | None = None) -> None:
        self._capacity = capacity
        self._balance = balance
        self._slack = slack
        self._fallback = LeastLoadedRouter[Replica](seed)
        self._replicas_of: OrderedDict[int, dict[Replica, None]] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """How many prefixes are remembered."""
        return len(self._replicas_of)

    def choose(self, prefixes: Sequence[int], loads: Mapping[Replica, int]) -> Replica:
        most = self._balance * sum(loads.values()) / len(loads) + self._slack
        for prefix in reversed(prefixes):
            known = [replica for replica in self._replicas_of.get(prefix, ()) if loads.get(replica, most) < most]
            if known:
                return min(known, key=loads.__getitem__)
        return self._fallback.choose(prefixes, loads)

    def routed(self, prefixes: Sequence[int], replica: Replica) -> None:
        # The longest first, so that the shortest is the most recently used: it is what more prompts share.
        for prefix in reversed(prefixes):
            self._replicas_of.setdefault(prefix, {})[replica] = None
            self._replicas_of.move_to_end(prefix)
        while len(self._replicas_of) > self._capacity:
            self._replicas_of.popitem(last=False)

    def forget(self, replica: Replica) -> None:
        for prefix, replicas in list(self._replicas_of.items()):
            replicas.pop(replica, None)
            if not replicas:
                del self._replicas_of[prefix]


def build_router(name: RoutingName, seed: int | None = None, *, capacity: int = CAPACITY) -> Router[Replica]:
    """`capacity` is that of a `PrefixAffinityRouter`."""
    match name:
        case "prefix":
            return PrefixAffinityRouter(capacity, seed=seed)
        case "least-loaded":
            return LeastLoadedRouter(seed)
        case "round-robin":
            return RoundRobinRouter()
        case "random":
            return RandomRouter(seed)


class PromptFields(msgspec.Struct):
    """The fields of any body of the API that a prompt is made of, in the order in which templates have them, and the model's name."""

    model: str | msgspec.Raw = ""
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()

    @classmethod
    def of(cls, body: bytes) -> "PromptFields":
        """Without any where the body is not JSON: its error is the replica's to report."""
        try:
            return msgspec.json.decode(body, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return cls()

    @property
    def model_name(self) -> str:
        return self.model if isinstance(self.model, str) else ""

    def prefixes(self) -> "Prefixes":
        text = b"".join((self.tools, self.system, self.instructions, self.messages, self.prompt, self.input))
        return Prefixes(prefix_hashes(text, salt=self.model_name))


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The `prefix_hashes` of a prompt, for the router of the handle that gets them as an argument. No other process can use them.

    Not in the router's module, which Serve pickles by value: the class would be another one in the router than in the ingress.
    """

    hashes: tuple[int, ...] = ()

    def __reduce__(self) -> Any:
        return (Prefixes, ())
