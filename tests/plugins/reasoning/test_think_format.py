"""Formats as declarations: every switch is used by some row, and from one row follow parser, markers, example and notes."""

from dataclasses import MISSING, fields, replace
from functools import cache
from pathlib import Path

import pytest

from penstock import FormatInfo, Phase, Reasoning, Text, ThinkFormat, Thinking, Turn
from penstock.plugins.manager import Plugins
from penstock.plugins.reasoning.formats import FORMATS
from penstock.testing import check_parser, read

EXAMPLE = Path(__file__).parents[3] / "examples" / "bracket_thoughts.py"
DEFAULTS = {field.name: field.default for field in fields(ThinkFormat) if field.default is not MISSING}


@cache
def registered() -> dict[str, FormatInfo]:
    return Plugins.start(["none"]).reasoning_parsers.infos


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_field_is_used_by_some_row(name: str) -> None:
    assert any(getattr(row, name) != DEFAULTS[name] for row in FORMATS.values())


def test_every_way_to_begin_is_used_by_some_row() -> None:
    assert {row.thinking for row in FORMATS.values()} == set(Thinking)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_registered_describes_itself(name: str) -> None:
    info = registered()[name]
    assert info == FORMATS[name].info
    assert FORMATS[name].start in info.markers or f"{FORMATS[name].start}{FORMATS[name].label}\n" in info.markers
    events = read(FORMATS[name](Turn(prompt_tail=info.prompt_tail)), [info.example])
    assert "".join(event.text for event in events if isinstance(event, Reasoning)).strip() == "Capitals."
    assert "".join(event.text for event in events if isinstance(event, Text)).strip() == "Oslo."


def test_markers_example_and_notes_follow_from_the_declaration() -> None:
    row = ThinkFormat(
        models="Mine",
        start="<a>",
        end="</a>",
        other_starts=("<turn><a>",),
        switches=("thinking", "enable_thinking"),
        off_efforts=("none",),
        implicit_ends=("<call>", "<tool>"),
        newlines_after_end=2,
        content_tags=("<b>", "</b>"),
        note="Seldom seen.",
    )
    assert row.info.markers == ("<a>", "</a>", "<b>", "</b>")
    assert row.info.example == "<a>Capitals.</a><b>Oslo.</b>"
    assert replace(row, prompt_tail="<a>\n").info.example == "Capitals.</a><b>Oslo.</b>"
    assert row.info.quirks == (
        "On unless `thinking` or `enable_thinking` is false or `reasoning_effort` is `none`. `<call>` or `<tool>` ends the reasoning. "
        "`<b>` around the content is removed. Removed line breaks: 2 after `</a>`. Seldom seen."
    )


def test_a_declaration_that_cannot_be_meant_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`implicit_ends` is a tuple, such as `\('<call>',\)`"):
        ThinkFormat(models="Mine", implicit_ends="<call>")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must not be empty"):
        ThinkFormat(models="Mine", end="")


def test_only_false_itself_is_off() -> None:
    row = ThinkFormat(models="Mine", switches=("thinking",))
    phases = [row(Turn(chat_template_kwargs={"thinking": value})).phase for value in (False, 0, None, "no", True)]
    assert phases == [Phase.CONTENT, *[Phase.UNDECIDED] * 4]


def test_an_explicit_description_stands_in_place_of_the_formats_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\n"
        "from penstock import ThinkFormat, hookimpl\n"
        "MINE = ThinkFormat(models='Mine')\n"
        "@hookimpl\n"
        "def register_reasoning_parsers(register):\n"
        "    register('mine', MINE, replace(MINE.info, models='Ours'))\n"
    )
    assert Plugins.start([str(tmp_path / "mine.py")]).reasoning_parsers.infos["mine"].models == "Ours"


SWITCHES = ThinkFormat(
    models="Mine",
    start="<a>",
    end="</a>",
    implicit_ends=("<call>",),
    inner_call=("<run>", "</run>"),
    label="why",
    newlines_after_start=1,
    newlines_before_end=1,
    newlines_after_end=1,
    drops_repeated_end=True,
    drops_leading_end=True,
    wrappers=("<out>", "</out>"),
)


@pytest.mark.parametrize(
    ("anywhere", "trims_space", "tail"), [(False, False, ""), (True, False, "<a>"), (False, True, "<a></a>"), (True, True, "")]
)
def test_switches_that_no_row_combines_keep_the_promises_together(anywhere: bool, trims_space: bool, tail: str) -> None:
    row = replace(SWITCHES, has_blocks_anywhere=anywhere, trims_space=trims_space)
    samples = ["<a>why\nso<run>x</run>\n</a>b", "</a> <a>q</a>\n<out><a></a><call>"]
    taken = ("<a>", "</a>", "<out>", "</out>", "why", "\n", " ")
    check_parser(row, samples, markers=taken, turn=Turn(prompt_tail=tail), max_examples=5)


def test_the_example_in_one_file_is_a_whole_plugin() -> None:
    plugins = Plugins.start([str(EXAMPLE)])
    assert plugins.reasoning_parsers.active == "bracket_thoughts"
    assert plugins.reasoning_parsers.infos["bracket_thoughts"].quirks == "On unless `thinking` is false."
    factory = plugins.reasoning_parser
    assert factory is not None
    check_parser(factory, ["[[why]]because", "because", "[[why"], markers=["[[", "]]"], max_examples=20)
    assert factory(Turn(chat_template_kwargs={"thinking": False})).phase is Phase.CONTENT
    assert read(factory(Turn(prompt_tail="[[")), ["why]]because"]) == [Reasoning("why"), Text("because")]
