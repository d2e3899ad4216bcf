"""The quirks of each family, beyond those of DeepSeek-R1, Qwen3 and Granite 3.2."""

from collections.abc import Sequence

import pytest

from penstock.engine.contracts.hooks import ReasoningParserFactory
from penstock.engine.contracts.parsing import Phase, Reasoning, SpecialText, Text, Turn
from penstock.plugins.reasoning.formats import FORMATS, THINK_TAGS
from penstock.plugins.reasoning.think_format import AppendThink
from penstock.testing import check_cuts, read

deepseek_v3 = FORMATS["deepseek_v3"]
deepseek_v4 = FORMATS["deepseek_v4"]
ernie45 = FORMATS["ernie45"]
glm45 = FORMATS["glm45"]
granite_thinking = FORMATS["granite_thinking"]
holo2 = FORMATS["holo2"]
hunyuan_a13b = FORMATS["hunyuan_a13b"]
hy_v3 = FORMATS["hy_v3"]
interns1 = FORMATS["interns1"]
k2_horizon = FORMATS["k2_horizon"]
kimi = FORMATS["kimi"]
kimi_k2 = FORMATS["kimi_k2"]
minimax_m2 = FORMATS["minimax_m2"]
minimax_m3 = FORMATS["minimax_m3"]
nemotron_v3 = FORMATS["nemotron_v3"]
olmo3 = FORMATS["olmo3"]
plamo3 = FORMATS["plamo3"]
poolside_v1 = FORMATS["poolside_v1"]
seed_oss = FORMATS["seed_oss"]
step3p5 = FORMATS["step3p5"]

THINK = ("<think>", "</think>")
OPEN = Turn(prompt_tail="<think>\n", tool_choice="auto")
CLOSED = Turn(prompt_tail="<think>\n\n</think>\n\n", tool_choice="auto")
UNTOLD = Turn(tool_choice="auto")


def split(factory: ReasoningParserFactory, turn: Turn, *pieces: str) -> tuple[str, str]:
    """Reasoning and content."""
    events = read(factory(turn), pieces)
    return (
        "".join(event.text for event in events if isinstance(event, Reasoning)),
        "".join(event.text for event in events if isinstance(event, Text)),
    )


def given(tail: str = "", **kwargs: object) -> Turn:
    return Turn(prompt_tail=tail, chat_template_kwargs=kwargs, tool_choice="auto")


@pytest.mark.parametrize("name", THINK_TAGS)
def test_markers_are_those_that_the_parser_itself_reads(name: str) -> None:
    factory = THINK_TAGS[name]
    parser = factory(Turn(prompt_tail=factory(Turn()).start_marker))
    phases = [parser.phase]
    assert read(parser, ["why", parser.end_marker, "because"]) == [Reasoning("why"), Text("because")]
    assert [*phases, parser.phase] == [Phase.REASONING, Phase.CONTENT]


@pytest.mark.parametrize("name", THINK_TAGS)
def test_a_prompt_that_closed_the_reasoning_makes_all_of_it_content(name: str) -> None:
    factory = THINK_TAGS[name]
    start, end = factory(Turn()).start_marker, factory(Turn()).end_marker
    turn = Turn(prompt_tail=f"{start}\n\n{end}\n\n")
    assert factory(turn).phase is Phase.CONTENT
    assert split(factory, turn, "because", start) == ("", f"because{start}")


@pytest.mark.parametrize("name", THINK_TAGS)
def test_markers_that_are_tokens_may_be_quoted(name: str) -> None:
    factory = THINK_TAGS[name]
    start, end = factory(Turn()).start_marker, factory(Turn()).end_marker
    turn = Turn(prompt_tail=start, added_tokens=frozenset({start, end}))
    assert split(factory, turn, f"I write {end} now", SpecialText(end), "yes") == (f"I write {end} now", "yes")


