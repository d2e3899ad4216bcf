"""Exact sampling: answers drawn from the model's distribution given that they are valid, by adaptive rejection over a trie.

A mask renormalises at each token what it leaves, so that answers come with other probabilities than P(x | x valid): an answer that begins
with likely tokens and can then only go on with unlikely ones comes too often. Rejection sampling is exact: draw x from P, keep it if it is
valid. Constrained Adaptive Rejection Sampling (CARS, arXiv:2510.01902) rejects ever less often without losing that: what is known to be
invalid is recorded in a trie, and its probability is taken from the proposal. This is that method, with one rule for all rejections.

Let u be a prefix, p(t | u) the probability of the token t after it under the request's own parameters, and P(x) the product of these over
an answer x, its stop token included. Each node u of the trie has a weight w(u), an upper bound of the probability that a valid answer
comes out of u:

    w(u) = 1                               while u has not been computed,
    w(u) = sum of p(t | u) w(ut)           over the tokens that the mask allows after u, once it has been; a stop token has the weight 1,
                                           and a token after which the length limit leaves no room for a stop token the weight 0.

A draw begins at the root with a = w(root). At a node u it goes on to the child ut with probability p(t | u) w(ut) / a and is rejected with
the rest, 1 - w(u) / a; then a becomes w(ut), as it was at that moment. It is accepted at a stop token. All of it takes one uniform
number in [0, a): beyond w(u) it is a rejection. Where nothing has changed since the parent was left, a = w(u) and nothing is rejected. At
a new node a = 1, and the draw survives with the probability that the mask leaves: as if a token had been drawn without the mask and had
been found forbidden. And where other draws have lowered w(u) in between, a > w(u) makes up for that.

Each accepted answer has the distribution P(x | valid). The probabilities along the path of a valid x multiply to P(x) / w(root), with
w(root) as it was when the draw began: each w(ut) in a numerator is the a in the next denominator, whatever has happened to the trie
meanwhile, and a stop token's is 1. So x comes with a probability that is proportional to P(x), and a rejected draw is followed by another
one of which the same holds.

This allows any number of draws at once over one trie, and gives n independent answers. For the answer x that is to come of a slot, let h be
P(x | valid) between draws, and ([u begins x] P(x | u) + (a - V(u)) P(x | valid)) / a at a node u, where V(u) is the true probability of a
valid answer out of u. Each h is a martingale with respect to all that happens, and does not change when another draw moves, nor when a
weight does. So the product of those of several slots is one, too, and the answers (x, y, ...) come with the probability
P(x | valid) P(y | valid) ... This holds for answers that are all waited for. Where the caller gives up on some, those that have come until
then are the ones that came sooner.

A node keeps its most probable tokens alone, `HEAD` of them. For the others the probability of all of them together is enough to say that a
draw goes on with one of them. Only then is the node computed again, and the one chosen. So draws over what has been computed need no
model at all, and nodes stay small. A trie is bounded by `max_bytes`: once it is full, new nodes belong to their draw alone, which stays
exact and teaches the trie nothing.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.engine.sampling.distribution import Distribution

HEAD = 256
MAX_BYTES = 2**25  # of one request
NODE_BYTES = 600  # of one without its arrays
IN_TAIL = -1


class Node:
    """A prefix of answers. `place` is its place among its parent's most probable tokens, or `IN_TAIL`.

    Once it is computed, its `token_ids` are the most probable of those that may come next, at least as probable as any that is left out,
    with their `probs` and the `weights` of the nodes behind them; `tail_mass` is the probability of those left out, and `tail_lost` what
    the nodes behind these have lost of it. `weight` is w of the module's docstring. The tail's own tokens are there, in `tail`, from when
    the node is computed until `Trie.forget_tails`. `has_rejected` says that a draw has ended here.
    """

    __slots__ = (
        "_cumulative",
        "_tail_cumulative",
        "children",
        "depth",
        "has_rejected",
        "is_kept",
        "parent",
        "place",
        "probability",
        "probs",
        "tail",
        "tail_lost",
        "tail_mass",
        "token_id",
        "token_ids",
        "weight",
        "weights",
    )

    def __init__(self, parent: "Node | None", token_id: int, place: int, probability: float, *, is_kept: bool) -> None:
        self.parent = parent
        self.token_id = token_id
        self.place = place
        self.probability = probability
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.is_kept = is_kept
        self.has_rejected = False
        self.weight = 1.0
        self.token_ids: NDArray[np.int64] | None = None
        self.probs: NDArray[np.float64] = _NONE
        self.weights: NDArray[np.float64] = _NONE
        self.tail_mass = 0.0
        self.tail_lost = 0.0
        self.tail: Distribution | None = None
        self.children: dict[int, Node] = {}
        self._cumulative: NDArray[np.float64] | None = None
        self._tail_cumulative: NDArray[np.float64] | None = None

    @property
    def is_computed(self) -> bool:
        return self.token_ids is not None

    @property
    def path(self) -> list[int]:
        """The tokens from the root."""
        tokens: list[int] = []
        node = self
        while node.parent is not None:
            tokens.append(node.token_id)
            node = node.parent
        return tokens[::-1]

    @property
    def cumulative(self) -> NDArray[np.float64]:
        """The running sum of the probabilities of its most probable tokens times their weights."""
        if self._cumulative is None:
            self._cumulative = np.cumsum(self.probs * self.weights)
        return self._cumulative

    @property
    def head_weight(self) -> float:
        return float(self.cumulative[-1]) if len(self.cumulative) else 0.0

    @property
    def tail_weight(self) -> float:
        """That of all of the tail's tokens. What is lost of it is added up as it is lost: the nodes behind them may be thousands."""
        return max(0.0, self.tail_mass - self.tail_lost)

    @property
    def tail_cumulative(self) -> NDArray[np.float64]:
        """The running sum of the probabilities of the tokens in `tail` times their weights."""
        assert self.tail is not None
        if self._tail_cumulative is None:
            weighted = self.tail.probs.copy()
            known = [child for child in self.children.values() if child.place == IN_TAIL]
            ids, weights = np.array([child.token_id for child in known], np.int64), np.array([child.weight for child in known])
            _, places, own = np.intersect1d(self.tail.token_ids, ids, assume_unique=True, return_indices=True)
            weighted[places] *= weights[own]
            self._tail_cumulative = np.cumsum(weighted)
        return self._tail_cumulative

    def set_tail(self, tail: Distribution | None) -> None:
        """Keeps the tail's own tokens, by ascending id, or drops them."""
        self.tail, self._tail_cumulative = tail, None

    def weigh(self) -> float:
        """Finds its weight out anew; returns by how much it is less than it was."""
        before = self.weight
        self._cumulative = self._tail_cumulative = None
        self.weight = self.head_weight + self.tail_weight
        return before - self.weight


