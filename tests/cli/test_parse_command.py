"""`penstock parse`: what a text amounts to, as the server would answer it."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from penstock.cli.parse import Flags, LineParser, WrittenAnswer, as_json
from penstock.engine.contracts.parsing import FormatInfo, SpecialText
from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.text.answer import Answer
from penstock.engine.text.streaming import Detokenizer
from penstock.engine.text.tokenizer import Tokenizer
from penstock.plugins.manager import Plugins
from penstock.plugins.reasoning.formats import FORMATS
from penstock.plugins.tools.json_formats import HERMES
from penstock.server import main
from penstock.serving.messages import AssistantMessage, Message, MessageReader

deepseek_r1 = FORMATS["deepseek_r1"]
qwen3 = FORMATS["qwen3"]

CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts text on standard input."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def run_lines(give: Any, capsys: pytest.CaptureFixture[str], lines: list[Any], *flags: str) -> tuple[int, list[dict[str, Any]]]:
    give("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    code = main(["parse", "--jsonl", *flags])
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_text_is_shown_in_its_parts(give: Any, capsys: pytest.CaptureFixture[str]) -> None:
    give(f"<think>why</think>because {CALL}")
    assert main(["parse", "--reasoning-parser", "qwen3", "--prompt-tail", "", "--tool-parser", "hermes"]) == 0
    shown = r'\[reasoning_content\]\nwhy\n\[content\]\nbecause \n\[tool call call_\w+\]\nf \{"x": 1\}\n'
    assert re.fullmatch(shown, capsys.readouterr().out)


def test_a_text_without_parsers_is_content(give: Any, capsys: pytest.CaptureFixture[str]) -> None:
    give("<think>é\r\n")
    assert main(["parse", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"reasoning_content": None, "content": "<think>é\r\n", "tool_calls": []}


def test_flags_and_files_say_how_a_text_is_read(give: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    (tmp_path / "output.txt").write_text(f"because<|end|>{CALL}")
    flags = ["--tools", str(tmp_path / "tools.json"), "--special-token", "<|end|>", "--chunks", "3", "--tool-call-parser", "hermes"]
    assert main(["parse", str(tmp_path / "output.txt"), "--json", *flags]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["content"] == "because"
    (call,) = answer["tool_calls"]
    assert call == {"id": call["id"], "name": "f", "arguments": '{"x": 1}'}


def test_a_plugin_of_ones_own_is_selected_as_in_serving(give: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "thoughts.py").write_text(
        "from penstock import ThinkFormat, hookimpl\n\n\n"
        "@hookimpl\n"
        "def register_reasoning_parsers(register):\n"
        "    register('thoughts', ThinkFormat(models='Mine', start='[T]', end='[/T]'))\n"
    )
    give(f"[T]why[/T]because {CALL}")
    assert main(["parse", "--json", "--plugin", str(tmp_path / "thoughts.py"), "--plugin", "hermes"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["reasoning_content"], answer["content"], len(answer["tool_calls"])) == ("why", "because ", 1)


def test_each_line_says_how_it_is_read(give: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"text": "why</think>because", "reasoning_parser": "deepseek_r1", "prompt_tail": "", "note": "other keys are ignored"},
        {"text": "why", "reasoning_parser": "none"},
        {"text": CALL, "tool_parser": "hermes", "tools": TOOLS, "chunk_sizes": [1, 2]},
        {"text": "a</think>b", "prompt_tail": "<think>", "special_tokens": ["</think>"]},
        {"text": "a", "prompt_tail": None},
    ]
    code, answers = run_lines(give, capsys, lines, "--reasoning-parser", "qwen3", "--prompt-tail", "</think>")
    assert code == 0
    assert [(answer["reasoning_content"], answer["content"]) for answer in answers] == [
        ("why", "because"),
        (None, "why"),
        (None, None),
        ("a", "b"),
        (None, "a"),
    ]
    assert [call["arguments"] for call in answers[2]["tool_calls"]] == ['{"x": 1}']


def test_a_malformed_line_is_named_and_the_rest_goes_on(give: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        "no json",
        "",
        {"text": 1},
        {"text": "a", "tool_parser": "hermse"},
        {"text": "a", "chunk_sizes": [0]},
        {"text": "a", "tools": [{"type": "function"}]},
        {"text": "a"},
    ]
    code, answers = run_lines(give, capsys, lines)
    assert code == 1
    assert [answer.get("error", {}).get("line") for answer in answers] == [1, 3, 4, 5, 6, None]
    assert "did you mean 'hermes'" in answers[2]["error"]["message"]
    assert "tools[0]" in answers[4]["error"]["message"]
    assert answers[-1]["content"] == "a"


def test_a_parser_that_raises_is_named_with_its_line() -> None:
    def broken(turn: Any) -> Any:
        raise KeyError("function")

    plugins = Plugins()
    plugins.tool_parsers.add("broken", "test", broken)
    (failure,) = LineParser(plugins, Flags(tool_parser="broken")).messages([b'{"text": "a"}'])
    assert "KeyError: 'function'" in as_json(failure)


def test_without_a_prompt_tail_the_usual_one_of_the_parser_is_taken() -> None:
    plugins = Plugins()
    plugins.reasoning_parsers.add("mine", "test", qwen3, FormatInfo(models="", markers=(), prompt_tail="<think>\n"))
    (message,) = LineParser(plugins, Flags(reasoning_parser="mine")).messages([b'{"text": "why"}'])
    assert json.loads(as_json(message))["reasoning_content"] == "why"
    (message,) = LineParser(plugins, Flags(reasoning_parser="mine")).messages([b'{"text": "why", "prompt_tail": ""}'])
    assert json.loads(as_json(message))["content"] == "why"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--reasoning-parser", "qwen33"], "did you mean 'qwen3'"),
        (["--tools", "nowhere.json"], "nowhere.json cannot be read"),
        (["nowhere.txt"], "nowhere.txt cannot be read"),
    ],
)
def test_what_cannot_be_read_at_all_is_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], words: str) -> None:
    assert main(["parse", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{}", "[1]", "no"])
def test_tools_are_an_array_of_objects(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str) -> None:
    path = tmp_path / "tools.json"
    path.write_text(content)
    assert main(["parse", "--tools", str(path)]) == 2
    assert "tools.json" in capsys.readouterr().err


DECLARED = {"fields": {"thinking": {"open": "<why>", "close": "</why>"}, "content": {}}}


@pytest.mark.parametrize("content", [DECLARED, {"response_template": DECLARED, "eos_token": "</s>"}])
def test_a_checkpoints_own_template_is_a_file(give: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: Any) -> None:
    path = tmp_path / "template.json"
    path.write_text(json.dumps(content))
    give("<why>so</why>because")
    assert main(["parse", "--json", "--reasoning-parser", "response_template", "--response-template", str(path)]) == 0
    assert json.loads(capsys.readouterr().out) == {"reasoning_content": "so", "content": "because", "tool_calls": []}


def test_a_file_without_a_template_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "template.json"
    path.write_text("{}")
    assert main(["parse", "--response-template", str(path)]) == 2
    assert "holds no response template" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--tool-parser", "--plugin"])
def test_auto_has_no_model_to_look_at(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    with pytest.raises(SystemExit):
        main(["parse", flag, "auto"])
    assert "name the parsers" in capsys.readouterr().err


def tokenizer_of_bytes(*special_tokens: str) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special_tokens))
    return Tokenizer(backend, {}, {})


TEXTS = st.lists(st.sampled_from(["<think>", "</think>", "why ", CALL, "<tool_call>", '{"name"', "\n", "é", "<|im_end|>"]), max_size=8).map(
    "".join
)


@given(TEXTS, st.lists(st.integers(1, 5), max_size=4))
def test_the_message_is_the_one_that_the_server_answers(text: str, sizes: list[int]) -> None:
    tokenizer = tokenizer_of_bytes("<think>", "</think>", "<tool_call>", "<|im_end|>")
    special = frozenset(token.text for token in tokenizer.added_tokens.values())
    written = WrittenAnswer(text=text, tools=TOOLS, special_tokens=special, chunk_sizes=sizes)
    answer = Answer(Detokenizer(tokenizer), deepseek_r1(written.turn), HERMES(written.turn), [], False, True)
    reader, message = MessageReader(), Message()
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        message.add(reader.feed(SequenceDelta(0, events=answer.feed(token_id))))
    message.add(reader.feed(SequenceDelta(0, events=answer.finish(), finish_reason=FinishReason.STOP)))
    expected, actual = (
        json.loads(re.sub(r"call_\w+", "", as_json(each)))
        for each in (AssistantMessage.of(message, has_reasoning_parser=True), written.message(deepseek_r1, HERMES))
    )
    assert actual == expected


@given(TEXTS, st.lists(st.integers(1, 5), max_size=4))
def test_chunks_are_of_the_sizes_asked_for_and_lose_nothing(text: str, sizes: list[int]) -> None:
    pieces = list(WrittenAnswer(text=text, special_tokens=frozenset({"<think>"}), chunk_sizes=sizes).pieces())
    assert "".join(pieces) == text
    assert sum(isinstance(piece, SpecialText) for piece in pieces) == text.count("<think>")
    assert all(isinstance(piece, SpecialText) or len(piece) <= max(sizes, default=len(text)) for piece in pieces)


def test_markers_of_a_call_that_does_not_parse_are_shown_where_they_are_special_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a <tool_call>oops</tool_call> b"
    line = {"text": f"{text}<|im_end|>", "tool_parser": "hermes", "special_tokens": ["<tool_call>", "</tool_call>", "<|im_end|>"]}
    (tmp_path / "lines.jsonl").write_text(json.dumps(line))
    assert main(["parse", "--jsonl", str(tmp_path / "lines.jsonl")]) == 0
    assert json.loads(capsys.readouterr().out) == {"reasoning_content": None, "content": text, "tool_calls": []}