@pytest.mark.parametrize(
    ("factory", "samples", "markers", "turn"),
    [
        (deepseek_v4, ["why<｜DSML｜tool_calls>x", "<think>a</think>b</think>c"], THINK, OPEN),
        (glm45, ["<think>why<tool_call>f", "why</think>because"], THINK, UNTOLD),
        (
            k2_horizon,
            ["a</ifm|think>b", "<ifm|think_fast>a"],
            ("<ifm|think>", "</ifm|think>", "<ifm|think_fast>", "</ifm|think_fast>"),
            UNTOLD,
        ),
        (minimax_m3, ["</mm:think>a", "<mm:think>a</mm:think>b", " a</mm:think>"], ("<mm:think>", "</mm:think>"), UNTOLD),
        (interns1, ["a<|action_start|>{}<|action_end|>b</think>c", "<|action_start|><|action_end|>"], THINK, OPEN),
        (step3p5, ["why\n</think>\nbecause", "\n\n</think>\n\n", "a</think>b"], (*THINK, "\n</think>", "</think>\n", "\n</think>\n"), OPEN),
        (granite_thinking, ["why</think>\n\n\nbecause\n"], (*THINK, "\n"), OPEN),
    ],
    ids=["deepseek_v4", "glm45", "k2_horizon", "minimax_m3", "interns1", "step3p5", "granite_thinking"],
)
def test_any_cut_and_any_stop_give_the_same_answer(
    factory: ReasoningParserFactory, samples: Sequence[str], markers: Sequence[str], turn: Turn
) -> None:
    check_cuts(factory, samples, markers=markers, turn=turn, max_examples=25)


WRAPPED = [
    (
        hunyuan_a13b,
        "<answer>",
        ["<think>\nwhy\n</think>\n<answer>\nyes\n</answer>\n", "<think>\n</think>\nyes", "<answer>\n</answer>"],
        UNTOLD,
    ),
    (ernie45, "<response>", ["why\n</think>\n\n<response>\nyes\n</response>\n", "why</think>yes</response>"], OPEN),
]


@pytest.mark.parametrize(("factory", "opening", "samples", "turn"), WRAPPED, ids=["hunyuan_a13b", "ernie45"])
def test_wrappers_are_taken_out_however_the_text_is_cut(
    factory: ReasoningParserFactory, opening: str, samples: Sequence[str], turn: Turn
) -> None:
    closing = opening.replace("<", "</")
    check_cuts(factory, samples, markers=(*THINK, opening, closing, "\n", " "), turn=turn, max_examples=25)


@pytest.mark.parametrize("kwargs", [{"force_nonempty_content": True}, {"enable_thinking": False}])
def test_content_that_reasoning_becomes_does_not_depend_on_cuts(kwargs: dict[str, object]) -> None:
    turn = given("<think>\n", **kwargs)
    check_cuts(nemotron_v3, ["why", "why</think>\n", "why</think>because"], markers=THINK, turn=turn, max_examples=25)


@pytest.mark.parametrize("factory", [deepseek_v3, poolside_v1])
def test_off_by_default_where_the_prompt_does_not_tell(factory: ReasoningParserFactory) -> None:
    assert factory(UNTOLD).phase is Phase.CONTENT
    assert split(factory, UNTOLD, "<think>a</think>b") == ("", "<think>a</think>b")
    assert split(factory, given(thinking=True), "<think>a</think>b") == ("a", "b")
    assert split(factory, given(enable_thinking=True), "plain") == ("", "plain")


@pytest.mark.parametrize("factory", [deepseek_v4, holo2, glm45, kimi_k2])
@pytest.mark.parametrize("name", ["thinking", "enable_thinking"])
def test_on_by_default_where_the_prompt_does_not_tell(factory: ReasoningParserFactory, name: str) -> None:
    assert split(factory, UNTOLD, "<think>a</think>b") == ("a", "b")
    assert factory(Turn(chat_template_kwargs={name: False})).phase is Phase.CONTENT
    assert factory(Turn(prompt_tail="<think>", chat_template_kwargs={name: False})).phase is Phase.REASONING


def test_deepseek_v4_takes_an_effort_of_none_for_off() -> None:
    assert deepseek_v4(given(reasoning_effort="none")).phase is Phase.CONTENT


@pytest.mark.parametrize("factory", [minimax_m2, ernie45, step3p5])
def test_always_on_whatever_the_request_says(factory: ReasoningParserFactory) -> None:
    turn = given(enable_thinking=False, thinking=False)
    assert split(factory, turn, "never ends") == ("never ends", "")
    assert split(factory, turn, "why</think>because") == ("why", "because")


