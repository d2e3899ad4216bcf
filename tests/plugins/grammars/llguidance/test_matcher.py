import itertools
import json
import random
import time
from dataclasses import replace

import pytest
import torch

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec, Vocabulary
from penstock.engine.errors import ConstraintTooLarge, UnsupportedGrammar
from penstock.plugins.grammars.llguidance import matcher as llguidance_matcher
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.plugins.grammars.llguidance.matcher import MAX_SPELLED, LlguidanceGrammar, LlguidanceMatcher, MatcherFailed
from tests.plugins.grammars.grammar_walks import PERSON, SIZE, SPECIAL, STOPS, VOCABULARY, allowed

STOP = min(STOPS)
DEMANDING = {**PERSON, "properties": {**PERSON["properties"], "name": {"type": "string", "pattern": "^[a-z]+$"}}}  # whose tokens are timed
TEXTS = {token_id: text for token_id, text in enumerate(VOCABULARY.token_bytes) if text and token_id not in STOPS}


def longest_tokens(text: str) -> list[int]:
    """A tokenizer for the small vocabulary."""
    token_ids = []
    data = text.encode()
    while data:
        token_id = max((token_id for token_id in TEXTS if data.startswith(TEXTS[token_id])), key=lambda token_id: len(TEXTS[token_id]))
        token_ids.append(token_id)
        data = data[len(TEXTS[token_id]) :]
    return token_ids


def with_encode(vocabulary: Vocabulary) -> Vocabulary:
    return replace(vocabulary, encode=longest_tokens)


BACKEND = LlguidanceBackend(with_encode(VOCABULARY))


def schema_grammar(schema: object) -> LlguidanceGrammar:
    return BACKEND.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


def regex_matcher(pattern: str) -> LlguidanceMatcher:
    return BACKEND.compile(GrammarSpec(GrammarKind.REGEX, pattern)).matcher()


def walked(grammar: LlguidanceGrammar, text: str) -> LlguidanceMatcher:
    matcher = grammar.matcher()
    for token_id in longest_tokens(text):
        assert matcher.advance(token_id)
    return matcher


def test_every_stop_token_is_masked_until_the_answer_may_end() -> None:
    matcher = walked(schema_grammar(PERSON), '{"name": "a", "kind": 3')
    assert not allowed(matcher) & STOPS
    assert not any(matcher.advance(stop) for stop in STOPS)
    assert matcher.advance(ord("}"))
    assert allowed(matcher) == STOPS
    assert matcher.finished


def test_after_a_stop_token_nothing_is_allowed() -> None:
    for stop in STOPS:
        matcher = regex_matcher("a+")
        assert matcher.advance(ord("a"))
        assert matcher.advance(stop)
        assert matcher.finished
        assert allowed(matcher) == set()
        assert not matcher.advance(ord("a"))
        assert not matcher.advance(stop)
        assert matcher.forced_tokens() == []


def test_an_answer_that_may_end_or_go_on_is_not_finished() -> None:
    matcher = regex_matcher("a+b?")
    assert not matcher.finished
    assert matcher.advance(ord("a"))
    assert not matcher.finished
    assert STOPS | {ord("a"), ord("b")} <= allowed(matcher)
    assert matcher.advance(ord("b"))
    assert matcher.finished


def test_an_empty_answer_is_finished_at_once() -> None:
    matcher = regex_matcher("")
    assert matcher.finished
    assert allowed(matcher) == STOPS
    assert matcher.advance(STOP)


def test_masks_are_the_same_after_a_rollback() -> None:
    matcher = schema_grammar(PERSON).matcher()
    rng = random.Random(3)
    masks = []
    tokens = []
    for _ in range(25):
        masks.append(allowed(matcher))
        tokens.append(rng.choice(sorted(masks[-1])))
        assert matcher.advance(tokens[-1])
    matcher.rollback(19)
    for mask, token_id in zip(masks[6:], tokens[6:], strict=True):
        assert allowed(matcher) == mask
        assert matcher.advance(token_id)


def test_a_stop_token_is_one_of_those_taken_back() -> None:
    grammar = schema_grammar({"enum": ["ab", "ac"]})
    matcher = walked(grammar, '"ab"')
    assert matcher.advance(STOP)
    matcher.rollback(1)
    assert allowed(matcher) == STOPS
    assert matcher.advance(max(STOPS))
    matcher.rollback(3)
    assert matcher.advance(ord("c")) or matcher.advance(ord("b"))
    matcher.rollback(0)
    fresh = walked(regex_grammar("aa|ab"), "a")
    assert fresh.advance(ord("b"))
    assert fresh.advance(STOP)
    fresh.rollback(2)
    assert fresh.advance(ord("a"))


