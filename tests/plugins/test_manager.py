import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import LogitsProcessor, per_row
from penstock.engine.contracts.parsing import Text, Turn
from penstock.engine.errors import ConfigurationError
from penstock.plugins.manager import Plugins

WriteFile = Callable[[str, str], str]

REASONING = """
    from penstock import ThinkFormat, hookimpl

    deepseek_r1 = ThinkFormat(models="")

    @hookimpl
    def register_reasoning_parsers(register):
        register("{name}", deepseek_r1)
"""


@pytest.fixture
def write(tmp_path: Path) -> WriteFile:
    def write_file(name: str, source: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write_file


@pytest.fixture
def install(write: WriteFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], None]:
    """Puts a distribution with one entry point on the path, as an installer would."""

    def install_distribution(distribution: str, entry_point: str, source: str) -> None:
        module = distribution.replace("-", "_")
        write(f"site/{module}.py", source)
        write(f"site/{module}-1.2.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
        write(f"site/{module}-1.2.dist-info/entry_points.txt", f"[penstock]\n{entry_point} = {module}\n")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        monkeypatch.delitem(sys.modules, module, raising=False)

    return install_distribution


def test_nothing_is_registered_before_it_is_loaded() -> None:
    assert all(not registry for registry in Plugins().registries)


def test_built_in_plugins_come_through_the_hooks_of_everyone() -> None:
    plugins = Plugins.start()
    assert {"deepseek_r1", "qwen3", "granite"} <= set(plugins.reasoning_parsers)
    assert "hermes" in plugins.tool_parsers
    rows = {(row.kind, row.name): row for row in plugins.listing()}
    row = rows["tool parser", "hermes"]
    assert (row.plugin, row.distribution, row.is_active) == ("penstock.plugins.tools.json_formats", "penstock", False)
    assert row.version


def test_a_name_selects_the_parser_of_that_name() -> None:
    plugins = Plugins.start(["deepseek_r1", "hermes"])
    assert plugins.reasoning_parser is plugins.reasoning_parsers["deepseek_r1"]
    assert plugins.tool_parser is plugins.tool_parsers["hermes"]
    assert [row.name for row in plugins.listing() if row.is_active] == ["deepseek_r1", "hermes"]


def test_without_a_name_no_parser_is_selected() -> None:
    plugins = Plugins.start()
    assert plugins.reasoning_parser is None
    assert plugins.tool_parser is None


def test_the_same_parser_may_be_named_twice() -> None:
    assert Plugins.start(["qwen3", "qwen3"]).reasoning_parsers.active == "qwen3"


def test_two_reasoning_parsers_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"two reasoning parsers .*'deepseek_r1'.*'qwen3'"):
        Plugins.start(["deepseek_r1", "qwen3"])


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"--plugin deepseek_r2.*did you mean 'deepseek_r1'"):
        Plugins.start(["deepseek_r2"])


def test_the_beginning_of_several_names_offers_all_of_them() -> None:
    with pytest.raises(ConfigurationError, match=r"did you mean 'deepseek_r1' or 'deepseek_v3' .*or 'deepseek_v4'"):
        Plugins.start(["deepseek"])


def test_a_name_unlike_any_other_is_answered_with_all() -> None:
    with pytest.raises(ConfigurationError, match=r"the names are .*hermes"):
        Plugins.start(["zzzz"])


def test_other_values_of_an_option_are_offered_with_the_registered_names() -> None:
    plugins = Plugins.start([])
    with pytest.raises(ConfigurationError, match=r"the names are draft, ngram, none, suffix$"):
        plugins.resolve(plugins.proposers, "--speculation", "zzzz", ("draft", "none"))


def test_a_file_is_loaded_and_its_parser_selected(write: WriteFile) -> None:
    path = write("mine.py", REASONING.format(name="mine"))
    plugins = Plugins.start([path])
    assert plugins.reasoning_parsers.active == "mine"
    row = next(row for row in plugins.listing() if row.name == "mine")
    assert (row.plugin, row.distribution, row.version) == (path, None, None)


