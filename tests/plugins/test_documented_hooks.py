import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import per_row, per_sequence
from penstock.engine.contracts import hooks
from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec, Vocabulary
from penstock.engine.contracts.parsing import CallableTool, Reasoning, Text, ToolCallArguments, ToolCallStart, Turn
from penstock.engine.contracts.proposer import DraftedSequence
from penstock.engine.contracts.structure import Marker, Sequence
from penstock.engine.errors import UnsupportedKind
from penstock.plugins.calls.json_format import JsonFormat
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.plugins.manager import Evidence, Plugins, recognize
from penstock.testing import check_logits_processor, check_parser, check_tool_format, read
from penstock.testing.decoding import accepts, byte_vocabulary

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "plugins.md").read_text(encoding="utf-8")
PAGES = {
    "register_reasoning_parsers": ("parser-plugins.md", "reasoning-formats"),
    "register_tool_parsers": ("parser-plugins.md", "tool-formats"),
    "register_logits_processors": ("decoding-plugins.md", "logits-processors"),
    "register_grammar_backends": ("decoding-plugins.md", "grammar-backends"),
    "register_proposers": ("decoding-plugins.md", "proposers"),
}
PORTING = "\n## Coming from vLLM's parser classes\n"
HOOKS = [name for name, function in inspect.getmembers(hooks, inspect.isfunction) if hasattr(function, "penstock_spec")]


def blocks_of(hook: str) -> list[str]:
    """The Python on the hook's page, without the ports of vLLM's classes."""
    page, _, _ = (DOCS / PAGES[hook][0]).read_text(encoding="utf-8").partition(PORTING)
    return re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def examples_of(hook: str) -> list[str]:
    """Those that implement the hook from scratch: a declared format is another matter."""
    return [block for block in blocks_of(hook) if f"@hookimpl\ndef {hook}(" in block and "JsonFormat(" not in block]


def load_example(hook: str, folder: Path) -> Plugins:
    """The one example of this hook on its page, loaded as a file."""
    (example,) = examples_of(hook)
    path = folder / f"documented_{hook}.py"
    path.write_text(example)
    return Plugins.start([str(path)])


def test_every_hook_has_a_section_that_the_first_page_links_to() -> None:
    assert set(HOOKS) == set(PAGES)
    for hook, (page, section) in PAGES.items():
        assert f"| `{hook}` |" in PAGE
        assert f"]({page}#{section})" in PAGE


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented_and_its_example_has_a_test(hook: str) -> None:
    assert len(examples_of(hook)) == 1
    assert callable(getattr(sys.modules[__name__], f"test_the_example_of_{hook}", None))


def test_the_example_of_register_reasoning_parsers(tmp_path: Path) -> None:
    factory = load_example("register_reasoning_parsers", tmp_path).reasoning_parser
    assert factory is not None
    markers = ["<seed:think>", "</seed:think>", "<seed:tool_call>"]
    check_parser(factory, ["<seed:think>why</seed:think>because", "why<seed:tool_call>"], markers=markers)
    assert read(factory(Turn()), ["<seed:think>why<seed:tool_call>"]) == [Reasoning("why"), Text("<seed:tool_call>")]


def test_the_example_of_register_tool_parsers(tmp_path: Path) -> None:
    factory = load_example("register_tool_parsers", tmp_path).tool_parser
    assert factory is not None
    check_parser(factory, ["a<run>ls</run>b<run>c", "<ru"], markers=["<run>", "</run>"])
    check_parser(factory, ["a<run>ls</run>b"], markers=["<run>", "</run>"], turn=Turn(tool_choice="none"))
    events = read(factory(Turn(tool_choice="auto")), ["a<run>ls</run>"])
    assert events == [Text("a"), ToolCallStart(0, "shell", ""), ToolCallArguments(0, '{"command": "ls"}')]


def test_the_example_of_a_tool_format() -> None:
    (example,) = [block for block in blocks_of("register_tool_parsers") if "tool_format = " in block]
    names: dict[str, Any] = {}
    exec(example, names)
    check_tool_format(names["short_hermes"], markers=["<tool_call>", "</tool_call>"], num_walks=2)
    tools = [CallableTool("f", GrammarSpec(GrammarKind.JSON_OBJECT, ""))]
    same = JsonFormat(call="<tool_call>{object}</tool_call>")
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    vocabulary = byte_vocabulary()
    for tool_format in (names["ShortBlocks"](), same):
        structure = Sequence((Marker(tool_format.opening), tool_format.calls(tools, is_single=False)))
        grammar = LlguidanceBackend(vocabulary).compile(GrammarSpec(GrammarKind.STRUCTURE, "", structure=structure))
        assert accepts(grammar.matcher(), vocabulary, [text])


def test_the_example_of_calls_made_of_parameters() -> None:
    (example,) = [block for block in blocks_of("register_tool_parsers") if "MarkupFormat(" in block]
    names: dict[str, Any] = {}
    exec(example, names)
    row = names["ELEMENTS"]
    check_parser(row, ['a<calls><call name="f"><arg name="x">1</arg></call></calls>'], markers=row.all_markers, max_examples=25)
    check_tool_format(row, markers=row.all_markers, num_walks=2)


def test_a_format_that_a_plugin_declares_is_read_written_and_recognized(tmp_path: Path) -> None:
    (example,) = [block for block in blocks_of("register_tool_parsers") if "FORMAT = JsonFormat(" in block]
    path = tmp_path / "declared.py"
    path.write_text(example)
    registry = Plugins.start([str(path)]).tool_parsers
    assert registry.active == "call_blocks"
    assert registry.infos["call_blocks"].example == '<call>{"name": "weather", "arguments": {"city": "Oslo"}}</call>'
    assert recognize(registry.infos, Evidence(("It writes <call> and </call>.",))) == "call_blocks"
    factory = registry["call_blocks"]
    check_parser(factory, ['a<call>{"name": "f"}</call>b'], markers=["<call>", "</call>"], max_examples=10)
    check_tool_format(factory, markers=["<call>", "</call>"], num_walks=2)


