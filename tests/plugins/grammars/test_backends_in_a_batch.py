"""Grammar backends side by side in one batch: two built-in ones and an installed one."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.contracts.grammar import GrammarBackend, GrammarKind, GrammarSpec, Vocabulary
from penstock.engine.request import Request
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.plugins.grammars.outlines_core.backend import OutlinesCoreBackend
from penstock.plugins.manager import Plugins
from tests.fakes import EOS, TOKENIZER, VOCAB_SIZE, content, drive, generate, make_core, make_request, runner_of, tokens

FAKE = TOKENIZER.vocabulary(VOCAB_SIZE, {EOS})


class LocalCompiler:
    """Compiles in this process, over the vocabulary of the fake model."""

    def __init__(self, vocabulary: Vocabulary) -> None: ...

    def prestart(self) -> None: ...

    def compile(self, ebnf: str) -> Any:
        import xgrammar

        tokens = [token or b"" for token in FAKE.token_bytes]
        info = xgrammar.TokenizerInfo(tokens, vocab_size=FAKE.size, stop_token_ids=[EOS])
        return xgrammar.GrammarCompiler(info, max_threads=1).compile_grammar(xgrammar.Grammar.from_ebnf(ebnf))


@pytest.fixture
def xgrammar_backend(example_plugins: Path, monkeypatch: pytest.MonkeyPatch) -> GrammarBackend:
    monkeypatch.syspath_prepend(example_plugins / "site")
    monkeypatch.setattr(importlib.import_module("penstock_plugin_xgrammar.backend"), "Compiler", LocalCompiler)
    return Plugins.start().grammar_backends["xgrammar"](FAKE)


def test_three_backends_share_a_batch(xgrammar_backend: GrammarBackend) -> None:
    """Each fills its own rows of the one mask, and no row says anything else than alone."""
    backends: list[GrammarBackend] = [xgrammar_backend, LlguidanceBackend(FAKE), OutlinesCoreBackend(FAKE)]
    schema = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"enum": ["字", [1, {"a": null}], 22]}')
    regex = GrammarSpec(GrammarKind.REGEX, "(ab|c){2,5}é?")
    grammars = [each.compile(spec) for spec in (schema, regex) for each in backends]

    def request(number: int) -> Request:
        grammar = grammars[number % 7] if number % 7 < 6 else None
        return make_request(str(number), "?" * (1 + number % 3), grammar=grammar, temperature=1.5, seed=number, max_tokens=60)

    together, alone = make_core(num_blocks=500, max_num_seqs=32), make_core()
    for number in range(28):
        together.add(request(number))
    said = drive(together)
    for number in range(28):
        assert tokens(said[str(number)]) == tokens(generate(alone, request(number)))
    of_schema, of_regex = ({content(said[str(number)]) for number in range(28) if number % 7 in kind} for kind in ((0, 1, 2), (3, 4, 5)))
    assert {text.replace(" ", "") for text in of_schema} <= {'"字"', '[1,{"a":null}]', "22"}
    assert all(re.fullmatch("(ab|c){2,5}é?", text) for text in of_regex)
    assert len(of_regex) > 1
    for core in (together, alone):
        runner_of(core).shutdown()
