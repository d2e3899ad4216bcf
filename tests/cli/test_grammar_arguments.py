"""The command line of `penstock grammar`: what it reads and what it refuses."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.flags import parse_arguments
from penstock.cli.grammar.arguments import PARSERS, GrammarArguments, parse_grammar_arguments

ROOT = Path(__file__).parent.parent.parent


def complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        parse_grammar_arguments(list(argv))
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_every_flag_reaches_its_field() -> None:
    flags = shlex.split(
        "--backend b --strict --additional-properties open --json --model m --trust-remote-code --plugin p --plugin q --without w"
    )
    expected = GrammarArguments(
        action="check",
        path="f",
        kind="lark",
        backend="b",
        is_strict=True,
        additional_properties="open",
        is_json=True,
        limit=None,
        model="m",
        trust_remote_code=True,
        plugins=("p", "q"),
        without=("w",),
    )
    assert parse_grammar_arguments(["check", "f", "--kind", "lark", *flags]) == expected
    tested = parse_grammar_arguments(["test", "f", "--limit", "7", *flags])
    assert (tested.action, tested.limit, tested.backend, tested.is_strict) == ("test", 7, "b", True)


def test_auto_is_no_backend_and_lenient_is_the_default() -> None:
    bare = parse_grammar_arguments(["test", "f"])
    assert parse_grammar_arguments(["test", "f", "--backend", "auto", "--lenient"]) == bare
    assert (bare.backend, bare.is_strict, bare.limit) == (None, False, None)


def test_a_check_reads_a_schema_as_a_server_does_and_a_test_as_it_is_written() -> None:
    assert (
        parse_grammar_arguments(["check", "f.json"]).additional_properties == parse_arguments([]).server.additional_properties == "closed"
    )
    assert parse_grammar_arguments(["test", "f"]).additional_properties == "open"


@pytest.mark.parametrize(
    ("name", "kind"), [("a.json", "json"), ("b.LARK", "lark"), ("c.gbnf", "gbnf"), ("c.ebnf", "gbnf"), ("x/d.regex", "regex")]
)
def test_a_files_name_says_what_it_holds(name: str, kind: str) -> None:
    assert parse_grammar_arguments(["check", name]).kind == kind
    assert parse_grammar_arguments(["check", name, "--kind", "choice"]).kind == "choice"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "action"),
        (["chek", "f"], "check"),
        (["check"], "FILE"),
        (["check", "-"], "add --kind json|regex|lark|gbnf|choice"),
        (["check", "f.txt"], "add --kind"),
        (["check", "f.json", "--bakend", "x"], "did you mean --backend?"),
        (["check", "f.json", "--limit", "1"], "unknown flag --limit"),
        (["test", "f", "--limit", "0"], "an integer of 1 or more"),
        (["test", "f", "--strict", "--lenient"], "not allowed with"),
    ],
)
def test_what_cannot_be_read_is_explained(capsys: pytest.CaptureFixture[str], argv: list[str], expected: str) -> None:
    assert re.search(re.escape(expected), complaint(capsys, *argv))


def test_the_word_grammar_comes_before_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--port", "0", "grammar"])
    assert "`grammar` goes before all flags" in capsys.readouterr().err


@pytest.mark.parametrize("action", PARSERS)
def test_every_flag_has_a_help_text(action: str) -> None:
    assert [argument.dest for argument in PARSERS[action]()._actions if not argument.help] == []


def test_help_does_not_wait_for_torch() -> None:
    script = "import sys, penstock.server as s\ntry: s.main(['grammar', 'check', '--help'])\nexcept SystemExit: print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert "Exit code" in said
    assert not {"torch", "transformers", "tokenizers", "pluggy"} & set(said.split())
