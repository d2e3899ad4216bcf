import json
import random
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec, Vocabulary
from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.outlines_core.backend import OutlinesCoreBackend, OutlinesCoreGrammar
from tests.plugins.grammars.grammar_walks import (
    FIRST_MERGE,
    MERGES,
    PERSON,
    SPECIAL,
    STOPS,
    VOCABULARY,
    accepts,
    allowed,
    compiled,
    patterns,
    schema_grammar,
    subjects,
)


def compiled_unless_large(pattern: str) -> OutlinesCoreGrammar:
    """A few patterns that are drawn are refused for the size of their index; whatever else is refused is a failure."""
    try:
        return compiled(GrammarKind.REGEX, pattern)
    except UnsupportedGrammar as refusal:
        assume("too large" not in str(refusal))
        raise


@settings(max_examples=150)
@given(patterns, st.lists(subjects, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_a_regex_accepts_exactly_what_fullmatch_does(pattern: str, texts: list[str], rng: random.Random) -> None:
    grammar = compiled_unless_large(pattern)
    for text in texts:
        assert accepts(grammar, text, rng) == bool(re.fullmatch(pattern, text)), (pattern, text)


@settings(max_examples=100)
@given(patterns, st.integers(0, 2**32))
def test_a_random_walk_ends_in_a_full_match(pattern: str, seed: int) -> None:
    rng = random.Random(seed)
    matcher = compiled_unless_large(pattern).matcher()
    text = b""
    for _ in range(40):
        token_id = rng.choice(sorted(allowed(matcher)))
        assert matcher.advance(token_id)
        if token_id in STOPS:
            assert re.fullmatch(pattern, text.decode())
            return
        text += VOCABULARY.token_bytes[token_id] or b""


def test_a_number_may_go_on_after_it_could_have_ended() -> None:
    matcher = compiled(GrammarKind.REGEX, r"[0-9]+(\.[0-9]+)?").matcher()
    assert matcher.advance(ord("1"))
    assert STOPS | {ord("."), ord("7")} <= allowed(matcher)


def test_names_in_characters_without_tokens_can_all_be_chosen() -> None:
    names = [f"{first}{second}" for first in "北上广深杭成" for second in "京海州圳都"] + ["乌鲁木齐"]
    assert len(names) == 31
    grammar = compiled(GrammarKind.CHOICE, json.dumps(names))
    enum = schema_grammar({"enum": names})
    rng = random.Random(0)
    for name in names:
        assert accepts(grammar, name, rng)
        assert accepts(enum, json.dumps(name, ensure_ascii=False), rng)
    assert not accepts(grammar, "北", rng)


def test_special_tokens_and_the_text_of_a_stop_token_never_match() -> None:
    matcher = schema_grammar({"type": "string"}).matcher()
    for text in ('"', "a", "字", "<end"):
        for byte in text.encode():
            assert matcher.advance(byte)
        assert not allowed(matcher) & {*SPECIAL, *STOPS}
        assert not any(matcher.advance(token_id) for token_id in (*SPECIAL, *STOPS))


def test_stop_tokens_are_masked_until_the_object_is_closed_and_then_only_they_remain() -> None:
    matcher = schema_grammar({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}).matcher()
    for byte in b'{"a": 12}':
        assert not allowed(matcher) & STOPS
        assert not matcher.finished
        assert matcher.advance(byte)
    assert matcher.finished
    assert allowed(matcher) == STOPS


def test_nothing_is_allowed_after_a_stop_token_until_it_is_taken_back() -> None:
    matcher = compiled(GrammarKind.REGEX, "a+").matcher()
    assert matcher.advance(ord("a"))
    before = allowed(matcher)
    assert matcher.advance(max(STOPS))
    assert matcher.finished
    assert allowed(matcher) == set()
    assert not matcher.advance(ord("a"))
    matcher.rollback(1)
    assert not matcher.finished
    assert allowed(matcher) == before


@pytest.mark.parametrize("seed", range(5))
def test_rollback_restores_every_mask(seed: int) -> None:
    rng = random.Random(seed)
    matcher = schema_grammar(PERSON).matcher()
    masks = []
    for _ in range(60):
        masks.append(allowed(matcher))
        assert matcher.advance(rng.choice(sorted(masks[-1] - STOPS)))
        if allowed(matcher) <= STOPS:
            break
    while masks:
        num_tokens = min(rng.randint(1, 7), len(masks))
        matcher.rollback(num_tokens)
        assert allowed(matcher) == masks[-num_tokens]
        del masks[-num_tokens:]


def test_forced_tokens_are_what_the_mask_leaves_and_change_nothing() -> None:
    matcher = compiled(GrammarKind.REGEX, "xyz(a|b)").matcher()
    assert matcher.forced_tokens() == [ord("x"), ord("y"), ord("z")]
    assert allowed(matcher) == {ord("x")}
    for token_id in matcher.forced_tokens():
        assert matcher.advance(token_id)
    assert matcher.forced_tokens() == []
    assert matcher.advance(ord("a"))
    assert matcher.finished
    assert matcher.forced_tokens() == []


def test_sequences_with_one_grammar_do_not_disturb_each_other() -> None:
    grammar = compiled(GrammarKind.REGEX, "a{3}")
    first, second = grammar.matcher(), grammar.matcher()
    assert first.advance(ord("a"))
    assert second.forced_tokens() == []  # "a" or "aa"
    assert first.advance(FIRST_MERGE + MERGES.index("aa"))
    assert first.finished
    assert not second.finished


def pair_of(name: str) -> dict[str, Any]:
    return {"type": "array", "prefixItems": [{"$ref": f"#/$defs/{name}"}] * 2, "minItems": 2, "maxItems": 2}


DOUBLING = {"$defs": {f"d{i}": pair_of(f"d{i + 1}") for i in range(30)} | {"d30": {"type": "null"}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.REGEX, ".*a.{20}"),
        (GrammarKind.REGEX, "(x{1000}){1000}"),
        (GrammarKind.REGEX, r"\w{1,400}"),
        (GrammarKind.REGEX, "(((a?){90}){90}){90}"),
        (GrammarKind.REGEX, "(" * 5000),
        (GrammarKind.REGEX, "a{999999999999}"),
        (GrammarKind.CHOICE, json.dumps([f"{i:020}" for i in range(20_000)])),
        (GrammarKind.JSON_SCHEMA, json.dumps({"enum": [f"{i:020}" for i in range(20_000)]})),
        (GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "maxLength": 10**6})),
        (GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "items": {"type": "integer"}, "maxItems": 10**5})),
        (GrammarKind.JSON_SCHEMA, "[" * 100_000),
        (GrammarKind.JSON_SCHEMA, '{"items":' * 90 + "{}" + "}" * 90),
        (GrammarKind.JSON_SCHEMA, json.dumps(DOUBLING)),
        (GrammarKind.JSON_OBJECT, ""),
    ],
)
def test_what_would_take_too_much_is_refused(kind: GrammarKind, text: str) -> None:
    # The bounds are for a real vocabulary: one of 49,152 tokens, here made of one merge many times over.
    vocabulary = Vocabulary((*VOCABULARY.token_bytes[:256], *([b"ab"] * 48_000)), 49_152, frozenset({49_000}), "large")
    with pytest.raises(UnsupportedGrammar) as caught:
        OutlinesCoreBackend(vocabulary).compile(GrammarSpec(kind, text, "guided"))
    assert caught.value.param is not None
    assert len(caught.value.message) < 300


