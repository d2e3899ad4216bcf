"""Speculative decoding changes nothing but the number of steps."""

import itertools
import json
import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.config import ROWS_FOR_WEIGHTS_CPU
from penstock.engine.constraints import masks
from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.contracts.proposer import MAX_DRAFT, Proposer, SequenceProposer, proposer_of
from penstock.engine.core import EngineCore
from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.sampling.sampler import Sampler
from penstock.engine.scheduling.step import Speculation
from penstock.engine.speculation import proposers as proposers_module
from penstock.engine.speculation.proposers import BUILT_IN, MATCH_LENGTH, SequenceNgrams, SuffixProposer
from penstock.engine.text.answer import PreambleParams
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
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
    letter_after,
    letter_like_before,
    make_core,
    make_request,
    preamble,
    reasoning,
    runner_of,
    saying,
    tokens,
)
from tests.matchers import Grammar, Walk

deepseek_r1 = FORMATS["deepseek_r1"]

EAGER = 1000.0  # rows for weights: whatever is guessed is tried


def rambling(token_ids: Sequence[int]) -> int:
    """Repeats itself, and sometimes closes its reasoning, begins a stop string or ends."""
    number = zlib.crc32(repr(token_ids).encode()) % 61
    return {0: EOS, 1: END_THINK, 2: ids("!")[0], 3: ids("?")[0]}.get(number, letter_like_before(token_ids))


def share_of_drafts(core: EngineCore) -> float:
    return core.stats().num_draft_tokens / core.stats().num_generation_tokens


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    options: dict[str, Any] = {
        "prompt": (LETTERS[:3] * 20)[: draw(st.integers(1, 15))],
        "n": draw(st.sampled_from([1, 1, 3])),
        "max_tokens": draw(st.sampled_from([1, 2, 7, 25, 40])),
        "seed": draw(st.integers(0, 30)),
        "temperature": draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
    }
    rules: dict[str, st.SearchStrategy[Any]] = {
        "top_p": st.just(0.8),
        "top_k": st.just(3),
        "min_p": st.just(0.2),
        "repetition_penalty": st.just(1.3),
        "frequency_penalty": st.sampled_from([-0.5, 0.5]),
        "presence_penalty": st.just(1.5),
        "logit_bias": st.just({LETTERS[0]: 2.0, LETTERS[1]: -3.0}),
        "allowed_token_ids": st.just((*LETTERS[:5], EOS)),
        "bad_words": st.just(("ab", "cad")),
        "min_tokens": st.just(5),
        "stop": st.sampled_from([("!",), ("ab",), ("abc", "?")]),
        "include_stop_str_in_output": st.booleans(),
        "stop_token_ids": st.just((LETTERS[4],)),
        "ignore_eos": st.just(True),
        "logprobs": st.sampled_from([0, 2]),
        "prompt_logprobs": st.just(1),
        "thinking_token_budget": st.sampled_from([0, 6]),
    }
    for name in draw(st.lists(st.sampled_from(sorted(rules)), max_size=3, unique=True)):
        options[name] = draw(rules[name])
    options["min_tokens"] = min(options.get("min_tokens", 0), options["max_tokens"])
    if draw(st.integers(0, 2)) == 0:
        options["prediction"] = draw(st.lists(st.sampled_from(LETTERS[:3]), max_size=40))
    if draw(st.booleans()):
        options["parser"] = deepseek_r1
    if draw(st.integers(0, 2)) == 0:
        seed, forces = draw(st.integers(0, 20)), draw(st.booleans())
        options["grammar"] = Grammar(lambda: Walk(seed, forces=forces))
        if draw(st.booleans()):
            options["preamble"] = PreambleParams(draw(st.integers(0, 12)), tuple(LETTERS[: draw(st.integers(1, 4))]))
        options["measures_pressure"] = draw(st.booleans())
    return options


def said(core: EngineCore, plan: list[dict[str, Any]]) -> list[list[Any]]:
    """Everything that every sequence of the plan came to, as far as it does not depend on how many tokens came at a time."""
    for number, options in enumerate(plan):
        core.add(make_request(str(number), **options))
    answers = drive(core)
    runner_of(core).shutdown()
    core.masks.close()
    return [
        summary([delta for delta in answers[str(number)] if delta.index == index])
        for number, options in enumerate(plan)
        for index in range(options["n"])
    ]


