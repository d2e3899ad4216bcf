import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from penstock.engine.contracts.parsing import Event, Phase, Reasoning, Text, ToolCallArguments, ToolCallStart, Turn
from penstock.engine.text.answer import Answer
from penstock.engine.text.streaming import Detokenizer
from penstock.engine.text.tokenizer import Tokenizer
from penstock.plugins.reasoning.formats import FORMATS
from penstock.plugins.tools.json_formats import HERMES

deepseek_r1 = FORMATS["deepseek_r1"]
mistral = FORMATS["mistral"]

WORDS = ["think", "STOP", "hello", "TOP", "ingS", "</"]  # tokens that text can be cut into other than byte by byte
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def make_tokenizer() -> Tokenizer:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *WORDS]
    backend = Backend(models.BPE({token: token_id for token_id, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>", "<tool_call>", "</tool_call>")])
    return Tokenizer(backend, {"eos_token": "<|end|>"}, {})


TOKENIZER = make_tokenizer()
ADDED = frozenset(info.text for info in TOKENIZER.added_tokens.values())
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def make_answer(
    stop: Sequence[str] = (),
    *,
    reasons: bool = False,
    calls: bool = False,
    include: bool = False,
    skip: bool = True,
    min_tokens: int = 0,
    added: frozenset[str] = ADDED,
) -> Answer:
    turn = Turn(prompt_tail="<think>\n", added_tokens=added, tools=TOOLS, tool_choice="auto")
    reasoning = deepseek_r1(turn) if reasons else None
    tool_parser = HERMES(turn) if calls else None
    return Answer(Detokenizer(TOKENIZER, ids("user")), reasoning, tool_parser, stop, include, skip, min_tokens)


def read(answer: Answer, token_ids: list[int]) -> list[Event]:
    """All events, as the engine reads them: to a stop string or to the end."""
    events: list[Event] = []
    for token_id in token_ids:
        events += answer.feed(token_id)
        if answer.stop_match is not None:
            break
    return events + answer.finish()


def fold(events: list[Event]) -> dict[str, Any]:
    return {
        "reasoning": "".join(event.text for event in events if isinstance(event, Reasoning)),
        "content": "".join(event.text for event in events if isinstance(event, Text)),
        "calls": [event.name for event in events if isinstance(event, ToolCallStart)],
        "arguments": "".join(event.fragment for event in events if isinstance(event, ToolCallArguments)),
    }


def said(answer: Answer, text: str) -> dict[str, Any]:
    return fold(read(answer, ids(text)))


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[int]]:
    """A text, and a way of cutting it into tokens that need not be the tokenizer's own."""
    parts = draw(st.lists(st.sampled_from([*WORDS, "</think>", "<think>", CALL, "🎉", " ", "ST", "a\n", "<", "<|end|>"]), max_size=8))
    token_ids: list[int] = []
    for part in parts:
        whole = TOKENIZER.token_id(part)
        token_ids += [whole] if whole is not None and draw(st.booleans()) else ids(part)
    return "".join(parts), token_ids


@given(cut_text=cut_texts(), include=st.booleans(), skip=st.booleans())
def test_any_cut_into_tokens_gives_the_same_answer(cut_text: tuple[str, list[int]], include: bool, skip: bool) -> None:
    text, token_ids = cut_text
    options: dict[str, Any] = {"stop": ["STOP", "OP\n"], "reasons": True, "calls": True, "include": include, "skip": skip}
    one, other = make_answer(**options), make_answer(**options)
    assert fold(read(one, token_ids)) == said(other, text)
    assert one.stop_match == other.stop_match


@given(cut_text=cut_texts(), reasons=st.booleans(), data=st.data())
def test_a_branch_reads_on_from_anywhere_to_the_same_end(cut_text: tuple[str, list[int]], reasons: bool, data: st.DataObject) -> None:
    token_ids = cut_text[1]
    place = data.draw(st.integers(0, len(token_ids)))
    options: dict[str, Any] = {"stop": ["STOP", "OP\n"], "reasons": reasons}
    whole, answer = make_answer(**options), make_answer(**options)
    events = []
    for token_id in token_ids[:place]:
        events += answer.feed(token_id)
        if answer.stop_match is not None:
            return
    branch, other = answer.branch(), answer.branch()
    assert branch is not None
    assert other is not None
    read(other, ids("another way to go on"))
    assert fold([*events, *read(branch, token_ids[place:])]) == fold(read(whole, token_ids))
    assert (branch.stop_match, branch.phase, branch.new_content) == (whole.stop_match, whole.phase, whole.new_content)
    assert branch.num_reasoning_tokens == whole.num_reasoning_tokens


@given(cut_text=cut_texts(), data=st.data())
def test_an_answer_that_stops_anywhere_loses_nothing(cut_text: tuple[str, list[int]], data: st.DataObject) -> None:
    token_ids = cut_text[1]
    token_ids = token_ids[: data.draw(st.integers(0, len(token_ids)))]
    answer = make_answer(["never to be seen"], skip=False)
    assert fold(read(answer, token_ids))["content"] == TOKENIZER.decode(token_ids, skip_special_tokens=False)


@given(cut_text=cut_texts())
def test_neighbours_of_one_kind_are_joined_and_plain(cut_text: tuple[str, list[int]]) -> None:
    answer = make_answer(["STOPS"], reasons=True, calls=True)
    for token_id in cut_text[1]:
        events = answer.feed(token_id)
        for event, following in itertools.pairwise(events):
            assert not (isinstance(event, Text | Reasoning) and type(event) is type(following))
        assert all(type(event.text) is str and event.text for event in events if isinstance(event, Text | Reasoning))
        if answer.stop_match is not None:
            break


def test_a_whole_answer_is_split_into_reasoning_content_and_calls() -> None:
    answer = make_answer(reasons=True, calls=True)
    assert said(answer, f"I reason.</think>Hello {CALL}") == {
        "reasoning": "I reason.",
        "content": "Hello ",
        "calls": ["f"],
        "arguments": json.dumps({"x": 1}),
    }


def test_a_character_over_several_tokens_is_one_event() -> None:
    answer = make_answer()
    assert [answer.feed(token_id) for token_id in ids("🎉")] == [[], [], [], [Text("🎉")]]


def test_a_stop_string_over_several_tokens_is_cut() -> None:
    answer = make_answer(["never", "STOP"])
    assert said(answer, "go on STOP and on")["content"] == "go on "
    assert answer.stop_match == "STOP"


def test_a_stop_string_may_be_kept() -> None:
    answer = make_answer(["STOP"], include=True)
    assert said(answer, "go on STOP and on")["content"] == "go on STOP"


def test_a_stop_string_in_the_middle_of_a_token_is_cut_there() -> None:
    word = TOKENIZER.token_id("STOP") or 0
    answer = make_answer(["TO"])
    assert fold(read(answer, [*ids("a"), word, *ids("b")]))["content"] == "aS"


def test_stop_strings_do_not_end_reasoning() -> None:
    answer = make_answer(["STOP", "\n\n", "think"], reasons=True)
    found = said(answer, "STOP\n\nI think</think>so STOP.")
    assert (found["reasoning"], found["content"]) == ("STOP\n\nI think", "so ")
    assert answer.stop_match == "STOP"


def test_a_stop_string_does_not_reach_from_reasoning_into_content() -> None:
    answer = make_answer(["STOP"], reasons=True)
    found = said(answer, "ST</think>OP")
    assert (found["reasoning"], found["content"], answer.stop_match) == ("ST", "OP", None)


def test_an_unfinished_stop_string_is_given_back_at_the_end() -> None:
    answer = make_answer(["STOP"])
    assert said(answer, "go STO")["content"] == "go STO"
    assert answer.stop_match is None


def test_a_stop_string_before_min_tokens_is_text() -> None:
    answer = make_answer(["STOP"], min_tokens=9)
    assert said(answer, "STOP and STOP here")["content"] == "STOP and "
    answer = make_answer(["STOP"], min_tokens=4)
    assert said(answer, "STOP and")["content"] == ""


def test_nothing_may_be_fed_after_a_stop_string() -> None:
    answer = make_answer(["a"])
    answer.feed(ids("a")[0])
    with pytest.raises(AssertionError):
        answer.feed(ids("b")[0])


@pytest.mark.parametrize("skip", [True, False])
def test_a_special_token_is_seen_only_where_special_tokens_are_not_skipped(skip: bool) -> None:
    assert said(make_answer(skip=skip), "a<|end|>b")["content"] == ("ab" if skip else "a<|end|>b")


def test_an_added_token_that_is_not_special_is_always_seen() -> None:
    assert said(make_answer(), "a<think>b")["content"] == "a<think>b"


def test_a_stop_string_may_be_a_special_token_that_is_not_skipped() -> None:
    answer = make_answer(["<|end|>"], skip=False)
    assert said(answer, "a<|end|>b")["content"] == "a"
    answer = make_answer(["<|end|>"])
    assert (said(answer, "a<|end|>b")["content"], answer.stop_match) == ("ab", None)


def test_reasoning_tokens_are_counted_up_to_the_end_marker() -> None:
    answer = make_answer(reasons=True)
    for token_id in ids("abc</think>"):
        assert answer.phase is Phase.REASONING
        answer.feed(token_id)
    assert answer.phase is Phase.CONTENT
    read(answer, ids("hello"))
    assert answer.num_reasoning_tokens == len(ids("abc</think>")) == 4


def test_an_end_marker_spelt_in_text_is_counted_whole() -> None:
    answer = make_answer(reasons=True, added=frozenset())
    marker = [TOKENIZER.token_id("</") or 0, TOKENIZER.token_id("think") or 0, *ids(">")]
    found = fold(read(answer, [*ids("ab"), *marker, *ids("cd")]))
    assert (found["reasoning"], found["content"], answer.num_reasoning_tokens) == ("ab", "cd", 5)


def test_without_a_reasoning_parser_everything_is_content() -> None:
    answer = make_answer()
    assert said(answer, "a</think>b")["content"] == "a</think>b"
    assert (answer.phase, answer.end_marker, answer.num_reasoning_tokens) == (Phase.CONTENT, None, 0)
    reasoner = make_answer(reasons=True)
    assert (reasoner.start_marker, reasoner.end_marker) == ("<think>", "</think>")


def test_a_branch_knows_that_markers_in_arguments_are_none() -> None:
    turn = Turn(added_tokens=ADDED, tools=TOOLS, tool_choice="auto")
    answer = Answer(Detokenizer(TOKENIZER, ids("user")), mistral(turn), HERMES(turn), ["STOP"], False, True)
    for token_id in ids('<tool_call>{"name": "f", "arguments": {"x": "'):
        answer.feed(token_id)
    branch = answer.branch()
    assert branch is not None
    for token_id in ids("[THINK] STO"):
        branch.feed(token_id)
    assert branch.phase is Phase.CONTENT
    branch.feed(ids("P")[0])
    assert branch.stop_match == "STOP"
    assert answer.stop_match is None


@given(
    token_ids=st.lists(st.integers(0, TOKENIZER.vocab_size + 1), max_size=12), prompt=st.sampled_from(["", "user", "é"]), skip=st.booleans()
)
def test_what_an_answer_without_readers_says_can_be_told_from_its_tokens_or_fed(token_ids: list[int], prompt: str, skip: bool) -> None:
    def answer(stop: Sequence[str]) -> Answer:
        return Answer(Detokenizer(TOKENIZER, ids(prompt)[:1]), None, None, stop, False, skip)

    def said(events: list[Event]) -> str:
        assert all(isinstance(event, Text) and type(event.text) is str for event in events)
        return "".join(event.text for event in events if isinstance(event, Text))

    plain, events = answer(()), list[Event]()
    for token_id in token_ids:
        event = plain.plain_text(token_id)
        events += plain.feed(token_id) if event is None else [event]
    assert said(events + plain.finish()) == said(read(answer(("never said",)), token_ids))


def test_the_text_of_a_whole_character_is_made_once_and_only_where_nothing_reads_it() -> None:
    (token_id,) = ids("x")
    assert make_answer().plain_text(token_id) is make_answer().plain_text(token_id) is not None
    for answer in (make_answer(("stop",)), make_answer(reasons=True), make_answer(calls=True)):
        assert answer.plain_text(token_id) is None
    for other in (ids("<think>")[0], ids("<|end|>")[0], ids("é")[0], TOKENIZER.vocab_size):
        assert make_answer().plain_text(other) is None