def test_the_example_of_vllms_parser_classes_reads_the_same_calls(tmp_path: Path) -> None:
    _, _, porting = (DOCS / "parser-plugins.md").read_text(encoding="utf-8").partition(PORTING)
    blocks = re.findall(r"^```python\n(.*?)^```", porting, re.MULTILINE | re.DOTALL)
    theirs, tools, reasoning = blocks
    names: dict[str, Any] = {}
    exec(theirs, names)
    files = [tmp_path / "calls.py", tmp_path / "why.py"]
    for path, block in zip(files, (tools, reasoning), strict=True):
        path.write_text(block)
    plugins = Plugins.start(list(map(str, files)))
    assert plugins.tool_parser is not None
    assert plugins.reasoning_parser is not None
    text = 'Now:<call>{"name": "f", "arguments": {"x": 1}}</call><call>{"name": "g", "arguments": {}}</call>'
    calls, content = names["CallParser"]().extract_tool_calls(text, None)
    events = read(plugins.tool_parser(Turn(tool_choice="auto")), [text])
    assert content == "".join(event.text for event in events if isinstance(event, Text))
    assert [name for name, _ in calls] == [event.name for event in events if isinstance(event, ToolCallStart)]
    assert [arguments for _, arguments in calls] == [event.fragment for event in events if isinstance(event, ToolCallArguments)]
    check_parser(plugins.tool_parser, [text], markers=["<call>", "</call>"], max_examples=10)
    check_tool_format(plugins.tool_parser, markers=["<call>", "</call>"], num_walks=2)
    assert read(plugins.reasoning_parser(Turn()), ["<why>so</why>then"]) == [Reasoning("so"), Text("then")]


def test_the_example_of_register_logits_processors(tmp_path: Path) -> None:
    processor = load_example("register_logits_processors", tmp_path).logits_processors["recent_tokens"]
    process = processor.begin(window=2, penalty=3.0)
    assert process([0, 1, 2, 2], torch.zeros(4)).tolist() == [0.0, 0.0, -3.0, 0.0]
    with pytest.raises(ValueError, match="window"):
        processor.begin(window=0)


@pytest.mark.parametrize(
    ("name", "adapter", "arguments", "refused"),
    [
        ("recent_tokens", per_sequence, {"window": 2}, {"window": 0}),
        ("house_style", per_row, {"banned": [1, 2]}, {}),
        ("Boost", lambda processor: processor, {"ids": [1], "by": 2.5}, {"ids": []}),
    ],
)
def test_the_examples_of_logits_processors_keep_to_what_the_engine_relies_on(name: str, adapter: Any, arguments: Any, refused: Any) -> None:
    (example,) = [block for block in blocks_of("register_logits_processors") if re.search(rf"^(def|class) {name}\b", block, re.MULTILINE)]
    names: dict[str, Any] = {}
    exec(example, names)
    check_logits_processor(adapter(names[name]), arguments)
    with pytest.raises((TypeError, ValueError)):
        check_logits_processor(adapter(names[name]), refused)


def test_the_example_of_register_grammar_backends(tmp_path: Path) -> None:
    factory = load_example("register_grammar_backends", tmp_path).grammar_backends["one_of"]
    token_bytes = (b"ye", b"s", b"no", b"nope", *[b"x"] * 27, b"n", None)
    backend = factory(Vocabulary(token_bytes, size=40, stop_token_ids=frozenset({32}), fingerprint=""))
    compiled = backend.compile(GrammarSpec(GrammarKind.CHOICE, '["yes", "no", "nope"]'))
    assert compiled.num_bytes
    assert not compiled.warnings
    matcher = compiled.matcher()

    def allowed() -> list[int]:
        row = torch.full((2,), -1, dtype=torch.int32)
        matcher.fill_bitmask(row)
        return [token_id for token_id in range(64) if int(row[token_id // 32]) >> token_id % 32 & 1]

    assert allowed() == [0, 2, 3, 31]
    assert not matcher.advance(1)
    assert matcher.advance(2)
    assert allowed() == [32]
    matcher.rollback(1)
    assert matcher.advance(0)
    assert allowed() == [1]
    assert matcher.advance(1)
    assert matcher.finished
    assert matcher.advance(32)
    with pytest.raises(UnsupportedKind, match="choices only"):
        backend.compile(GrammarSpec(GrammarKind.REGEX, "a*"))


@pytest.mark.parametrize("word", ["--plugin", "--without", "penstock new-plugin", "check_parser"])
def test_the_first_page_names_flags_and_commands(word: str) -> None:
    assert word in PAGE


@pytest.mark.parametrize("event", ["Text(text)", "Reasoning(text)", "ToolCallStart(index, name, id)", "ToolCallArguments(index, fragment)"])
def test_the_reference_of_parsers_names_every_event(event: str) -> None:
    assert event in (DOCS / "parser-plugins.md").read_text(encoding="utf-8")


def test_the_example_of_register_proposers(tmp_path: Path) -> None:
    proposer = load_example("register_proposers", tmp_path).proposers["last_line"]()
    token_ids = [5, 198, 7, 8]
    sequence = proposer.begin(DraftedSequence(token_ids=token_ids, num_prompt_tokens=4))
    assert sequence.read()
    assert not sequence.has_guess
    token_ids.append(198)
    assert sequence.read()
    assert sequence.propose(2) == [7, 8]
    before = sequence.accuracy
    token_ids.append(9)
    assert sequence.read()
    assert sequence.accuracy < before