def test_loading_the_plugin_imports_neither_outlines_nor_torch() -> None:
    program = (
        "import sys, penstock.plugins.grammars.outlines_core.backend as plugin;"
        "plugin.register_grammar_backends(lambda name, factory: print(name, factory.__name__));"
        "print(sorted({'torch', 'outlines', 'outlines_core', 'transformers'} & sys.modules.keys()))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines() == ["outlines_core OutlinesCoreBackend", "[]"]


def test_a_vocabulary_without_stop_tokens_or_without_the_needed_bytes_is_refused() -> None:
    spec = GrammarSpec(GrammarKind.CHOICE, '["é"]', "guided_choice")
    for vocabulary in (Vocabulary((b"a", None), 2, frozenset({1}), "no é"), Vocabulary((b"\xc3", b"\xa9"), 2, frozenset(), "no end")):
        with pytest.raises(UnsupportedGrammar) as caught:
            OutlinesCoreBackend(vocabulary).compile(spec)
        assert caught.value.param == "guided_choice"


def test_tokens_beyond_the_logits_are_left_out() -> None:
    vocabulary = Vocabulary((b"a", None, b"b", b"b"), 3, frozenset({1, 7}), "narrow")
    matcher = OutlinesCoreBackend(vocabulary).compile(GrammarSpec(GrammarKind.REGEX, "a|b")).matcher()
    row = torch.zeros(1, dtype=torch.int32)
    matcher.fill_bitmask(row)
    assert row.tolist() == [0b101]
    assert matcher.advance(2)
    matcher.fill_bitmask(row)
    assert row.tolist() == [0b010]
