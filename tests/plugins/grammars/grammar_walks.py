"""Walks through grammars over a small vocabulary: every byte, a few merges, two special tokens and two that end an answer."""

import json
import random
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st

from penstock.engine.contracts.grammar import CompiledGrammar, GrammarKind, GrammarMatcher, GrammarSpec, Vocabulary
from penstock.plugins.grammars.outlines_core.backend import OutlinesCoreBackend, OutlinesCoreGrammar

MERGES = (
    "ab",
    "abc",
    "aa",
    "bc",
    '"a',
    '":',
    '": "',
    '",',
    '"}',
    "{\n",
    "  ",
    "    ",
    "\n  ",
    "12",
    "0.",
    "true",
    "null",
    "字",
    "中文",
    "é",
    "12\n",
    "a\0",
)
FIRST_MERGE = 256
SPECIAL = (FIRST_MERGE + len(MERGES), FIRST_MERGE + len(MERGES) + 1)
STOPS = frozenset({SPECIAL[1], SPECIAL[1] + 1})
SIZE = 300  # wider than the tokens, and no multiple of 32
VOCABULARY = Vocabulary(
    (*(bytes([byte]) for byte in range(256)), *(text.encode() for text in MERGES), None, None, b"<end>"), SIZE, STOPS, "bytes and merges"
)
BACKEND = OutlinesCoreBackend(VOCABULARY)
TEXT_TOKENS = [
    (token_id, text) for token_id, text in enumerate(VOCABULARY.token_bytes) if text and token_id not in STOPS and b"\0" not in text
]


def compiled(kind: GrammarKind, text: str, **options: Any) -> OutlinesCoreGrammar:
    return BACKEND.compile(GrammarSpec(kind, text, **options))


def schema_grammar(schema: Any, **options: Any) -> OutlinesCoreGrammar:
    return compiled(GrammarKind.JSON_SCHEMA, json.dumps(schema), **options)


def allowed(matcher: GrammarMatcher) -> set[int]:
    row = torch.full(((SIZE + 31) // 32,), -1, dtype=torch.int32)
    matcher.fill_bitmask(row)
    return {word * 32 + bit for word, packed in enumerate(row.tolist()) if packed for bit in range(32) if packed >> bit & 1}


def check_forks(matcher: Any, seed: int = 0) -> None:
    """Forks on the way of a random walk stay where they were, and can go another way."""
    rng = random.Random(seed)
    forks = []
    for _ in range(20):
        mask = allowed(matcher)
        if mask <= STOPS:
            break
        forks.append((matcher.fork(), mask))
        assert matcher.advance(rng.choice(sorted(mask - STOPS)))
    for fork, mask in forks:
        assert allowed(fork) == mask
        ways = sorted(mask - STOPS)
        others = [fork.fork() for _ in ways[:5]]
        for other, token_id in zip(others, ways[:5], strict=True):
            assert other.advance(token_id)
        assert allowed(fork) == mask
        for other, token_id in zip(others, ways[:5], strict=True):
            other.rollback(1)
            assert allowed(other) == mask, token_id


def tokenized(text: str, rng: random.Random) -> Iterator[int]:
    """One of the many ways to spell a text."""
    rest = text.encode()
    while rest:
        token_id, token = rng.choice([(token_id, token) for token_id, token in TEXT_TOKENS if rest.startswith(token)])
        yield token_id
        rest = rest[len(token) :]


def accepts(grammar: CompiledGrammar, text: str, rng: random.Random) -> bool:
    """Walks a text token by token; at each step the mask, `advance` and what may end must agree."""
    matcher = grammar.matcher()
    for token_id in tokenized(text, rng):
        is_allowed = token_id in allowed(matcher)
        assert matcher.advance(token_id) == is_allowed
        if not is_allowed:
            return False
    stops = allowed(matcher) & STOPS
    assert stops in (set(), STOPS)
    return bool(stops)


def random_answer(grammar: CompiledGrammar, rng: random.Random, patience: int = 30) -> str:
    """A random walk over what is allowed, which after `patience` tokens leans towards what closes something."""
    matcher = grammar.matcher()
    text = b""
    for step in range(3000):
        choices = sorted(allowed(matcher))
        assert choices, f"dead end after {text!r}"
        if step > patience and rng.random() < 0.7:
            for closing in (STOPS, {ord('"')}, {ord("}"), ord("]")}):
                if closing & set(choices):
                    choices = sorted(closing & set(choices))
                    break
        token_id = rng.choice(choices)
        assert matcher.advance(token_id)
        if token_id in STOPS:
            return text.decode()
        text += VOCABULARY.token_bytes[token_id] or b""
    raise AssertionError(f"no end in sight: {text[:200]!r}")


PERSON: dict[str, Any] = {
    "title": "Person",
    "type": "object",
    "$defs": {
        "Address": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 5}, "zip": {"type": "string", "pattern": r"^\d{3}$"}},
            "required": ["city"],
        }
    },
    "properties": {
        "name": {"type": "string", "minLength": 1, "description": "given name"},
        "age": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        "kind": {"enum": ["a", "b\n", 3, None], "title": "Kind"},
        "addresses": {"type": "array", "items": {"$ref": "#/$defs/Address"}, "maxItems": 2},
        "score": {"type": ["number", "boolean"]},
        "pair": {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": "x"}], "minItems": 2, "maxItems": 2},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
atoms = st.sampled_from(["a", "b", "c", ".", "[ab]", "[^a]", r"\d", r"\w", r"\s", "é", "字", "[^\\W\\d]", '"', "1", r"\."])
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: "(?:" + "|".join(parts) + ")"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "{,2}"])).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)
subjects = st.text(st.sampled_from('aaabbc1字é". \n²'), max_size=8)
