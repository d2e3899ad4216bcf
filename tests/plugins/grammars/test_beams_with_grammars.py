"""Beam search with the built-in grammar backends."""

import json
import math
import re

import jsonschema  # type: ignore[import-untyped]
import pytest

from penstock.engine.contracts.grammar import GrammarBackend, GrammarKind, GrammarSpec
from penstock.engine.sampling.params import BeamSearchParams
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.plugins.grammars.outlines_core.backend import OutlinesCoreBackend
from tests.fakes import EOS, TOKENIZER, VOCAB_SIZE, beam_request, content, generate, make_core, make_request, undecided

VOCABULARY = TOKENIZER.vocabulary(VOCAB_SIZE, [EOS])
BACKENDS: list[GrammarBackend] = [LlguidanceBackend(VOCABULARY), OutlinesCoreBackend(VOCABULARY)]


def found(backend: GrammarBackend, kind: GrammarKind, text: str, beam: BeamSearchParams) -> list[tuple[str, float | None]]:
    core = make_core(undecided, num_blocks=200)
    core.add(make_request("other", "x", max_tokens=9, temperature=1.0, seed=1))
    deltas = generate(core, beam_request("r", "?", beam, grammar=backend.compile(GrammarSpec(kind, text))))
    core.check_integrity()
    return [(content(deltas, delta.index), delta.beam_score) for delta in deltas if delta.beam_score not in (None, -math.inf)]


def test_backends_that_copy_their_place_and_those_that_do_not_find_the_same_answers() -> None:
    pattern = "[a-h]{2,4}( (no|nope|on)){1,2}"
    ours, others = (found(backend, GrammarKind.REGEX, pattern, BeamSearchParams(4, 30)) for backend in BACKENDS)
    assert ours == others
    assert len(ours) == 4
    assert all(re.fullmatch(pattern, text) for text, _ in ours)


def test_every_answer_is_an_instance_of_the_schema() -> None:
    properties = {"a": {"enum": ["x", "yes", "no"]}, "b": {"type": "integer", "minimum": 0, "maximum": 999}}
    schema = {"type": "object", "properties": properties, "required": ["a", "b"], "additionalProperties": False}
    answers = found(BACKENDS[0], GrammarKind.JSON_SCHEMA, json.dumps(schema), BeamSearchParams(4, 60))
    assert len(answers) == len(set(answers)) == 4
    for text, _ in answers:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_of_a_choice_are_found(backend: GrammarBackend) -> None:
    words = ["yes", "no", "never", "nothing"]
    answers = found(backend, GrammarKind.CHOICE, json.dumps(words), BeamSearchParams(6, 20))
    assert sorted(text for text, _ in answers) == sorted(words)