@pytest.mark.parametrize(
    ("factory", "opening", "call"),
    [
        (deepseek_v4, "<think>", "<｜DSML｜tool_calls>"),
        (deepseek_v4, "<think>", "<｜DSML｜function_calls>"),
        (glm45, "<think>", "<tool_call>"),
        (kimi_k2, "<think>", "<|tool_calls_section_begin|>"),
        (seed_oss, "<seed:think>", "<seed:tool_call>"),
        (minimax_m2, "<think>", "<minimax:tool_call>"),
        (nemotron_v3, "<think>", "<tool_call>"),
        (step3p5, "<think>", "<tool_call>"),
        (poolside_v1, "<think>", "<tool_call>"),
        (k2_horizon, "<ifm|think>", "<ifm|tool_calls>"),
        (plamo3, "<|plamo:begin_think:plamo|>", "<|plamo:begin_tool_requests:plamo|>"),
    ],
)
def test_a_tool_call_ends_the_reasoning_and_stays_readable(factory: ReasoningParserFactory, opening: str, call: str) -> None:
    turn = Turn(prompt_tail=opening, added_tokens=frozenset({call}))
    events = read(factory(turn), ["why", SpecialText(call, is_hidden=False), "{}"])
    assert events == [Reasoning("why"), Text(call), Text("{}")]
    assert isinstance(events[1], Text)
    assert isinstance(events[1].text, SpecialText)


@pytest.mark.parametrize("turn", [UNTOLD, given(thinking=True), given("<think>"), given("</think>")])
def test_poolside_drops_an_end_marker_that_comes_first(turn: Turn) -> None:
    assert split(poolside_v1, turn, "</think>Hi") == ("", "Hi")


def test_poolside_does_not_look_at_earlier_turns() -> None:
    assert poolside_v1(given("</think>a</assistant>\n<assistant>\n", thinking=True)).phase is Phase.UNDECIDED


def test_step3p5_takes_one_line_break_on_either_side_of_the_end_marker() -> None:
    assert split(step3p5, OPEN, "\n This is\n\n\n</think>\n\nthe rest") == ("\n This is\n\n", "\nthe rest")
    assert split(step3p5, OPEN, "why\n") == ("why\n", "")


def test_granite_thinking_takes_all_line_breaks_after_the_end_marker() -> None:
    assert split(granite_thinking, OPEN, "a\n</think>\n\n\nb\n\nc") == ("a\n", "b\n\nc")
    assert split(granite_thinking, CLOSED, "\nb") == ("", "\nb")


@pytest.mark.parametrize("factory", [nemotron_v3, granite_thinking])
@pytest.mark.parametrize("turn", [given("<think>\n", force_nonempty_content=True), given("<think>\n", enable_thinking=False)])
def test_reasoning_that_nothing_follows_becomes_content(factory: ReasoningParserFactory, turn: Turn) -> None:
    assert split(factory, turn, "4") == ("", "4")
    assert split(factory, turn, "4</think>") == ("", "4")
    assert split(factory, turn, "why</think>because") == ("why", "because")
    assert split(factory, given("<think>\n"), "4") == ("4", "")


def test_reasoning_streams_as_soon_as_content_follows() -> None:
    parser = nemotron_v3(given("<think>\n", force_nonempty_content=True))
    assert not parser.feed("why</think>\n")
    assert list(parser.feed("b")) == [Reasoning("why"), Text("\n"), Text("b")]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nwhy\n</think>\n<answer>\nyes\n</answer>", "why", "yes"),
        ("<think>\n\n</think>\n<answer>\nyes\n</answer>", "", "yes"),
        ("<think>\nThis\nThat\n</think>\n<answer>\nyes\nno", "This\nThat", "yes\nno"),
        ("<think>\nwhy\n</think>\n<answer>\n", "why", ""),
        ("<think>\nwhy\n</think>\nyes", "why", "yes"),
        ("plain", "", "plain"),
        ("I say <answer>", "", "I say <answer>"),
    ],
)
def test_hunyuan_writes_markers_on_lines_of_their_own(text: str, reasoning: str, content: str) -> None:
    assert split(hunyuan_a13b, UNTOLD, text) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("abc\n</think>\n\n<response>\ndef\n</response>\n", "abc\n", "def"),
        ("abc\n</think>\ndef", "abc\n", "def"),
        ("abc</think>def\nDEF", "abc", "def\nDEF"),
        ("abc", "abc", ""),
    ],
)
def test_ernie_may_wrap_its_content(text: str, reasoning: str, content: str) -> None:
    assert split(ernie45, OPEN, text) == (reasoning, content)


def test_minimax_m2_repeats_its_end_marker() -> None:
    assert split(minimax_m2, OPEN, "r</think>a</think>b") == ("r", "ab")


@pytest.mark.parametrize("pieces", [["why</think>because"], list("why</think>because"), ["why", SpecialText("</think>"), "because"]])
def test_append_think_puts_the_start_marker_back(pieces: Sequence[str]) -> None:
    assert split(AppendThink, OPEN, *pieces) == ("", "<think>why</think>because")
    assert split(AppendThink, CLOSED, *pieces) == ("", "why</think>because")
    events = read(AppendThink(OPEN), pieces)
    assert not any(isinstance(event.text, SpecialText) for event in events if isinstance(event, Text))