def regex_grammar(pattern: str) -> LlguidanceGrammar:
    return BACKEND.compile(GrammarSpec(GrammarKind.REGEX, pattern))


def test_a_forbidden_token_leaves_the_state_as_it_was() -> None:
    matcher = walked(schema_grammar(PERSON), '{"name": "a')
    before = allowed(matcher)
    for token_id in (*SPECIAL, STOP, SIZE - 1, SIZE, SIZE + 1000, ord("\n")):
        assert not matcher.advance(token_id)
        assert allowed(matcher) == before
    assert matcher.advance(ord('"'))


def test_each_forced_token_is_the_only_one_allowed() -> None:
    matcher = schema_grammar({"type": "object", "properties": {"abc": {"const": "12 字"}}, "required": ["abc"]}).matcher()
    num_forced = 0
    while not matcher.finished:
        before = allowed(matcher)
        forced = matcher.forced_tokens()
        assert allowed(matcher) == before
        num_forced += len(forced)
        for token_id in forced:
            assert allowed(matcher) == {token_id}
            assert matcher.advance(token_id)
        if not forced and not matcher.finished:
            assert matcher.advance(min(allowed(matcher) & {ord(character) for character in '":}{'}))
    assert num_forced >= 4
    assert allowed(matcher) == STOPS


@pytest.mark.parametrize("has_encode", [False, True])
def test_a_choice_is_left_where_neither_the_end_nor_a_token_must_follow(has_encode: bool) -> None:
    vocabulary = with_encode(VOCABULARY) if has_encode else VOCABULARY
    grammar = LlguidanceBackend(vocabulary).compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)))
    rng, choices = random.Random(3), []
    for _ in range(20):
        matcher = grammar.matcher()
        for _ in range(60):
            before = allowed(matcher)
            must = matcher.finished or bool(matcher.forced_tokens())
            has_choice = matcher.has_choice
            assert not (must and has_choice)
            assert allowed(matcher) == before
            if not must and not has_choice:  # where the answer may end, it is left open
                assert before & STOPS or has_encode
            choices.append(has_choice)
            token_id = rng.choice(sorted(before))
            assert matcher.advance(token_id)
            if token_id in STOPS:
                assert not matcher.has_choice
                break
    assert choices.count(True) > len(choices) / 3


def test_all_of_an_object_up_to_its_first_value_is_forced() -> None:
    """No white space could stand in it."""
    schema = {"type": "object", "properties": {"abc": {"type": "integer"}}, "required": ["abc"], "additionalProperties": False}
    forced = schema_grammar(schema).matcher().forced_tokens()
    assert b"".join(TEXTS[token_id] for token_id in forced) == b'{"abc'  # '":' could be the beginning of '": "'


def test_nothing_is_forced_without_the_tokenizer() -> None:
    matcher = LlguidanceBackend(VOCABULARY).compile(GrammarSpec(GrammarKind.CHOICE, '["abc"]')).matcher()
    assert matcher.forced_tokens() == []
    assert allowed(matcher) == {token_id for token_id, text in TEXTS.items() if b"abc".startswith(text)}


def test_a_tokenizer_that_spells_text_with_added_tokens_is_not_believed() -> None:
    def wrong(text: str) -> list[int]:
        return [SPECIAL[0] if token_id == ord("<") else token_id for token_id in longest_tokens(text)]

    matcher = LlguidanceBackend(replace(VOCABULARY, encode=wrong)).compile(GrammarSpec(GrammarKind.CHOICE, '["<ab>"]')).matcher()
    forced = matcher.forced_tokens()
    assert b"".join(TEXTS[token_id] for token_id in forced) == b"<ab>"


def test_tokens_that_what_may_follow_would_change_are_not_forced() -> None:
    """As SmolLM2's tokenizer writes `"}}` in `"` and `}}`, but `"}},` in `"}` and `},`."""

    def encode(text: str) -> list[int]:
        return longest_tokens(text) if text == "ab" else [token for character in text for token in longest_tokens(character)]

    backend = LlguidanceBackend(replace(VOCABULARY, encode=encode))
    open_end = backend.compile(GrammarSpec(GrammarKind.CHOICE, '["ab}", "ab]"]')).matcher()
    assert open_end.forced_tokens() == []
    assert {TEXTS[token_id] for token_id in allowed(open_end)} == {b"a", b"ab"}


def test_a_tokenizer_that_puts_a_space_first_is_understood() -> None:
    def spaced(text: str) -> list[int]:
        return [ord(" "), *longest_tokens(text)]

    matcher = LlguidanceBackend(replace(VOCABULARY, encode=spaced)).compile(GrammarSpec(GrammarKind.CHOICE, '["abc"]')).matcher()
    assert matcher.forced_tokens() == longest_tokens("abc")


