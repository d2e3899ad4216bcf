"""Constrained answers that end within their `max_tokens`, by models that never end one."""

import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor

from penstock.engine.contracts.grammar import CompiledGrammar, GrammarKind, GrammarSpec
from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from tests.fakes import EOS, TOKENIZER, VOCAB_SIZE, content, generate, ids, make_core, make_request, tokens

VOCABULARY = TOKENIZER.vocabulary(VOCAB_SIZE, {EOS})
BACKEND = LlguidanceBackend(VOCABULARY)


def compiled(schema: Any) -> CompiledGrammar:
    return BACKEND.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


def endless(liked: str) -> Callable[[Sequence[int]], Tensor]:
    """A model that likes these characters, others less, and hardly ever what ends a value."""

    def logits(history: Sequence[int]) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(str(list(history)).encode()))
        logits_V = torch.randn(VOCAB_SIZE, generator=generator)
        logits_V[ids(liked)] += 20
        logits_V[[*ids('"}]'), EOS]] -= 20
        return logits_V

    return logits


MODELS = {"text": "abc", "numbers": "0123456789.", "lists": "[,1", "objects": '{:,"', "all": '[{,"1a:'}


def answer_of(deltas: Sequence[SequenceDelta]) -> tuple[str, int, FinishReason | None, bool | None]:
    return content(deltas), len(tokens(deltas)), deltas[-1].finish_reason, deltas[-1].is_closed


def real_schemas() -> list[tuple[str, Any]]:
    lines = (Path(__file__).parents[2] / "cli" / "real_schemas.jsonl").read_text().splitlines()
    return [(case["name"], case["schema"]) for case in map(json.loads, lines)]

import time

def test_all() -> None:
    bad = 0; n = 0
    t0=time.time()
    for name, schema in real_schemas()[int(sys.argv[-1]) if False else 0::4]:
        try:
            grammar = compiled(schema)
        except UnsupportedGrammar:
            continue
        for model, liked in MODELS.items():
            for max_tokens in (40, 77):
                core = make_core(endless(liked), num_blocks=200, max_model_len=400)
                request = make_request(grammar=grammar, ends_within=True, max_tokens=max_tokens)
                try:
                    deltas = generate(core, request)
                except Exception as e:
                    print(name, model, max_tokens, repr(e)[:150]); break
                text, num, reason, closed = answer_of(deltas)
                n += 1
                ok = reason is FinishReason.STOP
                if ok:
                    try: jsonschema.validate(json.loads(text), schema)
                    except Exception as e: ok = False
                if not ok or num > max_tokens:
                    bad += 1
                    print("BAD", name, model, max_tokens, num, reason, closed, text[-100:], deltas[-1].error)
    print(bad, n, time.time()-t0)
