import re
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from penstock.engine.constraints.masks import MASK_TRANSITIONS, allocate_bitmask
from penstock.engine.constraints.state import PHASE_TRANSITIONS, ConstraintPhase, ConstraintState, ForbiddenToken
from penstock.engine.contracts.parsing import Event, ToolParser, Turn
from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.text.answer import Answer
from penstock.engine.text.streaming import Detokenizer
from penstock.plugins.reasoning.formats import FORMATS, openai_gptoss
from penstock.plugins.reasoning.think_format import ThinkFormat, Thinking
from tests.fakes import (
    END_THINK,
    EOS,
    THINK,
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
    saying,
    tokens,
)
from tests.matchers import Grammar, Matcher, Spelling

deepseek_r1 = FORMATS["deepseek_r1"]
granite = FORMATS["granite"]
qwen3 = FORMATS["qwen3"]

ARCHITECTURE = Path(__file__).parents[3] / "docs" / "architecture.md"

YES = Grammar(lambda: Spelling("yes"))


def allowed(constraint: ConstraintState, answer: Any) -> set[int]:
    row = allocate_bitmask(1, VOCAB_SIZE)[0].fill_(12345)
    constraint.fill_bitmask(answer, row)
    return {token_id for token_id in range(VOCAB_SIZE) if int(row[token_id // 32]) >> (token_id % 32) & 1}


def test_reasoning_passes_freely_and_what_follows_does_not() -> None:
    answer = make_request(parser=deepseek_r1).make_answer()
    constraint = ConstraintState(Spelling("yes"), THINK)
    for token_id in [*ids("what?"), END_THINK]:
        assert not constraint.is_open(answer)
        assert allowed(constraint, answer) == set(range(VOCAB_SIZE))
        assert constraint.advance(answer, token_id)
        answer.feed(token_id)
    assert constraint.is_open(answer)
    assert allowed(constraint, answer) == set(ids("y"))


@pytest.mark.parametrize("start_token_id", [THINK, 31, 32, 63])
def test_a_model_that_may_reason_is_allowed_the_marker_once(start_token_id: int) -> None:
    answer = make_request(parser=qwen3).make_answer()
    constraint = ConstraintState(Spelling("yes"), start_token_id)
    assert allowed(constraint, answer) == {*ids("y"), start_token_id}
    assert constraint.advance(answer, *ids("y"))
    answer.feed(*ids("y"))
    assert allowed(constraint, answer) == set(ids("e"))
    assert not constraint.advance(answer, start_token_id)


def test_white_space_that_the_grammar_took_closes_the_way_to_reasoning() -> None:
    answer = make_request(parser=qwen3).make_answer()
    constraint = ConstraintState(Spelling("\nyes"), THINK)
    assert constraint.advance(answer, *ids("\n"))
    answer.feed(*ids("\n"))
    assert allowed(constraint, answer) == set(ids("y"))
    assert not constraint.advance(answer, THINK)


def test_without_a_marker_of_one_token_the_grammar_holds_from_the_start() -> None:
    answer = make_request(parser=qwen3).make_answer()
    assert allowed(ConstraintState(Spelling("yes"), None), answer) == set(ids("y"))


def test_without_a_parser_the_grammar_holds_from_the_start() -> None:
    deltas = generate(make_core(saying("no, never")), make_request(grammar=YES))
    assert content(deltas) == "yes"


def test_a_finished_grammar_ends_the_answer_without_another_step() -> None:
    core = make_core(saying("no"))
    deltas = generate(core, make_request(grammar=YES))
    assert tokens(deltas) == ids("yes")
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].stop_reason is None
    assert core.stats().num_steps == 3


def test_a_grammar_that_may_go_on_ends_where_the_model_stops() -> None:
    core = make_core(saying("yesss"))
    deltas = generate(core, make_request(grammar=Grammar(lambda: Spelling("yes", may_go_on=True)), ignore_eos=True, min_tokens=9))
    assert content(deltas) == "yesss"
    assert tokens(deltas)[-1] == EOS


def test_max_tokens_cuts_a_grammar() -> None:
    deltas = generate(make_core(), make_request(grammar=YES, max_tokens=2))
    assert content(deltas) == "ye"
    assert deltas[-1].finish_reason is FinishReason.LENGTH


def test_the_grammar_begins_when_the_reasoning_has_ended() -> None:
    deltas = generate(make_core(saying("hm</think>no")), make_request(grammar=YES, parser=deepseek_r1))
    assert (reasoning(deltas), content(deltas)) == ("hm", "yes")


def test_the_grammar_begins_when_the_budget_has_closed_the_reasoning() -> None:
    request = make_request(grammar=YES, parser=deepseek_r1, thinking_token_budget=3, n=2)
    deltas = generate(make_core(saying("i wonder and wonder")), request)
    for index in range(2):
        assert (reasoning(deltas, index), content(deltas, index)) == ("i w", "yes")


def test_a_model_that_opens_its_reasoning_itself_may_do_so_under_a_grammar() -> None:
    said = [THINK, *ids("hm"), END_THINK, *ids("no")]

    def next_token(token_ids: Sequence[int]) -> int:
        return said[min(len(token_ids) - 1, len(said) - 1)]

    deltas = generate(make_core(next_token), make_request(grammar=YES, parser=qwen3))
    assert (reasoning(deltas), content(deltas)) == ("hm", "yes")


def test_constrained_and_free_sequences_run_side_by_side() -> None:
    core = make_core(saying("free"), num_blocks=10, max_model_len=40)
    core.add(make_request("free"))
    core.add(make_request("yes", grammar=YES, n=2))
    said = drive(core)
    assert content(said["free"]) == "free"
    assert [content(said["yes"], index) for index in range(2)] == ["yes", "yes"]


class Refusing(Spelling):
    def advance(self, token_id: int) -> bool:
        return not self.path and super().advance(token_id)


class RefusingForced(Refusing):
    def __init__(self, text: str) -> None:
        super().__init__(text, forces=True)


class Empty(Spelling):
    def allowed(self, path: list[int]) -> list[int]:
        return []


class RaisingMask(Spelling):
    def fill_bitmask(self, row: Tensor) -> None:
        if self.path:
            raise KeyError("lost")
        super().fill_bitmask(row)


class RaisingForced(Spelling):
    def forced_tokens(self) -> list[int]:
        if self.path:
            raise KeyError("lost")
        return []


class RaisingAdvance(Spelling):
    def advance(self, token_id: int) -> bool:
        if self.path:
            raise KeyError("lost")
        return super().advance(token_id)


class RaisingFinished(Spelling):
    @property
    def finished(self) -> bool:
        raise KeyError("lost")


@pytest.mark.parametrize(
    ("matcher", "text", "error"),
    [
        (Refusing, "y", "the grammar does not allow the token that was sampled"),
        (RefusingForced, "y", "the grammar does not allow the token that it forced"),
        (Empty, "", "no token is left to choose from"),
        (RaisingMask, "y", "the grammar raised KeyError"),
        (RaisingForced, "y", "the grammar raised KeyError"),
        (RaisingAdvance, "y", "reading the answer raised KeyError"),
        (RaisingFinished, "y", "reading the answer raised KeyError"),
    ],
)
def test_a_matcher_that_fails_ends_its_own_sequence(matcher: type[Spelling], text: str, error: str) -> None:
    core = make_core(saying("free"))
    matchers = iter([Spelling("yes"), matcher("yes"), Spelling("yes")])
    core.add(make_request("free"))
    core.add(make_request("mixed", grammar=Grammar(lambda: next(matchers)), n=3))
    said = drive(core)
    runner_of(core).shutdown()
    assert content(said["free"]) == "free"
    assert [content(said["mixed"], index) for index in range(3)] == ["yes", text, "yes"]
    ends = {delta.index: delta for delta in said["mixed"] if delta.finish_reason is not None}
    assert [ends[index].finish_reason for index in range(3)] == [FinishReason.STOP, FinishReason.ERROR, FinishReason.STOP]
    assert error in str(ends[1].error)


@pytest.mark.parametrize("client_stop", [3, 31, 63, 64])
def test_a_stop_id_of_the_request_is_allowed_only_where_the_grammar_may_end(client_stop: int) -> None:
    answer = make_request().make_answer()
    spelling = Spelling("yes", may_go_on=True)
    constraint = ConstraintState(spelling, None, stop_token_ids=frozenset({EOS}), client_stop_ids=frozenset({client_stop, *ids("e")}))
    assert allowed(constraint, answer) == set(ids("y"))
    for token_id in ids("y"):
        constraint.advance(answer, token_id)
    assert allowed(constraint, answer) == set()  # what the grammar wants next would end the answer in its middle
    for token_id in ids("es"):
        constraint.advance(answer, token_id)
    assert allowed(constraint, answer) == {EOS, client_stop, *ids("es")}


def test_rolled_back_tokens_leave_the_gate_as_it_was() -> None:
    answer = make_request(parser=qwen3).make_answer()
    constraint = ConstraintState(Spelling("yes", forces=True), THINK, may_force=True)
    assert constraint.forced_tokens(answer) == []  # the model may yet open its reasoning
    before = allowed(constraint, answer)
    for num_tokens in range(1, 4):
        for token_id in ids("yes")[:num_tokens]:
            assert constraint.advance(answer, token_id)
        assert constraint.has_begun
        assert constraint.forced_tokens(answer) == ids("yes")[num_tokens:]
        constraint.rollback(num_tokens)
        assert allowed(constraint, answer) == before
        assert not constraint.has_begun
    assert constraint.advance(answer, THINK)
    constraint.rollback(1)
    constraint.rollback(0)
    assert allowed(constraint, answer) == before


def test_the_phases_follow_the_answer_until_the_grammar_has_begun() -> None:
    answer = make_request(parser=qwen3).make_answer()
    constraint = ConstraintState(Spelling("yes"), THINK)
    phases = []
    for token_id in [THINK, *ids("?"), END_THINK, *ids("yes")]:
        phases.append(constraint.phase(answer))
        constraint.take(answer, token_id)
        answer.feed(token_id)
        constraint.finish_if_over(answer)
        constraint.check_integrity()
    assert phases == [
        ConstraintPhase.UNDECIDED,
        *[ConstraintPhase.REASONING] * 2,
        *[ConstraintPhase.ACTIVE] * 3,
    ]
    assert constraint.phase(answer) is ConstraintPhase.FINISHED
    with pytest.raises(ForbiddenToken, match="that was sampled"):
        constraint.take(answer, ids("!")[0])


def test_a_finished_constraint_is_active_again_once_its_last_token_is_rolled_back() -> None:
    answer = make_request().make_answer()
    constraint = ConstraintState(Spelling("yes"), None)
    for token_id in ids("yes"):
        constraint.take(answer, token_id)
    assert constraint.finish_if_over(answer)
    for num_left in (2, 1, 0):
        constraint.rollback(1)
        constraint.check_integrity()
        assert constraint.phase(answer) is ConstraintPhase.ACTIVE
        assert constraint.has_begun is (num_left > 0)
    assert not constraint.finish_if_over(answer)


def test_a_constraint_does_not_return_to_the_reasoning() -> None:
    answer = make_request(parser=deepseek_r1).make_answer()
    constraint = ConstraintState(Spelling(""), None)
    assert constraint.phase(answer) is ConstraintPhase.REASONING
    answer.feed(END_THINK)
    assert constraint.finish_if_over(answer)
    with pytest.raises(AssertionError, match="FINISHED to"):
        constraint._enter(ConstraintPhase.REASONING)


def test_a_token_that_is_refused_needs_no_rollback() -> None:
    answer = make_request().make_answer()
    constraint = ConstraintState(Spelling("yes"), None)
    assert constraint.advance(answer, *ids("y"))
    assert not constraint.advance(answer, *ids("x"))
    constraint.rollback(1)
    assert allowed(constraint, answer) == set(ids("y"))


def test_what_the_token_held_that_ended_the_reasoning_is_rolled_back_with_it() -> None:
    answer = make_request(parser=deepseek_r1).make_answer()
    constraint = ConstraintState(Spelling("yes"), THINK)
    assert constraint.advance(answer, END_THINK)
    assert constraint.advance_rest(ids("ye"))
    answer.feed(END_THINK)
    assert allowed(constraint, answer) == set(ids("s"))
    constraint.rollback(1)
    assert allowed(constraint, answer) == set(ids("y"))


def test_once_begun_the_grammar_holds_to_the_end() -> None:
    """Where the marker is no token of its own, a grammar may spell it: that opens no reasoning."""
    core = make_core(saying("never"))
    think = ThinkFormat(models="", start="<t>", end="</t>")
    deltas = generate(core, make_request(grammar=Grammar(lambda: Spelling("<t>so")), parser=lambda turn: think(Turn())))
    assert tokens(deltas) == ids("<t>so")
    assert deltas[-1].finish_reason is FinishReason.STOP


def tag_ends_reasoning(text: str, *, tool_parser: bool, grammar: Grammar, **options: Any) -> list[SequenceDelta]:
    """The answer of a model whose parser takes `{` for the end of its reasoning."""
    prompt = ids("?")

    def answer() -> Answer:
        reasoning = ThinkFormat(models="", thinking=Thinking.ALWAYS, implicit_ends=("{",))(Turn())
        return Answer(Detokenizer(TOKENIZER, prompt), reasoning, Swallowing() if tool_parser else None, (), False, True)

    return generate(make_core(saying(text)), make_request(grammar=grammar, make_answer=answer, **options))


class Swallowing(ToolParser):
    """A tool parser that lets nothing through."""

    tool_format = None

    def feed(self, text: str) -> list[Event]:
        return []

    def finish(self) -> list[Event]:
        return []


@pytest.mark.parametrize("tool_parser", [False, True])
def test_a_tag_that_ends_the_reasoning_belongs_to_the_grammar(tool_parser: bool) -> None:
    deltas = tag_ends_reasoning("hm{no", tool_parser=tool_parser, grammar=Grammar(lambda: Spelling("{yes}")))
    assert tokens(deltas) == ids("hm{yes}")
    assert content(deltas) == ("" if tool_parser else "{yes}")


def test_a_tag_that_is_all_the_grammar_allows_ends_the_answer() -> None:
    deltas = tag_ends_reasoning("hm{no", tool_parser=False, grammar=Grammar(lambda: Spelling("{")))
    assert tokens(deltas) == ids("hm{")
    assert deltas[-1].finish_reason is FinishReason.STOP


def test_a_tag_that_the_grammar_does_not_begin_with_belongs_to_the_reasoning() -> None:
    deltas = tag_ends_reasoning("hm{no", tool_parser=False, grammar=Grammar(lambda: Spelling("[yes]")))
    assert (reasoning(deltas), content(deltas)) == ("hm{", "[yes]")
    assert deltas[-1].finish_reason is FinishReason.STOP


def test_an_answer_that_is_cut_where_its_reasoning_ends_shows_no_content_that_the_grammar_forbids() -> None:
    deltas = tag_ends_reasoning("hm{no", tool_parser=False, grammar=Grammar(lambda: Spelling("[yes]")), max_tokens=3)
    assert (reasoning(deltas), content(deltas)) == ("hm{", "")
    assert deltas[-1].finish_reason is FinishReason.LENGTH


def test_a_tag_that_a_parser_holds_and_the_grammar_does_not_begin_with_is_an_error() -> None:
    deltas = tag_ends_reasoning("hm{no", tool_parser=True, grammar=Grammar(lambda: Spelling("[")))
    assert "does not fit the grammar" in str(deltas[-1].error)


def test_what_the_grammar_takes_only_in_part_leaves_it_as_it_was() -> None:
    answer = make_request(parser=deepseek_r1).make_answer()
    constraint = ConstraintState(Spelling("yes"), THINK)
    assert constraint.advance(answer, END_THINK)
    assert not constraint.advance_rest(ids("yet"))
    assert not constraint.has_begun
    answer.feed(END_THINK)
    assert allowed(constraint, answer) == set(ids("y"))


@pytest.mark.parametrize("stop", ["", "!"])
def test_an_end_in_the_reasoning_closes_it_without_a_budget_too(stop: str) -> None:
    request = make_request(grammar=YES, parser=deepseek_r1, stop_token_ids=tuple(ids(stop)))
    deltas = generate(make_core(saying("hm" + stop)), request)
    assert (reasoning(deltas), content(deltas)) == ("hm", "yes")
    assert deltas[-1].finish_reason is FinishReason.STOP


def test_an_end_in_the_reasoning_that_leaves_no_room_to_close_it_is_a_cut() -> None:
    deltas = generate(make_core(saying("hm")), make_request(grammar=YES, parser=granite, tail=granite.start, max_tokens=4))
    assert (reasoning(deltas), content(deltas)) == ("hm", "")
    assert deltas[-1].finish_reason is FinishReason.LENGTH


class Optional(Matcher):
    """Any number of `a`, also none."""

    def allowed(self, path: list[int]) -> list[int]:
        return [EOS, *ids("a")]


def test_the_first_token_after_the_reasoning_is_no_end() -> None:
    core = make_core(saying("hm</think>", prompt="?"))  # then it only wants to stop
    deltas = generate(core, make_request(grammar=Grammar(Optional), parser=deepseek_r1))
    assert content(deltas) == "a"
    assert deltas[-1].finish_reason is FinishReason.STOP


def test_a_grammar_of_nothing_ends_with_the_reasoning() -> None:
    core = make_core(saying("hm</think>never"))
    deltas = generate(core, make_request(grammar=Grammar(lambda: Spelling("")), parser=deepseek_r1))
    assert (reasoning(deltas), content(deltas)) == ("hm", "")
    assert tokens(deltas)[-1] == END_THINK
    assert core.stats().num_steps == 3


@pytest.mark.parametrize(("tail", "text"), [("<think>\n", "hm</think>no"), ("<think>\n\n</think>\n\n", "no")])
def test_the_prompt_says_where_the_grammar_begins(tail: str, text: str) -> None:
    deltas = generate(make_core(saying(text)), make_request(grammar=YES, parser=qwen3, tail=tail))
    assert content(deltas) == "yes"
    assert reasoning(deltas) == ("hm" if "hm" in text else "")


def test_content_before_the_reasoning_is_over_goes_with_the_reasoning() -> None:
    """As harmony's short messages to the user: all content is promised to be the grammar's."""
    text = "<|channel|>analysis<|message|>a<|return|><|start|>assistant<|channel|>commentary<|message|>b<|return|>"
    final = "<|start|>assistant<|channel|>final<|message|>"
    for grammar, expected in ((None, ("a", "byes")), (YES, ("ab", "yes"))):
        deltas = generate(make_core(saying(text + final + "yes")), make_request(parser=openai_gptoss, grammar=grammar, max_tokens=180))
        assert (reasoning(deltas), content(deltas)) == expected


@pytest.mark.parametrize(("title", "transitions"), [("constraint", PHASE_TRANSITIONS), ("mask job", MASK_TRANSITIONS)])
def test_the_documented_transitions_are_those_that_are_asserted(title: str, transitions: Mapping[Enum, frozenset[Enum]]) -> None:
    table = re.split(f"\n(?:```\n|\n){title}\n", ARCHITECTURE.read_text(encoding="utf-8"))[1]
    lines = re.split(r"\n(?:\n|```)", table)[0].splitlines()
    rows = [re.match(r"([A-Z]+) *(?:→ ([A-Z]+(?: \| [A-Z]+)*))?", line) for line in lines]
    documented = {row[1]: set((row[2] or "").split(" | ")) - {""} for row in rows if row is not None}
    assert documented == {source.name: {target.name for target in targets} for source, targets in transitions.items()}