def summary(deltas: list[SequenceDelta]) -> list[Any]:
    end = deltas[-1]
    logprobs = [
        (
            entry.token_id,
            round(entry.logprob, 3),
            entry.rank,
            [token_id for token_id, _ in entry.top],
            entry.is_reasoning,
            entry.is_preamble,
        )
        for delta in deltas
        for entry in delta.logprobs
    ]
    prompt = None if deltas[0].prompt is None else deltas[0].prompt.logprobs
    told = [[token_id for delta in deltas for token_id in delta.token_ids], content(deltas, end.index), reasoning(deltas, end.index)]
    free = [preamble(deltas, end.index), end.num_preamble_tokens, [round(nats, 3) for delta in deltas for _, nats in delta.pressures]]
    return [*told, *free, logprobs, end.finish_reason, end.stop_reason, end.error, end.num_reasoning_tokens, prompt]


PROPOSERS: dict[str, Callable[[], Proposer]] = {
    **BUILT_IN,
    "of every key": lambda: SuffixProposer(max_bytes=1),
    "function": lambda: proposer_of(lambda token_ids: token_ids[-3:] * 3),
}


@given(
    plan=st.lists(requests(), min_size=1, max_size=5),
    num_spare_blocks=st.integers(0, 20),
    block_size=st.integers(1, 5),
    max_num_batched_tokens=st.sampled_from([8, 20, 200]),
    enable_prefix_caching=st.booleans(),
)
@settings(max_examples=8)
def test_an_answer_is_the_same_as_without_drafts(
    plan: list[dict[str, Any]], num_spare_blocks: int, block_size: int, max_num_batched_tokens: int, enable_prefix_caching: bool
) -> None:
    def run(**drafts: Any) -> tuple[list[list[Any]], int]:
        core = make_core(
            rambling,
            max_model_len=60,
            block_size=block_size,
            num_blocks=-(-60 // block_size) + num_spare_blocks,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            **drafts,
        )
        # What one says is proposed to those that follow.
        return said(core, [*plan, *plan]), core.stats().num_generation_tokens

    plain = run()
    for name, make_proposer in PROPOSERS.items():
        assert run(rows_for_weights=EAGER, proposer=make_proposer()) == plain, name


def three_letters(token_ids: Sequence[int]) -> Tensor:
    """The next of three letters, with odds that depend on the last one."""
    logits = torch.full((VOCAB_SIZE,), -torch.inf)
    logits[LETTERS[:3]] = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.6, 0.1, 0.3]])[LETTERS.index(token_ids[-1])].log()
    return logits