def test_a_module_is_loaded_and_its_parser_selected(write: WriteFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("my_penstock_module.py", REASONING.format(name="mine"))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert Plugins.start(["my_penstock_module"]).reasoning_parsers.active == "mine"


@pytest.mark.parametrize("source", ["import a_module_that_is_not_there", "raise RuntimeError('a_module_that_is_not_there')"])
def test_a_module_whose_package_fails_says_why(write: WriteFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    write("failing_package/__init__.py", source)
    write("failing_package/plugin.py", REASONING.format(name="mine"))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"'failing_package\.plugin' cannot be loaded: .*a_module_that_is_not_there"):
        Plugins.start(["failing_package.plugin"])


@pytest.mark.parametrize("name", ["no_such_package.plugin", "json.no_such_module", "..", "a b"])
def test_a_module_that_is_not_there_is_an_unknown_name(name: str) -> None:
    with pytest.raises(ConfigurationError, match="no registered name, plug-in, module"):
        Plugins.start([name])


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no such file"):
        Plugins.start(["nowhere/missing.py"])


def test_a_file_that_implements_no_hook_is_refused(write: WriteFile) -> None:
    path = write("forgot.py", "def register_tool_parsers(register):\n    pass\n")
    with pytest.raises(ConfigurationError, match=r"forgot\.py.*implements no hook.*@hookimpl"):
        Plugins.start([path])


def test_a_file_with_several_parsers_has_to_be_narrowed_down(write: WriteFile) -> None:
    source = """
        from penstock import ThinkFormat, hookimpl

        @hookimpl
        def register_reasoning_parsers(register):
            register("one", ThinkFormat(models="One"))
            register("two", ThinkFormat(models="Two"))
    """
    path = write("several.py", source)
    with pytest.raises(ConfigurationError, match=r"several reasoning parsers.*one, two"):
        Plugins.start([path])
    assert Plugins.start([path, "two"]).reasoning_parsers.active == "two"


def test_several_names_of_one_parser_need_no_choice(write: WriteFile) -> None:
    source = """
        from penstock import ThinkFormat, hookimpl

        ONE = ThinkFormat(models="One")

        @hookimpl
        def register_reasoning_parsers(register):
            register("one", ONE)
            register("also_one", ONE)
    """
    assert Plugins.start([write("aliases.py", source)]).reasoning_parsers.active == "one"


def test_logits_processors_and_their_classes_are_registered_at_construction() -> None:
    class Batched(LogitsProcessor):
        def process(self, rows: object, logits: object) -> None: ...

    of_row = per_row(lambda row, logits: None)
    plugins = Plugins.start()
    plugins.register_logits_processors({"batched": Batched, "of_row": of_row}, "LLM(logits_processors=...)")
    assert isinstance(plugins.logits_processors["batched"], Batched)
    assert plugins.logits_processors["of_row"] is of_row
    assert {row.plugin for row in plugins.listing() if row.name in ("batched", "of_row")} == {"LLM(logits_processors=...)"}


def test_a_logits_processor_that_clashes_or_is_none_is_an_error_that_says_where() -> None:
    plugins = Plugins.start()
    with pytest.raises(ConfigurationError, match=r"'no_repeat_ngram' is registered twice.*plugins\.decoding.*'my script'"):
        plugins.register_logits_processors({"no_repeat_ngram": per_row(lambda row, logits: None)}, "my script")
    with pytest.raises(
        ConfigurationError, match=r"'my script' called register\('five'.*does not derive from `penstock.LogitsProcessor`; `per_sequence"
    ):
        plugins.register_logits_processors({"five": lambda one, logits, three, four, five: None}, "my script")  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match="'none' mean"):
        plugins.register_logits_processors({"none": per_row(lambda row, logits: None)}, "my script")


PROPOSER = """
from penstock import hookimpl, proposer_of

@hookimpl
def register_proposers(register):
    register("{name}", lambda: proposer_of(lambda token_ids: []))
"""


def test_a_proposer_is_registered_unless_its_name_is_the_engines(write: WriteFile) -> None:
    plugins = Plugins.start([str(write("mine.py", PROPOSER.format(name="mine")))])
    assert list(plugins.proposers) == ["ngram", "suffix", "mine"]
    for name in ("draft", "prediction"):
        with pytest.raises(ConfigurationError, match=f"cannot register the proposer '{name}'"):
            Plugins.start([str(write(f"{name}.py", PROPOSER.format(name=name)))])


def test_a_name_registered_twice_is_an_error_that_names_both_plugins(write: WriteFile) -> None:
    path = write("again.py", REASONING.format(name="qwen3"))
    with pytest.raises(ConfigurationError, match=r"'qwen3' is registered twice.*plugins\.reasoning\.formats.*again\.py"):
        Plugins.start([path])


def test_a_misspelt_hook_is_an_error_at_start(write: WriteFile) -> None:
    path = write("typo.py", REASONING.format(name="mine").replace("parsers(", "parser("))
    with pytest.raises(ConfigurationError, match=r"typo\.py.*register_reasoning_parser.*did you mean 'register_reasoning_parsers'"):
        Plugins.start([path])


def test_a_hook_with_a_wrong_argument_is_an_error_at_start(write: WriteFile) -> None:
    path = write("argument.py", REASONING.format(name="mine").replace("(register)", "(registrar)"))
    with pytest.raises(ConfigurationError, match=r"argument\.py.*registrar"):
        Plugins.start([path])


