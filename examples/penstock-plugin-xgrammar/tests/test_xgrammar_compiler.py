import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
from penstock_plugin_xgrammar import XgrammarBackend
from penstock_plugin_xgrammar import backend as xgrammar_backend
from penstock_plugin_xgrammar.compiler import LIMITS, Compiler, spelt_tokens

from penstock import GrammarKind, GrammarSpec, InvalidRequest, UnsupportedGrammar
from penstock.testing import byte_vocabulary

VOCABULARY = byte_vocabulary()


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    compiler = Compiler(VOCABULARY)
    yield compiler
    compiler.close()


def test_a_grammar_is_compiled_also_when_the_process_was_killed_before(compiler: Compiler) -> None:
    size = compiler.compile('root ::= "a"').memory_size_bytes
    (pid,) = compiler._sandbox.pids
    os.kill(pid, signal.SIGKILL)
    assert compiler.compile('root ::= "a"').memory_size_bytes == size
    assert compiler._sandbox.pids != [pid]


def test_what_takes_too_much_is_refused_and_not_the_next_grammar() -> None:
    compiler = Compiler(VOCABULARY, replace(LIMITS, cpu_seconds=1), max_bytes=2**20)
    for ebnf in ("(" * 60 + "[a-c]" + "{0,99999})" * 60, '"' + "abc" * 2**13 + '"'):
        with pytest.raises(InvalidRequest, match=r"more than 1 s of CPU|more than 1 MiB|memory") as refusal:
            compiler.compile(f"root ::= {ebnf}")
        assert len(refusal.value.message) < 200
    assert compiler.compile('root ::= "a"')
    compiler.close()


def test_a_refusal_is_one_line_with_the_place_and_keeps_the_process(compiler: Compiler) -> None:
    assert compiler.compile('root ::= "a"')
    pids = compiler._sandbox.pids
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile("root ::= " + "x" * 5000)
    assert "line 1, column 10" in caught.value.message
    assert len(caught.value.message) <= 200
    assert compiler._sandbox.pids == pids


class Exhausted:
    def prestart(self) -> None: ...

    def compile(self, ebnf: str) -> None:
        raise InvalidRequest("compiling took too long")


def test_a_limit_is_an_unsupported_grammar_that_names_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xgrammar_backend, "Compiler", lambda vocabulary: Exhausted())
    with pytest.raises(UnsupportedGrammar, match="xgrammar: compiling took too long") as refusal:
        XgrammarBackend(VOCABULARY).compile(GrammarSpec(GrammarKind.REGEX, "a", "guided_regex"))
    assert refusal.value.param == "guided_regex"


def test_tokens_that_no_text_holds_are_never_allowed() -> None:
    tokens = (b"a", b"\0", b"<end>", b"<call>", b"x" * 2**16, None)
    vocabulary = replace(VOCABULARY, token_bytes=tokens, size=7, stop_token_ids=frozenset({2}), added_token_ids={"<end>": 2, "<call>": 3})
    assert spelt_tokens(vocabulary) == [b"a", b"", b"", b"\xff3", b"", b""]