@pytest.mark.parametrize(
    ("params", "reshape"),
    [
        ({}, lambda odds: odds),
        pytest.param({"temperature": 0.5}, lambda odds: [odd**2 for odd in odds], marks=pytest.mark.thorough),
        ({"top_p": 0.7}, lambda odds: [odd if sum(other for other in odds if other > odd) < 0.7 else 0.0 for odd in odds]),
        pytest.param({"logit_bias": {LETTERS[2]: 1.0}}, lambda odds: [*odds[:2], odds[2] * math.e], marks=pytest.mark.thorough),
    ],
)
def test_tokens_are_drawn_from_the_models_own_distribution(params: dict[str, Any], reshape: Callable[[list[float]], list[float]]) -> None:
    """Without a seed, against the probabilities of all answers of four letters (a chi-square test)."""
    core = make_core(three_letters, rows_for_weights=EAGER, num_blocks=200, max_num_seqs=20, max_num_batched_tokens=200, max_waiting=2000)
    runner_of(core).sampler = Sampler(VOCAB_SIZE, "cpu", seed=1)
    num_answers = 1000
    for number in range(num_answers // 20):
        core.add(make_request(str(number), (LETTERS[:3] * 3)[:8], n=20, max_tokens=4, **({"temperature": 1.0} | params)))
    answers = drive(core)
    runner_of(core).shutdown()
    counts = Counter(tuple(tokens(deltas, index)) for deltas in answers.values() for index in range(20))
    expected = {}
    for letters in itertools.product(LETTERS[:3], repeat=4):
        chance = 1.0
        for before, letter in itertools.pairwise((LETTERS[1], *letters)):
            odds = reshape(three_letters([before])[LETTERS[:3]].exp().tolist())
            chance *= odds[LETTERS.index(letter)] / sum(odds)
        expected[letters] = num_answers * chance
    assert all(expected[letters] > 0 for letters in counts)
    likely = [letters for letters, count in expected.items() if count >= 5]
    rest = num_answers - sum(expected[letters] for letters in likely)
    pairs = [(counts[letters], expected[letters]) for letters in likely]
    pairs += [(num_answers - sum(count for count, _ in pairs), rest)] if rest >= 5 else []
    distance = sum((count - mean) ** 2 / mean for count, mean in pairs)
    freedom = len(pairs) - 1
    assert distance < freedom + 3.5 * math.sqrt(2 * freedom)
    assert 0.2 < core.stats().num_accepted_tokens / core.stats().num_draft_tokens < 0.8


def test_what_a_grammar_forbids_is_never_said_however_much_the_text_suggests_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "DRAFT_TIME", 60.0)
    schema = '{"properties": {"a": {"type": "array", "items": {"enum": [1, 12]}}}, "required": ["a"], "additionalProperties": false}'
    grammar = LlguidanceBackend(TOKENIZER.vocabulary(VOCAB_SIZE, {EOS})).compile(GrammarSpec(GrammarKind.JSON_SCHEMA, schema))
    prompt = '{"a": [1, 12, 1, 12, 13, 12, 1, 3]}'
    prompt_ids = ids(prompt)

    def copying(token_ids: Sequence[int]) -> int:
        return prompt_ids[(len(token_ids) - len(prompt_ids)) % len(prompt_ids)]

    texts = []
    for rows_for_weights in (None, EAGER):
        core = make_core(copying, rows_for_weights=rows_for_weights)
        core.add(make_request("greedy", prompt, grammar=grammar, max_tokens=80))
        core.add(make_request("drawn", prompt, grammar=grammar, max_tokens=80, temperature=1.0, seed=3, logprobs=1))
        answers = drive(core)
        assert all(deltas[-1].error is None for deltas in answers.values())
        texts.append([content(deltas) for deltas in answers.values()])
    assert texts[0] == texts[1]
    assert core.stats().num_draft_tokens > core.stats().num_accepted_tokens > 0
    assert all(set(json.loads(text)["a"]) == {1, 12} for text in texts[0])


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_text_that_does_not_repeat_itself_is_hardly_ever_guessed_at(name: str) -> None:
    core = make_core(letter_after, max_model_len=1000, num_blocks=300, rows_for_weights=ROWS_FOR_WEIGHTS_CPU, proposer=BUILT_IN[name]())
    generate(core, make_request(max_tokens=900))
    # Of 16 letters, any two have stood together before. Of one sequence's step, a row more takes less than a tenth.
    assert share_of_drafts(core) < 0.08
    assert core.stats().num_steps > 880


def test_a_text_that_repeats_itself_takes_few_steps() -> None:
    core = make_core(saying("the quick brown fox jumps over the lazy dog. " * 10), max_model_len=500, num_blocks=150, rows_for_weights=12.0)
    generate(core, make_request())
    stats = core.stats()
    assert stats.num_steps < stats.num_generation_tokens / 4
    assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens
    assert stats.num_drafts == sum(stats.drafts["ngram"].lengths)
    assert sum(length * count for length, count in enumerate(stats.drafts["ngram"].lengths)) == stats.num_accepted_tokens


PROSE = "it was a bright cold day in april, and the clocks were striking thirteen; winston smith, his chin nuzzled into his breast"


def predicted(text: str, prediction: str) -> tuple[int, int, int]:
    """The steps that an answer takes with a prediction of it, and how many of the draft tokens from it were right, and wrong."""
    core = make_core(saying(text), max_model_len=500, num_blocks=150, rows_for_weights=12.0)
    core.add(make_request(prediction=ids(prediction)))
    [deltas] = drive(core).values()
    assert content(deltas) == text
    num_drafted = sum(delta.num_predicted for delta in deltas)
    num_right = sum(delta.num_predicted_right for delta in deltas)
    assert num_drafted <= core.stats().num_draft_tokens
    return core.stats().num_steps, num_right, num_drafted - num_right


def test_an_answer_that_was_predicted_takes_few_steps() -> None:
    num_tokens = len(ids(PROSE))
    num_steps, num_right, num_wrong = predicted(PROSE, PROSE)
    assert num_steps < num_tokens / 4
    assert num_right > 0.8 * num_tokens
    assert num_wrong == 0