def test_a_long_text_is_forced_part_by_part_and_spelled_no_further_than_needed() -> None:
    lengths: list[int] = []

    def noted(text: str) -> list[int]:
        lengths.append(len(text))
        return longest_tokens(text)

    text = "abc " * 500
    backend = LlguidanceBackend(replace(VOCABULARY, encode=noted))
    matcher = backend.compile(GrammarSpec(GrammarKind.CHOICE, json.dumps([text]))).matcher()
    spelled: list[int] = []
    while forced := matcher.forced_tokens():
        for token_id in forced:
            assert allowed(matcher) == {token_id}
            assert matcher.advance(token_id)
        spelled += forced
    whole = longest_tokens(text)
    assert spelled == whole[: len(spelled)]
    assert len(spelled) >= len(whole) - 2  # how the end is spelled could depend on what follows
    assert max(lengths) <= MAX_SPELLED + 1


def test_sequences_do_not_see_each_other() -> None:
    grammar = schema_grammar(PERSON)
    first = walked(grammar, '{"name": "a"')
    second = grammar.matcher()
    start = allowed(second)
    third = walked(grammar, '{"name": "a"')
    assert first.advance(ord(","))
    assert allowed(second) == start
    assert allowed(third) != allowed(first)


def test_a_grammar_that_runs_out_of_budget_in_mid_stream_raises() -> None:
    grammar = regex_grammar(r"((\w+ ?){1,300}){1,300}")
    matcher = grammar.matcher()
    row = torch.zeros((SIZE + 31) // 32, dtype=torch.int32)

    def run() -> None:
        for _ in range(2000):
            matcher.fill_bitmask(row)
            assert matcher.advance(ord("a"))

    with pytest.raises(MatcherFailed):
        run()
    with pytest.raises(MatcherFailed):
        matcher.fill_bitmask(row)
    assert allowed(grammar.matcher())


def test_a_sequence_outlives_the_budget_that_another_has_used_up() -> None:
    grammar = regex_grammar(r"((\w+ ?){1,300}){1,300}")
    others = [walked(grammar, "ba") for _ in range(5)]
    expected = allowed(others[0])
    hungry = grammar.matcher()

    def run() -> None:
        while allowed(hungry):
            assert hungry.advance(ord("a"))

    with pytest.raises(MatcherFailed):
        run()
    assert allowed(others[0]) == expected
    assert others[1].advance(ord(" "))
    others[2].rollback(1)
    assert allowed(others[2])
    assert others[3].forced_tokens() == []
    assert not others[4].finished
    assert allowed(others[1])
    assert not others[1].advance(ord(" "))


def test_a_sequence_outlives_a_guess_that_has_used_up_its_budget() -> None:
    matcher = walked(regex_grammar(r"((\w+ ?){1,300}){1,300}"), "ba")
    expected = allowed(matcher)
    guessed: list[int] = []

    def guess() -> None:
        while allowed(matcher):
            assert matcher.advance(ord("a"))
            guessed.append(ord("a"))

    with pytest.raises(MatcherFailed):
        guess()
    matcher.rollback(len(guessed))
    assert allowed(matcher) == expected
    assert matcher.advance(ord(" "))
    assert allowed(matcher)


def test_a_token_that_takes_too_long_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = walked(schema_grammar(DEMANDING), '{"name": "a"')
    expected = allowed(matcher)
    with monkeypatch.context() as slow:
        slow.setattr(llguidance_matcher, "MAX_STEP_SECONDS", -1.0)
        with pytest.raises(MatcherFailed, match="too long"):
            matcher.advance(ord(","))
    assert allowed(matcher) == expected
    assert matcher.advance(ord(","))
    matcher.rollback(2)
    assert ord("b") in allowed(matcher)


def test_a_token_that_takes_long_by_chance_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def clocked(matcher: LlguidanceMatcher, token: str, *seconds: float) -> bool:
        times = itertools.accumulate([0.0, *itertools.chain.from_iterable((one, 0.0) for one in seconds)])
        with monkeypatch.context() as slow:
            slow.setattr(time, "thread_time", lambda: next(times))
            return matcher.advance(ord(token))

    matcher = walked(schema_grammar(DEMANDING), '{"name": "a"')
    assert clocked(matcher, ",", 1.0, 0.001)
    assert matcher._token_ids == [*longest_tokens('{"name": "a"'), ord(",")]
    with pytest.raises(MatcherFailed, match="too long"):
        clocked(matcher, " ", 1.0)
    assert not clocked(walked(schema_grammar(DEMANDING), "{"), "x", 1.0, 0.001)


def test_nothing_is_compiled_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = regex_grammar(r"(a|b){2,4}")
    begun, ended, wrong = walked(grammar, "ab"), walked(grammar, "ab"), walked(grammar, "abab")
    expected, longer = allowed(begun), allowed(walked(grammar, "aba"))
    allowed(ended)
    monkeypatch.setattr(grammar._lexer, "is_spent", True)
    with monkeypatch.context() as loop:
        loop.setattr(grammar, "new_start", None)
        late = grammar.matcher()
        assert not late.finished
        assert late.advance(ord("a"))
        assert begun.advance(ord("a"))
        begun.rollback(1)
        assert begun.advance(ord("b"))
        assert not begun.advance(STOP)
        begun.rollback(1)
        assert ended.advance(STOP)
        assert ended.finished
        assert wrong.advance(ord("a"))
    assert allowed(begun) == expected
    assert late.advance(ord("b"))
    assert late.advance(ord("b"))
    assert allowed(late) == longer
    with pytest.raises(MatcherFailed, match="forbids"):
        allowed(wrong)
    assert allowed(grammar.matcher()) == allowed(regex_grammar(r"(a|b){2,4}").matcher())


def test_masks_of_a_quick_grammar_are_not_quick_while_there_is_something_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = schema_grammar(PERSON)
    matcher = walked(grammar, '{"name": "')
    assert matcher.is_quick
    expected = allowed(matcher)
    monkeypatch.setattr(grammar._lexer, "is_spent", True)
    late = grammar.matcher()
    assert not matcher.is_quick
    assert not late.is_quick
    assert matcher.advance(ord("a"))
    matcher.rollback(1)
    assert allowed(matcher) == expected
    assert matcher.is_quick
    assert not late.is_quick


def test_repeats_within_repeats_are_refused() -> None:
    with pytest.raises(ConstraintTooLarge, match="repeats within repeats"):
        regex_grammar("(x{1000}){1000}")
    with pytest.raises(UnsupportedGrammar, match="repeats within repeats"):
        schema_grammar({"type": "string", "pattern": "^(x{1000}){1000}$"})
    assert schema_grammar({"type": "string", "pattern": "^[0-9a-f]{64}:[0-9a-f]{64}:[0-9a-f]{64}$"})


def test_what_nothing_satisfies_is_refused() -> None:
    with pytest.raises(UnsupportedGrammar, match="no text satisfies it"):
        schema_grammar({"$ref": "#"})


def test_a_larger_schema_is_held_to_be_larger() -> None:
    small = schema_grammar({"type": "string"})
    large = schema_grammar({"enum": [f"value {number}" for number in range(1000)]})
    assert 0 < small.num_bytes < large.num_bytes < 10 * 2**20


ALTERNATIVES: list[tuple[object, list[str]]] = [
    (
        {
            "type": "object",
            "properties": {"notes": {"type": "string", "maxLength": 9}, "on": {"type": "boolean"}, "n": {"type": "integer"}},
        },
        ['{"notes": "abc", "on": true}', '{"on": false, "n": 12}', '{"n": -3}', '{"notes": "d", "n": 0}'],
    ),
    (
        {
            "anyOf": [
                {"properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]},
                {"type": "array", "items": {"type": ["boolean", "string"]}},
            ]
        },
        ['{"a": "x"}', '{"a": "y"}', '[true, "b"]', '["a", false, "xyz"]'],
    ),
    (
        {"type": "object", "properties": {"long": {"type": "boolean"}, "longer": {"type": "null"}}, "minProperties": 1},
        ['{"long": true}', '{"longer": null}', '{"long": false, "longer": null}'],
    ),
]


@pytest.mark.parametrize(("schema", "texts"), ALTERNATIVES)
def test_a_mask_after_tokens_that_were_rolled_back_is_that_of_a_sequence_that_never_had_them(schema: object, texts: list[str]) -> None:
    """llguidance 1.9 keeps its last mask, and takes it for that of another path with as many rows."""
    grammar, rng = schema_grammar(schema), random.Random(0)
    paths = [longest_tokens(text) for text in texts]
    for _ in range(40):
        matcher, taken = grammar.matcher(), list[int]()
        for _ in range(6):
            path = rng.choice([path for path in paths if path[: len(taken)] == taken])
            for token_id in path[len(taken) : rng.randrange(len(taken), len(path) + 1)]:
                assert matcher.advance(token_id)
                taken.append(token_id)
                if rng.random() < 0.5:
                    fresh = grammar.matcher()
                    assert all(fresh.advance(token_id) for token_id in taken)
                    assert allowed(matcher.fork()) == allowed(matcher) == allowed(fresh), taken
            undone = rng.randrange(len(taken) + 1)
            matcher.rollback(undone)
            del taken[len(taken) - undone :]
