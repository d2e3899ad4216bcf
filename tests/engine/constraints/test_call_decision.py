"""Tool calls or content under a grammar: the model's own distribution decides, and nothing of how an answer is computed shows in it."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.contracts.grammar import CompiledGrammar, GrammarKind, GrammarSpec
from penstock.engine.contracts.parsing import CallableTool, Phase, Text, ToolCallArguments, ToolCallStart, ToolParser, Turn
from penstock.engine.contracts.structure import Marker
from penstock.engine.contracts.structure import Sequence as Parts
from penstock.engine.core import EngineCore
from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.errors import InvalidRequest
from penstock.engine.request import AnswerFactory, Request
from penstock.engine.sampling.params import BeamSearchParams, SamplingParams
from penstock.engine.sequence_factory import SequenceFactory
from penstock.engine.text.answer import CallLimits, PreambleParams
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.plugins.manager import Plugins
from penstock.plugins.reasoning.formats import FORMATS
from penstock.plugins.tools.json_formats import BARE, HERMES, QWEN25
from tests.fakes import (
    ADDED,
    EOS,
    TOKENIZER,
    VOCAB_SIZE,
    NextToken,
    content,
    drive,
    generate,
    ids,
    make_core,
    preamble,
    reasoning,
    saying,
    tokens,
)

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
PROSE = "I cannot do that."
CONTENT = '{"answer":"no"}'
ANSWER = {"type": "object", "properties": {"answer": {"enum": ["no"]}}, "required": ["answer"], "additionalProperties": False}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
CUE = "=>"


@cache
def backend() -> LlguidanceBackend:
    return LlguidanceBackend(TOKENIZER.vocabulary(VOCAB_SIZE, {EOS}))


@cache
def compiled(kind: GrammarKind, text: str) -> CompiledGrammar:
    return backend().compile(GrammarSpec(kind, text, whitespace_pattern=""))


def calls_of(tool_format: Any, *, is_single: bool = False) -> CompiledGrammar:
    weather = CallableTool("weather", GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(CITY)))
    return compiled_structure(Parts((Marker(tool_format.opening), tool_format.calls([weather], is_single=is_single))))


@cache
def compiled_structure(structure: Parts) -> CompiledGrammar:
    return backend().compile(GrammarSpec(GrammarKind.STRUCTURE, "", structure=structure))


def asking(
    request_id: str = "r",
    prompt: str = "?",
    *,
    tools: Any = HERMES,
    is_free: bool = False,
    parser: Any = None,
    draft: int | None = None,
    schema: dict[str, Any] | None = None,
    choice: Sequence[str] = (),
    opening: str | None = None,
    **params: Any,
) -> Request:
    """The grammar is of the schema, or of a choice. A request that `is_free` has none."""
    sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": 100} | params))
    turn = Turn(added_tokens=ADDED, tools=TOOLS, tool_choice="auto")
    limits = CallLimits(opening=tools(turn).tool_format.opening)
    kind, text = (GrammarKind.CHOICE, json.dumps(choice)) if choice else (GrammarKind.JSON_SCHEMA, json.dumps(schema or ANSWER))
    return Request(
        request_id=request_id,
        prompt_token_ids=ids(prompt),
        params=sampling,
        make_answer=AnswerFactory(TOKENIZER, ids(prompt), sampling, parser, tools, turn, limits),
        grammar=None if is_free else compiled(kind, text),
        call_grammar=None if is_free else calls_of(tools(turn).tool_format),
        call_opening=opening,
        preamble=None if draft is None else PreambleParams(draft, tuple(ids(CUE)), reads_calls=True),
    )


def called(deltas: Sequence[SequenceDelta], index: int = 0) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for event in (event for delta in deltas if delta.index == index for event in delta.events):
        if isinstance(event, ToolCallStart):
            found.append((event.name, ""))
        elif isinstance(event, ToolCallArguments):
            found[-1] = (found[-1][0], found[-1][1] + event.fragment)
    return found


def said(text: str, *others: str, prompt: str = "?") -> NextToken:
    """The text, and where the answer is held to something else, one of the others, from where it begins."""
    wanted = [ids(text), *map(ids, others or (CONTENT,))]

    def next_token(token_ids: Sequence[int]) -> Tensor:
        so_far = list(token_ids[len(ids(prompt)) :])
        logits_V = torch.zeros(VOCAB_SIZE)
        for place, whole in enumerate(wanted):
            starts = range(len(so_far) + 1) if place else [0]
            start = next((start for start in starts if whole[: len(so_far) - start] == so_far[start:]), None)
            if start is not None:
                rest = whole[len(so_far) - start :]
                logits_V[rest[0] if rest else EOS] += 2.0 + (len(so_far) - start) / 100 if place else 9.0
        return logits_V

    return next_token


FACTORY = SequenceFactory(
    tokenizer=TOKENIZER,
    stop_token_ids=frozenset({EOS}),
    max_model_len=200,
    vocab_size=VOCAB_SIZE,
    device=torch.device("cpu"),
    speculation=None,
)
WEATHER = [("weather", '{"city": "Oslo"}')]


def test_a_model_that_calls_does_and_another_is_held_to_the_grammar() -> None:
    for text in (CALL, "\n\n" + CALL):
        deltas = generate(make_core(said(text)), asking())
        assert (called(deltas), content(deltas), deltas[-1].finish_reason) == (WEATHER, "", FinishReason.STOP)
    for text in (PROSE, CONTENT, "", "\n" + PROSE, "<tool", "<tool_call>{}</tool_call>", f"Well: {CALL}"):
        deltas = generate(make_core(said(text)), asking())
        assert (called(deltas), content(deltas), deltas[-1].finish_reason) == ([], CONTENT, FinishReason.STOP), text
        assert "".join(TOKENIZER.decode(tokens(deltas))) == CONTENT, "what was rolled back is not told of"


@pytest.mark.parametrize("tool_format", [HERMES, QWEN25, *BARE], ids=lambda one: one.name)
@pytest.mark.parametrize("is_draft", [False, True])
def test_a_call_counts_as_it_does_without_the_grammar(tool_format: Any, is_draft: bool) -> None:
    example = tool_format.info.example
    key = '"parameters"' if '"parameters"' in example else '"arguments"'
    fenced = f'```json\n{{\n  "name": "weather",\n  {key}: {{"city": "Oslo"}}\n}}\n```'
    call = CALL.split("\n")[1] if tool_format is QWEN25 else example  # whose example is not how its grammar writes it
    other = example.replace("weather", "whether")
    for text in (example, fenced, other, PROSE, '{"name": "Bob"}', CONTENT, "<", "```json\n[1]\n```"):
        free = generate(make_core(said(text)), asking(tools=tool_format, is_free=True))
        deltas = generate(make_core(said(text, CONTENT, call)), asking(tools=tool_format, draft=70 if is_draft else None))
        first = next((event for delta in free for event in delta.events), None)
        assert bool(called(deltas)) == (bool(called(free)) if is_draft else isinstance(first, ToolCallStart)), text
        assert [name for name, _ in called(deltas)] == ["weather"] * bool(called(deltas)), "calls are of the tools there are"
        assert bool(content(deltas)) != bool(called(deltas))


PARSERS = Plugins.start(["none"]).tool_parsers


QUICK = ("deepseek_v31", "glm45", "granite", "kimi_k2", "mistral", "olmo3", "qwen3_coder")  # one of each kind of notation


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in sorted(PARSERS)])
def test_a_call_in_any_wire_format_is_one(name: str) -> None:
    make = PARSERS[name]
    parser = make(Turn(added_tokens=ADDED, tools=TOOLS, tool_choice="auto"))
    assert isinstance(parser, ToolParser)
    if parser.tool_format is None:
        pytest.skip("its calls cannot be enforced")
    example = PARSERS.infos[name].example
    free = generate(make_core(said(example), max_model_len=256), asking(tools=make, is_free=True, max_tokens=220))
    deltas = generate(make_core(said(example, CONTENT, example), max_model_len=256), asking(tools=make, max_tokens=220))
    is_first = isinstance(next(event for delta in free for event in delta.events), ToolCallStart)
    assert bool(called(deltas)) == is_first
    if is_first:  # the model cannot go on where the grammar writes calls otherwise
        assert called(deltas)[0][0] == "weather"
        assert deltas[-1].finish_reason is FinishReason.LENGTH or not content(deltas)
    else:
        assert content(deltas) == CONTENT


class Hashes(ToolParser):
    """`#` and a digit is a call of `weather`; `##` is text."""

    class tool_format:
        opening = "#"

        @staticmethod
        def calls(tools: Any, *, is_single: bool) -> Any:
            from penstock.engine.contracts.structure import Value

            return Value(GrammarSpec(GrammarKind.REGEX, "[0-9]"))

    def __init__(self, turn: Turn) -> None:
        self._held = ""

    def feed(self, text: str) -> list[Any]:
        self._held += text
        if self._held == "#":
            return []
        held, self._held = self._held, ""
        if held[0] == "#" and held[1:].isdigit():
            return [ToolCallStart(0, "weather", "0"), ToolCallArguments(0, held[1:])]
        return [Text(held)]

    def finish(self) -> list[Any]:
        held, self._held = self._held, ""
        return [Text(held)] if held else []


FIRST = {"#": 0.4, "a": 0.15, "b": 0.05, "z": 0.4}
AFTER_HASH = {"1": 0.5, "2": 0.25, "#": 0.25}


def undecided_model(token_ids: Sequence[int]) -> Tensor:
    """A call with probability 0.3; of the contents `a` three times as often as `b`. After these it ends."""
    is_text = list(token_ids[-2:]) == ids("##")
    probs = {"": 1.0} if is_text else {ids("?")[0]: FIRST, ids(CUE)[-1]: FIRST, ids("#")[0]: AFTER_HASH}.get(token_ids[-1], {"": 1.0})
    logits_V = torch.full((VOCAB_SIZE,), -math.inf)
    for text, prob in probs.items():
        logits_V[ids(text)[0] if text else EOS] = math.log(prob)
    return logits_V


def test_calls_are_as_probable_as_without_the_grammar_and_content_is_as_under_it_alone() -> None:
    """240 seeds; the bounds are those of 99.9 % of the binomial distribution. And each seed calls as it does without the grammar."""
    core = make_core(undecided_model, max_num_seqs=64, max_num_batched_tokens=256, num_blocks=256, max_waiting=2000)
    for seed in range(240):
        core.add(asking(f"free {seed}", tools=Hashes, is_free=True, temperature=1.0, seed=seed))
        core.add(asking(f"held {seed}", tools=Hashes, choice=("a", "b"), temperature=1.0, seed=seed))
    answers = drive(core)
    free = [called(answers[f"free {seed}"]) for seed in range(240)]
    held = [called(answers[f"held {seed}"]) for seed in range(240)]
    assert held == free
    contents = [content(answers[f"held {seed}"]) for seed in range(240)]
    assert all((text in ("a", "b")) != bool(call) for text, call in zip(contents, held, strict=True))
    assert 49 <= sum(map(bool, held)) <= 96  # 0.3 of 240
    num_contents = sum(map(bool, contents))
    assert abs(contents.count("a") - 0.75 * num_contents) <= 3.3 * math.sqrt(num_contents * 0.75 * 0.25)


@pytest.mark.parametrize(("temperature", "is_called"), [(0.0, False), (0.05, False)])
def test_the_decision_is_sampled_as_everything_is(temperature: float, is_called: bool) -> None:
    """At a low temperature the most probable token decides, with top_k alone; a bias moves both requests alike."""
    likely = {ids("#")[0]: 0.5}
    for bias, expected in (({}, is_called), (likely, True)):
        ways: list[dict[str, Any]] = [{"temperature": temperature}, {"temperature": 1.0, "top_k": 1}]
        for kwargs in ways:
            core = make_core(tilted)
            request = asking(tools=Hashes, choice=("a", "b"), seed=3, logit_bias=bias, **kwargs)
            assert bool(called(generate(core, request))) == expected


def tilted(token_ids: Sequence[int]) -> Tensor:
    """As the other model, a little less for a call."""
    logits_V = undecided_model(token_ids)
    if token_ids[-1] == ids("?")[0]:
        logits_V[ids("#")[0]] -= 0.2
    if token_ids[-1] == ids("#")[0]:
        logits_V[ids("#")[0]] -= 5.0
    return logits_V


CORES: dict[str, dict[str, Any]] = {
    "speculation": {"rows_for_weights": 12.0},
    "overlap": {"is_async": True},
    "few at once": {"max_num_seqs": 3},
    "no prefix cache": {"enable_prefix_caching": False, "num_blocks": 50},
    "preemption": {"num_blocks": 50, "max_num_batched_tokens": 24},
    "windows": {"windows": (None, 8)},
    "recurrent": {"num_slots": 20},
}


def mixed(core: EngineCore) -> dict[str, Any]:
    """Answers of all kinds at once, in batches: sampled, several of a request, after reasoning, drafts, log probabilities."""
    for number in range(6):
        options: dict[str, Any] = {"temperature": 1.0, "seed": number, "tools": Hashes, "choice": ("a", "b")}
        core.add(asking(f"sampled {number}", **options))
        core.add(asking(f"several {number}", "?" * 9, n=3, logprobs=1, **options))
        core.add(asking(f"draft {number}", draft=3, **options))
        core.add(asking(f"penalties {number}", "?" * 17, frequency_penalty=0.5, repetition_penalty=1.2, **options))
    answers = {}
    for request_id, deltas in drive(core).items():
        for index in {delta.index for delta in deltas}:
            own = [delta for delta in deltas if delta.index == index]
            answers[f"{request_id}/{index}"] = (
                tokens(deltas, index),
                called(deltas, index),
                content(deltas, index),
                preamble(deltas, index),
                own[-1].finish_reason,
                [entry.token_id for delta in own for entry in delta.logprobs],
                sum(delta.prompt is not None for delta in own),
            )
    return answers


@cache
def expected() -> dict[str, Any]:
    return mixed(make_core(undecided_model, num_blocks=400))


@pytest.mark.parametrize("name", CORES)
def test_no_way_of_computing_answers_shows_in_them(name: str) -> None:
    answers = mixed(make_core(undecided_model, **({"num_blocks": 400} | CORES[name])))
    assert answers == expected()
    kinds = [(bool(calls), bool(text)) for _, calls, text, *_ in answers.values()]
    assert {(True, False), (False, True)} == set(kinds)
    assert all(number == 1 for *_, number in answers.values()), "the prompt is told of once"


def test_reasoning_stays_and_the_answer_is_decided_behind_it() -> None:
    for text in (CALL, PROSE, "\n\n" + CALL, "\n\n" + PROSE):
        for is_async in (False, True):
            model = said(f"<think>because</think>{text}", CONTENT)
            deltas = generate(make_core(model, is_async=is_async), asking(parser=FORMATS["qwen3"]))
            assert reasoning(deltas) == "because"
            assert (called(deltas), content(deltas)) == ((WEATHER, "") if CALL in text else ([], CONTENT))
            assert deltas[-1].num_reasoning_tokens == len("because") + 2


@pytest.mark.parametrize("draft", [None, 80])
def test_a_call_that_ends_the_reasoning_is_one(draft: int | None) -> None:
    for is_async in (False, True):
        deltas = generate(make_core(said(f"<think>because{CALL}"), is_async=is_async), asking(parser=FORMATS["qwen3"], draft=draft))
        assert (reasoning(deltas), called(deltas), content(deltas)) == ("because", WEATHER, "")
        assert tokens(deltas) == [*ids(f"<think>because{CALL}"), EOS]


def test_calls_in_a_draft_are_the_answer_and_text_before_them_is_the_preamble() -> None:
    deltas = generate(make_core(said(f"I look. {CALL}", CONTENT)), asking(draft=80))
    assert (called(deltas), content(deltas), preamble(deltas)) == (WEATHER, "", "I look. ")
    assert deltas[-1].num_preamble_tokens == len("I look. ")
    deltas = generate(make_core(said(PROSE, CONTENT)), asking(draft=80))
    assert (called(deltas), content(deltas), preamble(deltas)) == ([], CONTENT, PROSE)
    assert deltas[-1].num_preamble_tokens == len(PROSE + CUE)


def test_one_call_or_several_end_as_the_grammar_says() -> None:
    twice = f"{CALL}\n{CALL.replace('Oslo', 'Rome')}"
    deltas = generate(make_core(said(twice), max_model_len=256, num_blocks=80), asking(max_tokens=200))
    assert called(deltas) == [*WEATHER, ("weather", '{"city": "Rome"}')]
    request = asking(max_tokens=200)
    deltas = generate(
        make_core(said(twice), max_model_len=256, num_blocks=80), replace(request, call_grammar=calls_of(HERMES, is_single=True))
    )
    assert called(deltas) == WEATHER


def test_a_call_of_no_tool_is_made_one_of_those_there_are() -> None:
    """It is a call without the grammar, and stays one."""
    deltas = generate(make_core(said(CALL.replace("weather", "storm"), CALL)), asking())
    assert called(deltas) == WEATHER


def test_an_opening_that_counts_by_itself_is_a_call() -> None:
    text = "<tool_call>nonsense"
    assert called(generate(make_core(said(text, CALL)), asking(opening="<tool_call>"))) == WEATHER
    assert content(generate(make_core(said(text, CONTENT)), asking())) == CONTENT


def test_what_cuts_an_answer_leaves_no_free_text_in_it() -> None:
    deltas = generate(make_core(said(PROSE)), asking(max_tokens=1))
    assert (content(deltas), deltas[-1].finish_reason) == ("{", FinishReason.LENGTH)
    deltas = generate(make_core(said("<tool_call>\n{")), asking(max_tokens=5))
    assert (content(deltas), called(deltas), deltas[-1].finish_reason) == (CONTENT[:5], [], FinishReason.LENGTH)
    deltas = generate(make_core(said(CALL)), asking(max_tokens=40))
    assert (called(deltas)[0][0], content(deltas), deltas[-1].finish_reason) == ("weather", "", FinishReason.LENGTH)
    deltas = generate(make_core(said("cannot"), max_model_len=100), asking(stop=["cannot", "wer"]))
    assert (content(deltas), deltas[-1].finish_reason) == ('{"ans', FinishReason.STOP)


def test_content_and_calls_end_within_max_tokens_where_that_is_asked() -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"], "additionalProperties": False}
    for max_tokens in (30, 33, 40):
        core = make_core(said(PROSE, '{"answer":"' + "x" * 150))
        deltas = generate(core, replace(asking(schema=schema, max_tokens=max_tokens), ends_within=True))
        assert set(json.loads(content(deltas))["answer"]) == {"x"}
        assert (deltas[-1].finish_reason, deltas[-1].is_closed) == (FinishReason.STOP, True)
        assert len(tokens(deltas)) == max_tokens, "what was rolled back takes nothing of it"
    deltas = generate(make_core(said(CALL.replace("Oslo", "O" * 150))), replace(asking(max_tokens=95), ends_within=True))
    ((name, arguments),) = called(deltas)
    assert (name, set(json.loads(arguments)["city"])) == ("weather", {"O"})
    assert (deltas[-1].finish_reason, deltas[-1].is_closed, len(tokens(deltas))) == (FinishReason.STOP, True, 95)


def test_a_first_token_for_another_process_is_left_free() -> None:
    [first] = FACTORY.make(replace(asking(), is_exported=True), 0)
    assert (first.constraint, first.decision) == (None, None)
    assert first.answer.phase is Phase.CONTENT
    for text, answer in ((PROSE, ([], CONTENT)), (CALL, (WEATHER, ""))):
        deltas = generate(make_core(said(text)), replace(asking(), first_token_ids=tuple(ids(text[0]))))
        assert (called(deltas), content(deltas)) == answer


def test_neither_beams_nor_a_call_alone_can_be_decided_on() -> None:
    core = make_core(saying("a"))
    for changed in ({"beam": BeamSearchParams(2)}, {"grammar": None}):
        with pytest.raises(InvalidRequest):
            core.add(replace(asking(), **changed))
