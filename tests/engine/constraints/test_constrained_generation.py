"""Constrained sequences among others: forced tokens, preemption, forks, joins and leaves change nothing in what each of them says."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.deltas import ClientFault, FinishReason, SequenceDelta
from penstock.engine.request import Request
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.plugins.grammars.outlines_core.backend import OutlinesCoreBackend
from penstock.plugins.reasoning.formats import FORMATS
from tests.fakes import (
    END_THINK,
    EOS,
    LETTERS,
    TOKENIZER,
    VOCAB_SIZE,
    content,
    drive,
    generate,
    ids,
    make_core,
    make_request,
    reasoning,
    runner_of,
    tokens,
)
from tests.matchers import Grammar, Spelling, Walk

deepseek_r1 = FORMATS["deepseek_r1"]

VOCABULARY = TOKENIZER.vocabulary(VOCAB_SIZE, {EOS})


def letter_after(token_ids: Sequence[int]) -> int:
    return LETTERS[sum(token_ids[-3:]) % len(LETTERS)]


def walk(seed: int, *, forces: bool = True, is_quick: bool = False) -> Grammar:
    return Grammar(lambda: Walk(seed, forces=forces), has_quick_masks=is_quick)


def end(deltas: list[SequenceDelta], index: int = 0) -> tuple[FinishReason | None, int | str | None]:
    last = [delta for delta in deltas if delta.index == index][-1]
    return last.finish_reason, last.stop_reason


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    options: dict[str, Any] = {
        "prompt": (LETTERS[:2] * 20)[: draw(st.integers(1, 15))],
        "n": draw(st.integers(1, 3)),
        "max_tokens": draw(st.sampled_from([0, 1, 7, 25, 25])),
        "seed": draw(st.integers(0, 30)),
        "is_quick": draw(st.booleans()),
    }
    if draw(st.integers(0, 3)) == 0:
        options["stop"] = ("".join(draw(st.lists(st.sampled_from("abcdefghijklmnop"), min_size=1, max_size=2))),)
    if draw(st.integers(0, 3)) == 0:
        options["prompt_logprobs"] = 0
    return options


@given(
    plan=st.lists(st.tuples(requests(), st.integers(0, 9)), min_size=1, max_size=7),
    num_spare_blocks=st.integers(0, 4),
    block_size=st.integers(1, 5),
    max_num_batched_tokens=st.sampled_from([1, 4, 9, 200]),
    enable_prefix_caching=st.booleans(),
    grace=st.sampled_from([0.0, 60.0]),
    rows_for_weights=st.sampled_from([None, 1000.0]),
)
@settings(max_examples=25)
def test_forced_and_late_tokens_are_those_that_would_have_been_sampled(
    plan: list[tuple[dict[str, Any], int]],
    num_spare_blocks: int,
    block_size: int,
    max_num_batched_tokens: int,
    enable_prefix_caching: bool,
    grace: float,
    rows_for_weights: float | None,
) -> None:
    core = make_core(
        letter_after,
        num_blocks=-(-40 // block_size) + num_spare_blocks,
        block_size=block_size,
        max_num_seqs=6,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=40,
        enable_prefix_caching=enable_prefix_caching,
        grace=grace,
        rows_for_weights=rows_for_weights,
    )
    said: dict[str, list[SequenceDelta]] = {}
    for number, (options, num_steps) in enumerate(plan):
        grammar = walk(options["seed"], is_quick=options.pop("is_quick"))
        core.add(make_request(str(number), grammar=grammar, **options))
        for _ in range(num_steps):
            for request_id, deltas in core.step().items():
                said.setdefault(request_id, []).extend(deltas)
            core.check_integrity()
    for request_id, deltas in drive(core).items():
        said.setdefault(request_id, []).extend(deltas)
    runner_of(core).shutdown()
    plain = make_core(letter_after, max_model_len=40)
    for number, (options, _) in enumerate(plan):
        ours = said[str(number)]
        theirs = generate(plain, make_request(grammar=walk(options["seed"], forces=False), **options))
        for index in range(options["n"]):
            assert tokens(ours, index) == tokens(theirs, index)
            assert content(ours, index) == content(theirs, index)
            assert end(ours, index) == end(theirs, index)
            told = [[delta.prompt.logprobs for delta in deltas if delta.index == index and delta.prompt] for deltas in (ours, theirs)]
            assert told[0] == told[1]
            assert len(told[0]) == 1
    runner_of(plain).shutdown()
    assert plain.stats().num_forced_tokens == 0
    assert plain.stats().num_generation_tokens == core.stats().num_generation_tokens


def test_what_is_forced_takes_one_step() -> None:
    core = make_core(max_num_batched_tokens=200)
    deltas = generate(core, make_request(grammar=Grammar(lambda: Spelling("so be it", forces=True)), n=2))
    assert [content(deltas, index) for index in range(2)] == ["so be it"] * 2
    assert core.stats().num_steps == 1
    assert core.stats().num_forced_tokens == 2 * len("so be it")
    assert core.stats().num_generation_tokens == 2 * len("so be it")


def test_forced_tokens_save_steps() -> None:
    steps = []
    for forces in (False, True):
        core = make_core(letter_after)
        for seed in range(8):
            core.add(make_request(str(seed), grammar=walk(seed, forces=forces), max_tokens=30))
        drive(core)
        steps.append(core.stats().num_steps)
    assert steps[1] < steps[0]


def test_much_that_is_forced_comes_in_portions() -> None:
    core = make_core()
    deltas = generate(core, make_request(grammar=Grammar(lambda: Spelling("x" * 150, forces=True))))
    assert content(deltas) == "x" * 150
    assert [len(delta.token_ids) for delta in deltas] == [64, 64, 22]


@pytest.mark.parametrize(
    "options",
    [{"logprobs": 0}, {"bad_words": ("zz",)}, {"allowed_token_ids": tuple(ids("yes"))}, {"logit_bias": {5: 1.0}}],
    ids=lambda options: next(iter(options)),
)
def test_nothing_is_forced_where_another_rule_has_a_say(options: dict[str, Any]) -> None:
    core = make_core()
    deltas = generate(core, make_request(grammar=Grammar(lambda: Spelling("yes", forces=True)), **options))
    assert content(deltas) == "yes"
    assert core.stats().num_forced_tokens == 0
    assert sum(len(delta.logprobs) for delta in deltas) == (3 if "logprobs" in options else 0)


@pytest.mark.parametrize("options", [{"bad_words": ("e",)}, {"allowed_token_ids": tuple(ids("y"))}, {"stop_token_ids": tuple(ids("e"))}])
def test_what_is_forced_and_forbidden_is_a_dead_end(options: dict[str, Any]) -> None:
    deltas = generate(make_core(), make_request(grammar=Grammar(lambda: Spelling("yes", forces=True)), **options))
    assert content(deltas) == "y"
    assert end(deltas)[0] is FinishReason.ERROR
    assert isinstance(deltas[-1].error, ClientFault)


@pytest.mark.parametrize(
    ("options", "text", "reason"), [({"max_tokens": 2}, "ye", FinishReason.LENGTH), ({"stop": ("e",)}, "y", FinishReason.STOP)]
)
def test_forced_tokens_end_where_sampled_ones_would(options: dict[str, Any], text: str, reason: FinishReason) -> None:
    deltas = generate(make_core(), make_request(grammar=Grammar(lambda: Spelling("yes", forces=True)), **options))
    assert content(deltas) == text
    assert end(deltas)[0] is reason


@pytest.mark.parametrize("odds", [2, 29], ids=["short reasoning", "long reasoning"])
@pytest.mark.parametrize("max_num_batched_tokens", [5, 64])
def test_where_the_reasoning_ended_is_known_after_preemption_and_cached_prefixes(odds: int, max_num_batched_tokens: int) -> None:
    """With long reasoning a sequence is mostly preempted before its grammar holds, and with a short one after that."""

    def next_token(token_ids: Sequence[int]) -> int:
        is_over = END_THINK in token_ids or sum(token_ids) % odds
        return letter_after(token_ids) if is_over else END_THINK

    def request(number: int) -> Request:
        options: dict[str, Any] = {"n": 1 + number % 2, "stop": ("ab", "k") if number % 3 == 0 else ()}
        return make_request(str(number), LETTERS[: 9 + number % 3], parser=deepseek_r1, grammar=walk(number), max_tokens=45, **options)

    core = make_core(next_token, num_blocks=20, max_model_len=60, max_num_batched_tokens=max_num_batched_tokens)
    said: dict[str, list[SequenceDelta]] = {}
    for number in range(8):
        core.add(request(number))
        for _ in range(number):
            for request_id, deltas in core.step().items():
                said.setdefault(request_id, []).extend(deltas)
    for request_id, deltas in drive(core).items():
        said.setdefault(request_id, []).extend(deltas)
    core.check_integrity()
    runner_of(core).shutdown()
    assert core.stats().num_preemptions > 3
    assert any(delta.prompt and delta.prompt.num_cached_tokens for deltas in said.values() for delta in deltas)
    alone = make_core(next_token, max_model_len=60, enable_prefix_caching=False)
    num_constrained = 0
    for number in range(8):
        ours, theirs = said[str(number)], generate(alone, request(number))
        for index in range(1 + number % 2):
            assert tokens(ours, index) == tokens(theirs, index)
            assert (reasoning(ours, index), content(ours, index)) == (reasoning(theirs, index), content(theirs, index))
            assert end(ours, index) == end(theirs, index)
            path = tokens(ours, index)[tokens(ours, index).index(END_THINK) + 1 :] if END_THINK in tokens(ours, index) else []
            matcher = Walk(number)
            assert all(matcher.advance(token_id) for token_id in path)
            num_constrained += bool(path)
    runner_of(alone).shutdown()
    assert num_constrained > 5


SCHEMA = """{"type": "object", "properties": {"name": {"enum": ["张三", "李四"]}, "count": {"type": "integer", "maximum": 999999}},
"required": ["name", "count"], "additionalProperties": false}"""


def test_a_batch_of_several_backends_with_joins_and_leaves_says_what_each_says_alone() -> None:
    json_schema = LlguidanceBackend(VOCABULARY).compile(GrammarSpec(GrammarKind.JSON_SCHEMA, SCHEMA, whitespace_pattern=""))
    regex = OutlinesCoreBackend(VOCABULARY).compile(GrammarSpec(GrammarKind.REGEX, "(ab|cd|efg){3,9}[0-9]{2}"))
    grammars: list[Any] = [json_schema, regex, None]

    def request(number: int) -> Request:
        grammar = grammars[number % 4] if number % 4 < 3 else walk(number)
        options: dict[str, Any] = {"temperature": 1.0, "seed": number} if number % 5 == 0 else {}
        return make_request(str(number), LETTERS[: 1 + number % 7], grammar=grammar, max_tokens=40, **options)

    core = make_core(letter_after, num_blocks=800, max_num_seqs=64, max_num_batched_tokens=300, rows_for_weights=1000.0)
    choice = random.Random(0)
    said: dict[str, list[SequenceDelta]] = {}
    left: set[str] = set()
    joined = most_rows = 0
    while joined < 96 or core.has_work:
        for _ in range(min(96 - joined, choice.choice([0, 5, 20]) if joined else 70)):
            core.add(request(joined))
            joined += 1
        if choice.random() < 0.3 and core.scheduler.running:
            left.add(choice.choice(core.scheduler.running).request.request_id)
            core.abort(max(left))
            left.add(max(left))
        for request_id, deltas in core.step().items():
            said.setdefault(request_id, []).extend(deltas)
        most_rows = max(most_rows, len(core.scheduler.running))
        core.check_integrity()
    runner_of(core).shutdown()
    assert most_rows == 64
    assert core.stats().num_accepted_tokens > 0
    alone = make_core(letter_after)
    for number in range(96):
        theirs = generate(alone, request(number))
        ours = said.get(str(number), [])
        if ours and ours[-1].finish_reason is not None:
            assert tokens(ours) == tokens(theirs)
            assert end(ours) == end(theirs)
        else:
            assert str(number) in left
            assert tokens(ours) == tokens(theirs)[: len(tokens(ours))]
    runner_of(alone).shutdown()