@pytest.mark.parametrize(
    "prediction",
    [
        PROSE.replace("bright cold", "cold bright"),
        PROSE.replace("in april", "in may, or so, or in june"),
        PROSE.replace(" and the clocks", ""),
        "here you are: " + PROSE,
        PROSE.replace("thirteen", "twelve") + " and more",
    ],
)
def test_a_prediction_is_followed_again_after_what_is_otherwise(prediction: str) -> None:
    alone, _, _ = predicted(PROSE, "")
    num_steps, num_right, _ = predicted(PROSE, prediction)
    assert num_steps < alone / 2
    assert num_right > 0.6 * len(ids(PROSE))


def test_a_prediction_that_is_wrong_is_soon_left() -> None:
    num_steps, num_right, num_wrong = predicted(PROSE, "0123456789" * 20)
    alone, _, _ = predicted(PROSE, "")
    assert (num_right, num_steps) == (0, alone)
    assert num_wrong <= MAX_DRAFT


def test_what_repeats_itself_in_a_prediction_is_found_where_the_answer_is() -> None:
    text = "".join(f"line {number}: the value is {number * 37 % 11};" for number in range(9))
    edited = text.replace("the value is 8", "the new value is 8")
    _, num_right, num_wrong = predicted(edited, text)
    assert num_right > 0.8 * len(ids(edited))
    assert num_wrong < 4 * MAX_DRAFT


def test_drafts_end_as_soon_as_they_stop_being_right() -> None:
    text = "abcdefgh" * 12 + "".join(random.Random(0).choices("abcdefghijklmnop", k=300))
    core = make_core(saying(text), max_model_len=500, num_blocks=150, rows_for_weights=12.0)
    core.add(make_request())
    while core.stats().num_generation_tokens < 96:
        core.step()
    before = core.stats()
    drive(core)
    assert before.num_accepted_tokens > 70
    assert core.stats().num_draft_tokens - before.num_draft_tokens < 0.15 * 300


def proposers_of(*accuracies: float) -> list[SequenceProposer]:
    proposers: list[SequenceProposer] = [SequenceNgrams([1, 2, 3] * 9, 1) for _ in accuracies]
    for proposer, accuracy in zip(proposers, accuracies, strict=True):
        proposer.read()
        proposer.accuracy = accuracy
    return proposers


@pytest.mark.parametrize(("num_sequences", "is_worth_it"), [(1, True), (3, True), (12, False), (64, False)])
def test_many_sequences_need_surer_guesses(num_sequences: int, is_worth_it: bool) -> None:
    def length(accuracy: float, limit: int) -> int:
        return Speculation(12.0).share(proposers_of(accuracy), limit, num_rows=num_sequences, num_sequences=num_sequences)[0]

    assert (length(0.5, 99) > 0) is is_worth_it
    assert length(1.0, 99) == MAX_DRAFT
    assert length(1.0, 8) == 8


def test_a_step_is_drafted_for_only_where_its_drafts_pay_together() -> None:
    def lengths(*accuracies: float) -> list[int]:
        return Speculation(6.0).share(proposers_of(*accuracies), 99, num_rows=8, num_sequences=8)

    assert lengths(0.7) == [0]  # 0.7 tokens, each of which takes 14 / 8 rows without drafts, for a row and what any draft takes
    assert lengths(0.7, 0.7, 0.7, 0.7, 0.7, 0.7) == [1] * 6
    assert sum(lengths(0.95)) > 4


def test_drafts_need_not_pay_where_speculation_is_not_adaptive() -> None:
    adaptive, always = Speculation(6.0), Speculation(6.0, is_adaptive=False)
    assert adaptive.share(proposers_of(0.1, 0.5), 99, num_rows=8, num_sequences=8) == [0, 0]
    assert sum(always.share(proposers_of(0.1, 0.5), 8, num_rows=8, num_sequences=8)) == 8
    assert (adaptive.num_passes([0.1], num_sequences=8), always.num_passes([0.1], num_sequences=8)) == (0, 4)
    assert always.num_passes([], num_sequences=8) == 0
    assert always.is_worthwhile(proposers_of(0.1), 99, num_sequences=8)