def test_a_hook_that_raises_names_its_plugin(write: WriteFile) -> None:
    path = write("raises.py", REASONING.format(name="mine").replace('register("mine", deepseek_r1)', "1 / 0"))
    with pytest.raises(ConfigurationError, match=r"raises\.py.*ZeroDivisionError"):
        Plugins.start([path])


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("lambda turn: {}['marker']", "KeyError: 'marker'"),
        ("lambda: None", "TypeError"),
        ("lambda turn: deepseek_r1", "makes a ThinkFormat, which does not derive from `penstock.ReasoningParser`"),
    ],
)
def test_a_selected_parser_is_made_once_at_start(write: WriteFile, factory: str, words: str) -> None:
    source = textwrap.dedent(REASONING).format(name="mine").replace('"mine", deepseek_r1', f'"mine", {factory}')
    with pytest.raises(ConfigurationError, match=rf"reasoning parser 'mine' of plug-in '.*mine\.py'.*{re.escape(words)}"):
        Plugins.start([write("mine.py", source)])


@pytest.mark.parametrize("call", ["register('', deepseek_r1)", "register('mine', 1)", "register(deepseek_r1, 'mine')"])
def test_a_wrong_registration_names_its_plugin(write: WriteFile, call: str) -> None:
    path = write("wrong.py", REASONING.format(name="mine").replace('register("mine", deepseek_r1)', call))
    with pytest.raises(ConfigurationError, match=r"wrong\.py.*takes a name and a factory"):
        Plugins.start([path])


def test_a_parser_is_selected_by_an_alias_and_known_by_its_name(write: WriteFile) -> None:
    info = "FormatInfo(models='Mine', markers=('<mine>',), aliases=('my-r1',))"
    text = REASONING.format(name="mine").replace('"mine", deepseek_r1', f'"mine", deepseek_r1, {info}')
    path = write("mine.py", "    from penstock.engine.contracts.parsing import FormatInfo\n" + text)
    plugins = Plugins.start([path])
    plugins.load("my-r1")
    assert plugins.reasoning_parsers.active == "mine"
    assert plugins.reasoning_parsers.infos["mine"].models == "Mine"


def test_an_alias_that_is_taken_is_refused(write: WriteFile) -> None:
    info = "FormatInfo(models='Mine', markers=(), aliases=('qwen3',))"
    text = REASONING.format(name="mine").replace('"mine", deepseek_r1', f'"mine", deepseek_r1, {info}')
    with pytest.raises(ConfigurationError, match=r"'qwen3' is registered twice.*mine\.py"):
        Plugins.start([write("mine.py", "    from penstock.engine.contracts.parsing import FormatInfo\n" + text)])


def test_an_installed_plugin_is_there_but_not_selected(install: Callable[[str, str, str], None]) -> None:
    install("their-plugin", "theirs", REASONING.format(name="their_parser"))
    plugins = Plugins.start()
    assert plugins.reasoning_parser is None
    row = next(row for row in plugins.listing() if row.name == "their_parser")
    assert (row.plugin, row.distribution, row.version) == ("theirs", "their-plugin", "1.2")


@pytest.mark.parametrize("name", ["their_parser", "theirs", "their_plugin"])
def test_an_installed_plugin_is_selected_by_any_of_its_names(install: Callable[[str, str, str], None], name: str) -> None:
    install("their-plugin", "theirs", REASONING.format(name="their_parser"))
    assert Plugins.start([name]).reasoning_parsers.active == "their_parser"


def test_an_installed_plugin_that_cannot_be_imported_names_its_distribution(install: Callable[[str, str, str], None]) -> None:
    install("broken-plugin", "broken", "import a_module_that_is_not_there")
    with pytest.raises(ConfigurationError, match=r"'broken' of broken-plugin 1\.2.*a_module_that_is_not_there"):
        Plugins.start()


def test_a_dropped_plugin_is_not_even_imported(install: Callable[[str, str, str], None]) -> None:
    install("broken-plugin", "broken", "import a_module_that_is_not_there")
    assert "hermes" in Plugins.start(without=["broken"]).tool_parsers


def test_a_single_name_can_be_dropped_and_taken_by_another(write: WriteFile) -> None:
    path = write("again.py", REASONING.format(name="qwen3"))
    plugins = Plugins.start([path], without=["qwen3", "hermes"])
    assert plugins.reasoning_parsers.origins["qwen3"] == path
    assert "hermes" not in plugins.tool_parsers


def test_dropping_what_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"--without hermit.*did you mean 'hermes'"):
        Plugins.start(without=["hermit"])


def test_a_name_cannot_be_asked_for_and_dropped() -> None:
    with pytest.raises(ConfigurationError, match="contradict"):
        Plugins.start(["hermes"], without=["hermes"])


def test_factories_make_parsers() -> None:
    plugins = Plugins.start()
    for name, factory in (*plugins.reasoning_parsers.items(), *plugins.tool_parsers.items()):
        put_back = [Text("<think>")] if name == "minimax_m2_append_think" else []  # what the prompt has taken of the content
        assert factory(Turn()).finish() == put_back


def test_loading_plugins_does_not_load_torch() -> None:
    code = """if True:
        import sys
        from penstock.plugins.manager import Plugins
        Plugins.start(["deepseek_r1", "hermes"])
        assert not {"torch", "transformers", "outlines", "outlines_core"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True)