_NONE: NDArray[np.float64] = np.empty(0)


class Outcome(enum.Enum):
    """What one move of a draw came to."""

    MOVED = "moved"  # to another node, or into the tail of this one
    REJECTED = "rejected"
    ACCEPTED = "accepted"  # at a stop token
    CUT = "cut"  # by the length limit, where answers are not drawn exactly


@dataclass(slots=True)
class Draw:
    """A draw in progress. `assumed` is the weight of its node, or `in_tail` that of the node's tail, when it was chosen.

    `last_token_id` is the one that ended it.
    """

    node: Node
    assumed: float
    in_tail: bool = False
    last_token_id: int | None = None

    @property
    def needs_model(self) -> bool:
        """Whether its node has to be computed, perhaps again, before it can move."""
        return not self.node.is_computed or (self.in_tail and self.node.tail is None)


def _most_probable(probs: NDArray[np.float64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The places of the `HEAD` most probable tokens, those first, and of all others in their order. Nothing else is sorted."""
    if len(probs) <= HEAD:
        return np.argsort(-probs, kind="stable"), np.empty(0, np.intp)
    head = np.sort(np.argpartition(-probs, HEAD - 1)[:HEAD])
    rest = np.ones(len(probs), bool)
    rest[head] = False
    return head[np.argsort(-probs[head], kind="stable")], np.flatnonzero(rest)


class Trie:
    """What is known of one prompt's answers under one constraint. `max_tokens` bounds an answer with its stop token.

    One that does not adapt (`is_exact` false) draws as masks do, from what each leaves, and rejects nothing; there the stop token may be
    beyond `max_tokens`, where an answer is cut.
    """

    def __init__(self, stop_token_ids: frozenset[int], max_tokens: int, *, is_exact: bool = True, max_bytes: int = MAX_BYTES) -> None:
        self.stop_token_ids = stop_token_ids
        self.max_tokens = max_tokens
        self.is_exact = is_exact
        self.max_bytes = max_bytes
        self.num_bytes = NODE_BYTES
        self.root = Node(None, -1, IN_TAIL, 1.0, is_kept=True)
        self._with_tails: list[Node] = []

    @property
    def is_dead(self) -> bool:
        """Whether no valid answer has any probability."""
        return self.is_exact and self.root.is_computed and self.root.weight <= 0

    @property
    def is_full(self) -> bool:
        return self.num_bytes >= self.max_bytes

    def begin(self) -> Draw:
        return Draw(self.root, self.root.weight)

    def take(self, node: Node, found: Distribution) -> None:
        """The node has been computed, perhaps again. `found` is what may come next."""
        token_ids, probs = found.token_ids, found.probs
        if self.is_exact and node.depth + 1 >= self.max_tokens:
            ends = np.isin(token_ids, list(self.stop_token_ids))
            token_ids, probs = token_ids[ends], probs[ends]
        if node.token_ids is not None:
            rest = ~np.isin(token_ids, node.token_ids)
            self._keep_tail(node, token_ids[rest], probs[rest])
            return
        head, tail = _most_probable(probs)
        node.token_ids, node.probs, node.weights = token_ids[head], probs[head], np.ones(len(head))
        node.tail_mass = float(probs[tail].sum())
        if len(tail):
            self._keep_tail(node, token_ids[tail], probs[tail])
        if node.is_kept:
            self.num_bytes += node.token_ids.nbytes + 3 * node.probs.nbytes
        self._tell_parents(node, node.weigh())

    def move(self, draw: Draw, uniform: Callable[[], float]) -> Outcome:
        """Moves a draw that does not need the model. `uniform` gives numbers in [0, 1)."""
        node = draw.node
        assert node.token_ids is not None
        if draw.in_tail:
            return self._move_from_tail(draw, uniform())
        weight = node.weight
        if not self.is_exact:
            draw.assumed = weight
        at = uniform() * draw.assumed
        if at >= weight:
            return Outcome.REJECTED
        place = int(np.searchsorted(node.cumulative, at, side="right"))
        if place < len(node.token_ids):
            return self._move_to(draw, int(node.token_ids[place]), place, float(node.probs[place]), float(node.weights[place]))
        draw.in_tail, draw.assumed = True, node.tail_weight
        if draw.assumed > 0:
            return Outcome.MOVED
        # Rounding alone leads here, beyond the sum of a head without a tail.
        draw.in_tail, draw.assumed = False, weight
        return Outcome.MOVED

    def forget_tails(self) -> None:
        """Drops what nodes keep beyond their most probable tokens. A draw that is still to choose among it has its node computed again."""
        for node in self._with_tails:
            node.set_tail(None)
        self._with_tails.clear()

    def check_integrity(self) -> None:
        """Asserts that each weight is what those below make it. For tests."""
        nodes = [self.root]
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            if node.token_ids is None:
                assert node.weight == 1
                assert not node.children
                continue
            for child in node.children.values():
                assert child.parent is node
                assert child.place == IN_TAIL or not self.is_exact or node.weights[child.place] == child.weight
            assert abs(node.weight - float((node.probs * node.weights).sum()) - node.tail_weight) < 1e-9
            in_tail = [child for child in node.children.values() if child.place == IN_TAIL] if self.is_exact else []
            assert abs(node.tail_lost - sum(child.probability * (1 - child.weight) for child in in_tail)) < 1e-9
            assert -1e-9 <= node.weight <= 1 + 1e-6

    def _move_from_tail(self, draw: Draw, uniform: float) -> Outcome:
        node, tail = draw.node, draw.node.tail
        assert tail is not None
        place = int(np.searchsorted(node.tail_cumulative, uniform * draw.assumed, side="right"))
        draw.in_tail = False
        if place == len(tail.probs):
            if self.is_exact:
                return Outcome.REJECTED
            place -= 1  # rounding alone
        token_id = int(tail.token_ids[place])
        known = node.children.get(token_id)
        return self._move_to(draw, token_id, IN_TAIL, float(tail.probs[place]), 1.0 if known is None else known.weight)

    def _move_to(self, draw: Draw, token_id: int, place: int, probability: float, weight: float) -> Outcome:
        node = draw.node
        if token_id in self.stop_token_ids:
            draw.last_token_id = token_id
            return Outcome.ACCEPTED
        child = node.children.get(token_id)
        if child is None:
            is_kept = node.is_kept and not self.is_full
            child = Node(node, token_id, place, probability, is_kept=is_kept)
            if is_kept:
                node.children[token_id] = child
                self.num_bytes += NODE_BYTES
        draw.node, draw.assumed = child, weight
        if child.depth >= self.max_tokens:
            assert not self.is_exact, "no room for a stop token"
            return Outcome.CUT
        return Outcome.MOVED

    def _keep_tail(self, node: Node, token_ids: NDArray[np.int64], probs: NDArray[np.float64]) -> None:
        node.set_tail(Distribution(token_ids, probs))
        self._with_tails.append(node)

    def _tell_parents(self, node: Node, lost: float) -> None:
        while self.is_exact and node.is_kept and (parent := node.parent) is not None:
            if node.place == IN_TAIL:
                parent.tail_lost += node.probability * lost
            else:
                parent.weights[node.place] = node.weight
            lost = parent.weigh()
            node = parent