def test_the_likeliest_tokens_are_tried_first_and_no_more_than_others_can_bear() -> None:
    lengths = Speculation(12.0).share(proposers_of(0.85, 0.2, 0.95, 0.7, 0.85, 0.95), 99, num_rows=18, num_sequences=18)
    assert sum(lengths) == MAX_DRAFT
    assert lengths[2] + lengths[5] > lengths[0] + lengths[4] > lengths[3] >= lengths[1] == 0
    assert abs(lengths[2] - lengths[5]) <= 1
    assert abs(lengths[0] - lengths[4]) <= 1
    assert sum(Speculation(12.0).share(proposers_of(*[1.0] * 60), 999, num_rows=60, num_sequences=60)) == 36


@pytest.mark.parametrize(
    ("num_drafting", "num_sequences", "num_rows"), [(1, 1, 16), (1, 4, 16), (2, 2, 24), (2, 8, 16), (4, 4, 32), (4, 8, 24)]
)
def test_the_more_sequences_draft_the_longer_a_step_may_take(num_drafting: int, num_sequences: int, num_rows: int) -> None:
    proposers = proposers_of(*[1.0] * num_drafting, *[0.0] * (num_sequences - num_drafting))
    assert sum(Speculation(6.0).share(proposers, 99, num_rows=num_sequences, num_sequences=num_sequences)) == num_rows


class Growing(SequenceNgrams):
    """Whose guesses are surer behind those that are right."""

    def accuracy_after(self, num_right: int) -> float:
        return 0.99 if num_right else self.accuracy


def test_a_draft_is_as_long_as_its_tokens_are_likely_behind_one_another() -> None:
    def lengths(kind: type[SequenceNgrams]) -> list[int]:
        proposers: list[SequenceProposer] = [kind([1, 2, 3] * 9, 1) for _ in range(4)]
        for proposer in proposers:
            proposer.read()
            proposer.accuracy = 0.55
        return Speculation(12.0).share(proposers, 99, num_rows=4, num_sequences=4)

    assert max(lengths(SequenceNgrams)) <= 2
    assert max(lengths(Growing)) >= 4


def worth(speculation: Speculation, *accuracies: float, limit: int = 99) -> bool:
    return speculation.is_worthwhile(proposers_of(*accuracies), limit, num_sequences=len(accuracies))


def test_drafts_are_weighed_against_what_they_cost_and_what_waiting_costs() -> None:
    assert worth(Speculation(64.0), 0.9)
    assert not worth(Speculation(64.0), 0.1)
    assert not worth(Speculation(64.0), 0.9, limit=0)  # all places are taken
    assert not worth(Speculation(64.0), *[0.5] * 64)  # half a token each, for a step half as long again


def test_a_step_that_no_sequence_decodes_in_is_not_drafted_for() -> None:
    assert not Speculation(64.0).is_worthwhile(proposers_of(0.9), 8, num_sequences=0)


def test_on_a_cpu_drafts_are_made_wherever_their_rows_pay() -> None:
    speculation = Speculation(64.0, has_device=False)
    for _ in range(200):
        speculation.observe(0.9, 1.9, is_ahead=False)
    assert worth(speculation, 0.6)
    assert not worth(speculation, 0.1)


def test_a_host_that_takes_long_makes_drafts_wait_longer() -> None:
    speculation = Speculation(64.0)
    assert worth(speculation, 0.6)
    for _ in range(200):
        speculation.observe(0.9, 1.9, is_ahead=False)
    assert abs(speculation.host_share - 0.9) < 0.01
    assert not worth(speculation, 0.45)
    for _ in range(200):
        speculation.observe(0.1, 1.0, is_ahead=True)
    assert abs(speculation.host_share - 0.1) < 0.01
    assert worth(speculation, 0.45)


def test_what_drafts_were_found_to_bring_counts_for_those_to_come() -> None:
    speculation = Speculation(64.0)
    assert worth(speculation, 0.7)
    (proposer,) = proposers_of(0.7)
    for _ in range(50):
        speculation.expect(proposer, 4)
        speculation.count(4, 0)
    assert not worth(speculation, 0.7)


def test_nothing_is_tried_where_a_logits_processor_may_remember_what_it_saw() -> None:
    seen: list[int] = []

    def processor(token_ids: list[int], logits: Tensor) -> Tensor:
        seen.append(len(token_ids))
        return logits

    core = make_core(saying("ab" * 20), rows_for_weights=EAGER)
    generate(core, make_request(logits_processors=[lambda: processor]))
    assert seen == list(range(1, 42))
    assert core.stats().num_drafts == 0


