"""What `--plugin auto` goes by: signs in a model's own files."""

from typing import Any

import pytest

from penstock.engine.contracts.hooks import Register, hookimpl
from penstock.engine.contracts.parsing import FormatInfo, Turn
from penstock.engine.errors import ConfigurationError
from penstock.plugins.manager import Evidence, Origin, Plugins, recognize
from penstock.plugins.reasoning.formats import FORMATS

deepseek_r1 = FORMATS["deepseek_r1"]


def info(*signs: str, but_not: tuple[str, ...] = (), aliases: tuple[str, ...] = ()) -> FormatInfo:
    return FormatInfo(models="", markers=(), signs=signs, counter_signs=but_not, aliases=aliases)


def test_signs_stand_in_any_template_or_are_added_tokens() -> None:
    evidence = Evidence(("{% if tools %}<call>", "other"), frozenset({"<think>"}))
    assert recognize({"mine": info("<call>", "<think>", "oth")}, evidence) == "mine"


def test_part_of_an_added_token_is_no_sign() -> None:
    assert recognize({"mine": info("<think")}, Evidence((), frozenset({"<think>"}))) is None


def test_a_format_needs_all_its_signs_and_none_of_the_others() -> None:
    evidence = Evidence(("<a><b>",))
    assert recognize({"missing": info("<a>", "<c>"), "counter": info("<a>", but_not=("<b>",))}, evidence) is None


def test_a_format_without_signs_is_never_recognized() -> None:
    assert recognize({"mine": info()}, Evidence(("anything",))) is None


def test_most_signs_count_before_longest_ones() -> None:
    evidence = Evidence(("<a><b><long>",))
    assert recognize({"one": info("<long>"), "two": info("<a>", "<b>")}, evidence) == "two"
    assert recognize({"short": info("<a>"), "long": info("<long>")}, evidence) == "long"


def test_other_signs_tell_as_much() -> None:
    infos = {"mine": FormatInfo(models="", markers=(), signs=("<a>", "<b>"), other_signs=(("<c>", "<d>", "<e>"),), counter_signs=("<no>",))}
    assert recognize(infos, Evidence(("<a><b>",))) == recognize(infos, Evidence(("<c><d><e>",))) == "mine"
    assert recognize(infos, Evidence(("<a><d>",))) is None
    assert recognize(infos, Evidence(("<c><d><e><no>",))) is None
    assert recognize(infos | {"two": info("<c>", "<d>")}, Evidence(("<c><d><e>",))) == "mine"


def test_what_a_checkpoint_declares_is_taken_where_no_signs_fit() -> None:
    infos = {"declared": FormatInfo(models="", markers=(), declared_fields=("reasoning", "thinking")), "signed": info("<a>")}
    assert recognize(infos, Evidence(("<a>",), declared_fields=frozenset({"thinking"}))) == "signed"
    assert recognize(infos, Evidence((), declared_fields=frozenset({"thinking", "content"}))) == "declared"
    assert recognize(infos, Evidence((), declared_fields=frozenset({"content"}))) is None


def plugins_with(**infos: FormatInfo) -> Plugins:
    class Plugin:
        @hookimpl
        def register_reasoning_parsers(self, register: Register) -> None:
            for name, format_info in infos.items():
                register(name, deepseek_r1, format_info)

    plugins = Plugins()
    plugins._add(Origin("test"), Plugin)
    return plugins


def test_what_the_operator_left_open_is_chosen_from_the_model() -> None:
    plugins = plugins_with(mine=info("<a>"))
    plugins.recognize(Evidence(("<a>",)))
    assert plugins.reasoning_parsers.active == "mine"
    assert plugins.reasoning_parsers.is_automatic
    assert plugins.tool_parsers.active is None
    assert plugins.reasoning_parser is not None
    assert plugins.reasoning_parser(Turn()).end_marker == "</think>"


