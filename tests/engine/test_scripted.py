"""The scripted model: what it says through the whole engine, whatever the step, and what is wrong with a file."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.build import load
from penstock.engine.config import EngineConfig
from penstock.engine.core import EngineCore
from penstock.engine.errors import ConfigurationError
from penstock.engine.model.loader import LoadedModel
from penstock.engine.model.store import model_name, resolve_model
from penstock.engine.scripted.file import VOCAB_SIZE, read_script
from penstock.engine.scripted.model import END, position_after
from penstock.engine.text.tokenizer import Tokenizer
from tests.engines import core_over
from tests.fakes import drive, make_request, tokens

LINES: list[dict[str, Any]] = [
    {"model": {"name": "demo", "context_length": 512}},
    {
        "when": {"user": {"equals": "weather"}},
        "reasoning": "A tool.",
        "content": "Well.",
        "tool_calls": [{"name": "f", "arguments": {"a": "é"}}],
    },
    {"when": {"tool_result": {"contains": "18"}}, "content": "18 degrees"},
    {"when": {"tool_result": True}, "content": "a result"},
    {"when": {"turn": 1}, "content": "second turn"},
    {"when": {"user": {"matches": "^count"}}, "content": "one two ", "finish": "length"},
    {"when": {"prompt": {"contains": "system\nBe brief"}}, "content": "Brief."},
    {"when": {"user": {"equals": "begun"}, "prefill": "Sure, "}, "content": "it is."},
    {"when": {"user": {"equals": "raw"}}, "text": "<tool_call>"},
    {"when": {"user": {"equals": "ids"}}, "tokens": [72, 258, 105]},
    {"content": "The quick brown fox, the quick brown fox, the quick brown fox: and so on, and so on, and so on."},
]
FALLBACK = LINES[-1]["content"]


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("scripted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE", str(folder / "cache"))
        yield resolve_model(f"scripted:{write(folder / 'answers.jsonl', *LINES)}")


@pytest.fixture(scope="module")
def loaded(directory: Path) -> LoadedModel:
    return load(directory, EngineConfig(device="cpu"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


def chat(*messages: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages) + "<|im_start|>assistant\n"


def say(core: EngineCore, *prompts: str, is_chat: bool = True, **params: Any) -> list[str]:
    """The texts with their markers, without the one that ends them, of all prompts at once."""
    for number, prompt in enumerate(prompts):
        ids = core.tokenizer.encode(prompt, add_special_tokens=not is_chat)
        core.add(make_request(str(number), ids, **{"max_tokens": 300, "temperature": 1.0, **params}))
    deltas = drive(core)
    core.scheduler.blocks.check_integrity([])
    return [text_of(core, tokens(deltas[str(number)], index)) for number in range(len(prompts)) for index in range(params.get("n", 1))]


def text_of(core: EngineCore, token_ids: Sequence[int]) -> str:
    return core.tokenizer.decode([token_id for token_id in token_ids if token_id != END], skip_special_tokens=False)


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        (chat(("user", "weather")), '<think>A tool.</think>Well.<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'),
        (chat(("user", "x"), ("assistant", "y"), ("tool", "18")), "18 degrees"),
        (chat(("user", "x"), ("assistant", "y"), ("tool", "17")), "a result"),
        (chat(("user", "x"), ("assistant", "y"), ("user", "z")), "second turn"),
        (chat(("system", "Be brief"), ("user", "x")), "Brief."),
        (chat(("user", "begun")) + "Sure, ", "it is."),
        (chat(("user", "raw")), "<tool_call>"),
        (chat(("user", "ids")), "H<think>i"),
        (chat(("user", "anything")), FALLBACK),
        (chat(("user", "weather")) + "<think></think>", 'Well.<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'),
    ],
)
def test_the_first_line_whose_condition_holds_answers(loaded: LoadedModel, tokenizer: Tokenizer, prompt: str, answer: str) -> None:
    assert say(core_over(loaded, tokenizer), prompt) == [answer]


def test_a_completions_prompt_is_the_user_message(loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    core = core_over(loaded, tokenizer)
    assert say(core, "count", "raw", is_chat=False, max_tokens=20) == ["one two one two one ", "<tool_call>"]


@pytest.fixture(scope="module")
def answers(loaded: LoadedModel, tokenizer: Tokenizer) -> list[str]:
    """What each of the prompts gets alone."""
    return [text for prompt in PROMPTS for text in say(core_over(loaded, tokenizer), prompt)]


PROMPTS = [chat(("user", "weather")), chat(("user", "count")), chat(("user", "x" * 100)), chat(("user", "raw")), chat(("user", "ids"))]


@pytest.mark.parametrize(
    "settings",
    [
        {"speculation": "none"},
        pytest.param({"max_num_batched_tokens": 16}, marks=pytest.mark.thorough),
        {"num_blocks": 32},
        pytest.param({"max_num_seqs": 3, "async_scheduling": True}, marks=pytest.mark.thorough),
        {"enable_prefix_caching": False},
    ],
    ids=lambda settings: next(iter(settings)),
)
@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.thorough), 3])
def test_answers_are_the_same_however_they_are_scheduled(
    loaded: LoadedModel, tokenizer: Tokenizer, answers: list[str], settings: dict[str, Any], n: int
) -> None:
    expected = [text for answer in answers for text in n * [answer]]
    core = core_over(loaded, tokenizer, **settings)
    assert say(core, *PROMPTS, n=n) == expected
    assert say(core, *PROMPTS, n=n) == expected  # over the prefixes that are cached now
    if "num_blocks" in settings:
        assert core.stats().num_preemptions > 0


def test_repeated_text_is_drafted_and_accepted(loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    core = core_over(loaded, tokenizer)
    assert say(core, PROMPTS[1], max_tokens=200) == ["one two " * 25]
    assert core.stats().num_drafts > 0


@pytest.mark.parametrize("params", [{"temperature": 2.0}, {"frequency_penalty": 2.0, "presence_penalty": 2.0}, {"repetition_penalty": 2.0}])
def test_no_sampling_parameter_changes_an_answer(loaded: LoadedModel, tokenizer: Tokenizer, params: dict[str, Any]) -> None:
    assert say(core_over(loaded, tokenizer), chat(("user", "x")), **params) == [FALLBACK]


def test_what_was_not_said_is_skipped_and_what_was_not_scripted_does_not_count() -> None:
    scripted = list(b"Sure: {1}")
    assert position_after(scripted, list(b"Sure")) == 4
    assert position_after(scripted, list(b"{")) == 7
    assert position_after(scripted, list(b"{+")) == 7
    assert position_after(scripted, list(b"S{1}")) == 9


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "line 1: Input data was truncated"),
        (["", '{"content": 1}'], "line 2: Expected `str | null`, got `int` - at `$.content`"),
        ([{"content": "x", "whem": {}}], "line 1: Object contains unknown field `whem`"),
        ([{"content": "x", "when": {"user": {"is": "x"}}}], "line 1: Object contains unknown field `is` - at `$.when.user`"),
        (
            [{"content": "x", "when": {"user": {"matches": "("}}}],
            "line 1: `matches` is not a regex: missing ), unterminated subpattern at position 0 - at `$.when.user`",
        ),
        ([{"content": "x", "text": "x"}], "line 1: expected one of: `reasoning`, `content` and `tool_calls`; `text`; `tokens`"),
        ([{"when": {}}], "line 1: expected one of"),
        ([{"content": "x"}, {"model": {"name": "late"}}], "line 2: Object contains unknown field `model`"),
        ([{"model": {"context": 1}}], "line 1: Object contains unknown field `context` - at `$.model`"),
        ([{"tokens": [VOCAB_SIZE]}], "line 1: Expected `int` <= 262 - at `$.tokens[0]`"),
        ([{"model": {}}], "the script holds no answers"),
    ],
)
def test_a_mistake_is_reported_with_its_line_and_field(tmp_path: Path, lines: list[Any], message: str) -> None:
    path = write(tmp_path / "answers.jsonl", *lines)
    with pytest.raises(ConfigurationError) as refusal:
        read_script(path)
    assert message in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        resolve_model(f"scripted:{tmp_path / 'none.jsonl'}")


def test_the_name_is_the_one_in_the_file_or_the_files_own(tmp_path: Path) -> None:
    assert model_name(f"scripted:{write(tmp_path / 'answers.jsonl', {'content': 'x'})}") == "answers"
    assert model_name(f"scripted:{write(tmp_path / 'named.jsonl', {'model': {'name': 'gpt-5'}}, {'content': 'x'})}") == "gpt-5"