def test_tokens_tried_ahead_are_found_by_the_next_request_if_they_were_right() -> None:
    core = make_core(saying("abcabcab" * 5), rows_for_weights=EAGER)
    deltas = generate(core, make_request())
    assert core.stats().num_accepted_tokens > 20
    whole = [*ids("?"), *tokens(deltas)[:-1]]
    again = generate(core, make_request("again", [*whole, LETTERS[7]], max_tokens=3))
    assert again[0].prompt is not None
    assert again[0].prompt.num_cached_tokens == len(whole) // 4 * 4


def test_an_aborted_or_failed_step_leaves_nothing_of_its_drafts() -> None:
    core = make_core(saying("ab" * 30), rows_for_weights=EAGER)
    for name in ("aborted", "failed"):
        core.add(make_request(name))
    while not (step := core.schedule()) or not step.drafts:
        assert step is not None
        batch = core.build(step)
        core.update(step, batch, core.runner.launch(batch).collect())
    batch = core.build(step)
    core.abort("aborted")
    core.runner.launch(batch).collect()
    assert list(core.fail(step, "it broke")) == ["failed"]
    core.check_integrity()
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks
    assert generate(core, make_request("next"))[-1].finish_reason is FinishReason.STOP


FEW_TOKENS = st.integers(0, 3)


def last_source(ids: list[int]) -> int | None:
    """Where the last tokens stood before, the last time."""
    tail = ids[-MATCH_LENGTH:]
    places = [place for place in range(MATCH_LENGTH, len(ids)) if ids[place - MATCH_LENGTH : place] == tail]
    return places[-1] if places and len(tail) == MATCH_LENGTH else None


@given(prompt=st.lists(FEW_TOKENS, min_size=1, max_size=20), answer=st.lists(FEW_TOKENS, max_size=20), max_read=st.integers(1, 30))
def test_what_is_proposed_stood_after_the_same_tokens(prompt: list[int], answer: list[int], max_read: int) -> None:
    ids = list(prompt)
    proposer = SequenceNgrams(ids, len(ids))
    before, proposers_module.MAX_READ = proposers_module.MAX_READ, max_read
    try:
        for token_id in answer:
            ids.append(token_id)
            while not proposer.read():
                pass
            draft = proposer.propose(5) if proposer.has_guess else []
            assert len(draft) in (0, 5)
            assert bool(draft) >= (last_source(ids) is not None)
            if draft:
                whole = ids + draft
                places = range(MATCH_LENGTH, len(ids))
                assert any(whole[p - MATCH_LENGTH : p] == ids[-MATCH_LENGTH:] and whole[p : p + 5] == draft for p in places)
    finally:
        proposers_module.MAX_READ = before


def proposer_after(ids: list[int], num_prompt_tokens: int = 1) -> SequenceNgrams:
    proposer = SequenceNgrams(ids, num_prompt_tokens)
    assert proposer.read()
    return proposer


def test_a_prompt_is_found_again_in_the_answer() -> None:
    prompt = list(range(50))
    assert proposer_after([*prompt, 99, 10, 11], len(prompt)).propose(4) == [12, 13, 14, 15]


def test_a_text_that_goes_round_is_proposed_as_often_as_it_takes() -> None:
    assert proposer_after([1, 2, 3, 1, 2, 3, 1, 2]).propose(7) == [3, 1, 2, 3, 1, 2, 3]
    assert proposer_after([5, 5, 5]).propose(3) == [5, 5, 5]


def test_what_has_not_stood_before_is_not_guessed() -> None:
    assert not proposer_after(list(range(40))).has_guess


def test_guesses_are_judged_whether_they_are_asked_for_or_not() -> None:
    right = proposer_after([1, 2, 3, 4] * 10)
    wrong = proposer_after([token_id for number in range(10) for token_id in (1, 2, 50 + number)])
    assert right.accuracy > 0.95
    assert wrong.accuracy < 0.1


@given(st.lists(FEW_TOKENS, min_size=2, max_size=60))
def test_how_the_text_came_in_makes_no_difference(ids: list[int]) -> None:
    at_once = proposer_after(list(ids))
    growing: list[int] = ids[:1]
    one_by_one = SequenceNgrams(growing, 1)
    for token_id in ids[1:]:
        growing.append(token_id)
        assert one_by_one.read()
    assert one_by_one.accuracy == at_once.accuracy
    assert one_by_one.has_guess == at_once.has_guess
    if at_once.has_guess:
        assert one_by_one.propose(6) == at_once.propose(6)