def test_append_think_says_so_even_of_an_empty_answer() -> None:
    assert split(AppendThink, OPEN) == ("", "<think>")
    assert split(AppendThink, CLOSED) == ("", "")


def test_append_think_leaves_other_tokens_as_pieces() -> None:
    events = read(AppendThink(OPEN), ["why", SpecialText("<minimax:tool_call>"), "x"])
    assert [type(event.text) for event in events if isinstance(event, Text)] == [str, SpecialText, str]
    check_cuts(AppendThink, ["why</think>because", "<minimax:tool_call>"], turn=CLOSED, max_examples=10)


@pytest.mark.parametrize("tail", ["", "</mm:think>"])
def test_minimax_m3_drops_an_end_marker_that_comes_first(tail: str) -> None:
    assert split(minimax_m3, given(tail), "</mm:think>answer") == ("", "answer")
    assert split(minimax_m3, given(tail), "XXX</mm:think>YYY") == ("", "XXX</mm:think>YYY")


def test_minimax_m3_starts_as_the_prompt_ends() -> None:
    assert split(minimax_m3, given("<mm:think>"), "plan</mm:think>answer") == ("plan", "answer")
    assert split(minimax_m3, UNTOLD, "<mm:", "think>plan</mm:", "think>answer") == ("plan", "answer")
    assert split(minimax_m3, UNTOLD, "plain") == ("", "plain")


def test_interns1_reasons_on_after_a_call() -> None:
    text = 'Tool.\n<|action_start|> <|plugin|>\n{"name": "f"}\n<|action_end|>\nOn.</think>Answer.'
    assert split(interns1, OPEN, text) == ("Tool.\n\nOn.", '<|action_start|> <|plugin|>\n{"name": "f"}\n<|action_end|>Answer.')
    parser = interns1(OPEN)
    phases = [parser.phase for piece in ("a<|action_start|>", "x", "<|action_end|>", "</think>") if parser.feed(piece) is not None]
    assert phases == [Phase.CONTENT, Phase.CONTENT, Phase.REASONING, Phase.CONTENT]


def test_olmo3_without_markers_is_content_where_the_prompt_does_not_tell() -> None:
    assert split(olmo3, UNTOLD, "No thoughts.") == ("", "No thoughts.")
    assert split(olmo3, given("<think>"), "\nwhy \n</think>\n\nbecause") == ("\nwhy \n", "\n\nbecause")


def test_seed_oss_with_a_budget_of_none_is_content() -> None:
    tail = "<seed:think>\n<seed:cot_budget_reflect>The budget is 0.</seed:cot_budget_reflect>\n</seed:think>"
    assert seed_oss(given(tail)).phase is Phase.CONTENT


@pytest.mark.parametrize(("effort", "name"), [("high", "think"), ("medium", "think_fast"), ("low", "think_faster"), (None, "think")])
def test_k2_horizon_closes_what_was_opened(effort: str | None, name: str) -> None:
    parsers = [k2_horizon(given(f"<ifm|{name}>")), k2_horizon(given(reasoning_effort=effort))]
    assert {(parser.start_marker, parser.end_marker) for parser in parsers} == {(f"<ifm|{name}>", f"</ifm|{name}>")}


def test_hy_v3_finds_the_suffix_of_its_markers() -> None:
    assert split(hy_v3, given("<think:ab12>"), "why</think:ab12>because") == ("why", "because")
    assert split(hy_v3, given("<think:ab12></think:ab12>"), "plain") == ("", "plain")
    vocabulary = frozenset({"<think:x>", "</think:x>", "<thinking"})
    assert hy_v3(Turn(added_tokens=vocabulary)).end_marker == "</think:x>"


def test_old_kimi_opens_its_reasoning_itself() -> None:
    assert split(kimi, UNTOLD, "◁thi", "nk▷why◁/th", "ink▷because") == ("why", "because")
    assert split(kimi, UNTOLD, "plain") == ("", "plain")


def test_an_end_of_several_pieces_stays_in_pieces() -> None:
    turn = Turn(prompt_tail="<think>", added_tokens=frozenset({"｜DSML｜"}))
    events = read(deepseek_v4(turn), ["why<", SpecialText("｜DSML｜", is_hidden=False), "tool_calls>x"])
    assert events == [Reasoning("why"), Text("<"), Text("｜DSML｜"), Text("tool_calls>x")]
    assert isinstance(events[2], Text)
    assert isinstance(events[2].text, SpecialText)
    assert not events[2].text.is_hidden