def test_where_a_model_shows_no_format_of_calls_it_is_told_that_of_hermes() -> None:
    def chosen(*evidence: str, **options: Any) -> tuple[str | None, bool]:
        plugins = Plugins.start(**options)
        plugins.recognize(Evidence(evidence))
        return plugins.tool_parsers.active, plugins.tool_parsers.is_default

    assert chosen("{{ messages[0].content }}") == ("hermes", True)
    assert chosen("<tool_call>", "arguments") == ("hermes", False)
    assert chosen("[TOOL_CALLS]") == ("mistral", False)
    assert chosen(tool_parser="none") == chosen(names=["none"]) == chosen(without=["hermes"]) == (None, False)
    assert chosen(tool_parser="mistral") == ("mistral", False)


def test_what_the_operator_named_stays() -> None:
    plugins = plugins_with(mine=info("<a>"), other=info("<b>"))
    plugins.reasoning_parsers.activate("other")
    plugins.recognize(Evidence(("<a>",)))
    assert plugins.reasoning_parsers.active == "other"
    assert not plugins.reasoning_parsers.is_automatic


def test_naming_one_kind_leaves_the_other_open() -> None:
    plugins = Plugins.start(["deepseek_r1"])
    assert (plugins.reasoning_parsers.is_open, plugins.tool_parsers.is_open) == (False, True)
    plugins = Plugins.start(tool_parser="hermes")
    assert (plugins.reasoning_parsers.is_open, plugins.tool_parsers.is_open) == (True, False)
    assert plugins.tool_parsers.active == "hermes"


def test_auto_is_the_default_and_none_switches_it_off() -> None:
    assert Plugins.start(["auto", "hermes"]).reasoning_parsers.is_open
    plugins = Plugins.start(["none", "hermes"])
    assert not plugins.reasoning_parsers.is_open
    assert plugins.tool_parsers.active == "hermes"
    assert not Plugins.start(reasoning_parser="none").reasoning_parsers.is_open
    assert Plugins.start(reasoning_parser="none").tool_parsers.is_open


@pytest.mark.parametrize("names", [["auto", "none"], ["none", "auto"]])
def test_auto_and_none_contradict_each_other(names: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="contradict"):
        Plugins.start(names)


def test_none_of_a_kind_contradicts_a_name_of_it() -> None:
    with pytest.raises(ConfigurationError, match="contradicts `--plugin`, which names the reasoning parser 'deepseek_r1'"):
        Plugins.start(["deepseek_r1"], reasoning_parser="none")


def test_two_names_of_one_kind_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="two reasoning parsers"):
        Plugins.start(["deepseek_r1"], reasoning_parser="qwen3")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"reasoning_parser": "deepseek-r2"}, "`--reasoning-parser deepseek-r2`: .*did you mean .*'deepseek_r1'"),
        ({"tool_parser": "hermse"}, "`--tool-parser hermse`: .*did you mean 'hermes'"),
        ({"tool_parser": "deepseek_r1"}, "it is the name of a reasoning parser"),
        ({"tool_parser": "../mine.py"}, "the names are .*hermes"),
    ],
)
def test_a_wrong_name_of_a_kind_is_answered_with_near_ones(names: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Plugins.start(**names)


def test_a_near_alias_is_shown_with_what_it_stands_for() -> None:
    plugins = plugins_with(mine=info(aliases=("their-name",)))
    with pytest.raises(ConfigurationError, match=r"did you mean 'their-name' \(= 'mine'\)"):
        plugins.resolve(plugins.reasoning_parsers, "--reasoning-parser", "Their_Nam")
    assert plugins.resolve(plugins.reasoning_parsers, "", "their-name") == "mine"


@pytest.mark.parametrize("name", ["auto", "none"])
def test_the_words_of_the_flag_are_no_names(name: str) -> None:
    with pytest.raises(ConfigurationError, match="mean something else"):
        plugins_with(**{name: info()})
    with pytest.raises(ConfigurationError, match="mean something else"):
        plugins_with(mine=info(aliases=(name,)))


def test_a_checkpoints_template_that_cannot_be_read_is_said_at_start() -> None:
    plugins = Plugins.start(reasoning_parser="response_template")
    with pytest.raises(ConfigurationError, match=r"reasoning parser 'response_template' .* cannot be made"):
        plugins.recognize(Evidence(), Turn(response_template={"fields": {"content": {"close_pattern": "("}}}))
