"""`penstock grammar check` and `penstock grammar test`: constraints tried against the backends that a server would have."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from penstock.commands.files import opened
from penstock.commands.grammar_arguments import KINDS, GrammarArguments
from penstock.commands.grammar_bench import GrammarBench, schema_spec
from penstock.commands.grammar_check import check, check_as_json, check_as_text
from penstock.commands.grammar_report import trial_as_json, trial_as_text
from penstock.commands.grammar_trial import PARAM, Trial, run_trial
from penstock.engine.errors import ConfigurationError
from penstock.engine.grammar import GrammarKind, GrammarSpec
from penstock.engine.loading.model_config import read_answer_tokens
from penstock.engine.loading.model_store import model_name, resolve_model
from penstock.engine.text.tokenizer import Tokenizer
from penstock.plugins.manager import Plugins


def run_grammar_command(arguments: GrammarArguments, plugins: Plugins) -> int:
    """Prints what was found and returns the exit code, 0 or 1. Raises `ConfigurationError` for what cannot be tried at all."""
    with opened(arguments.path) as file:
        return check_file(file, arguments, plugins) if arguments.action == "check" else test_file(file, arguments, plugins)


def check_file(file: BinaryIO, arguments: GrammarArguments, plugins: Plugins) -> int:
    spec = read_spec(file, arguments)
    with grammar_bench(arguments, plugins) as bench:
        checked = asyncio.run(check(bench, spec, bench.backend_named(arguments.backend), is_strict=arguments.is_strict))
    about = {
        "file": arguments.path,
        "kind": spec.kind.value,
        "model": model_name(arguments.model),
        "additional_properties": arguments.additional_properties,
    }
    if arguments.is_json:
        print(json.dumps(check_as_json(checked, about), ensure_ascii=False))
    else:
        print("\n".join(check_as_text(checked, about)))
    return 0 if checked.chosen.grammar is not None else 1


def test_file(file: BinaryIO, arguments: GrammarArguments, plugins: Plugins) -> int:
    trial = Trial()
    with grammar_bench(arguments, plugins) as bench:
        backend = bench.backend_named(arguments.backend)
        try:
            reading, is_strict = arguments.additional_properties, arguments.is_strict
            asyncio.run(run_trial(trial, bench, file, backend, reading, is_strict=is_strict, limit=arguments.limit))
        finally:  # Ctrl-C in the middle of a long file loses none of the results
            print_trial(trial, arguments, backend)
    return 0 if trial.is_passed else 1


def print_trial(trial: Trial, arguments: GrammarArguments, backend: str | None) -> None:
    about = {
        "file": arguments.path,
        "model": model_name(arguments.model),
        "backend": backend or "auto",
        "is_strict": arguments.is_strict,
        "additional_properties": arguments.additional_properties,
    }
    if arguments.is_json:
        print(json.dumps(trial_as_json(trial, about), ensure_ascii=False))
    else:
        print("\n".join(trial_as_text(trial, about)))


def read_spec(file: BinaryIO, arguments: GrammarArguments) -> GrammarSpec:
    """The constraint as a request would bring it. Raises `ConfigurationError` where the file holds none of this kind."""
    kind = GrammarKind(KINDS[arguments.kind])
    try:
        text = file.read().decode("utf-8-sig")
        content = json.loads(text) if kind in (GrammarKind.JSON_SCHEMA, GrammarKind.CHOICE) else None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{arguments.path} cannot be read as {arguments.kind}: {error}") from error
    match kind:
        case GrammarKind.JSON_SCHEMA if not isinstance(content, dict | bool):
            raise ConfigurationError(f"{arguments.path} holds no JSON Schema: that is an object, true or false")
        case GrammarKind.CHOICE if not isinstance(content, list) or not all(isinstance(choice, str) for choice in content):
            raise ConfigurationError(f"{arguments.path} holds no choices: they are a JSON array of strings")
        case GrammarKind.JSON_SCHEMA:
            return schema_spec(content, PARAM, arguments.additional_properties)
        case GrammarKind.CHOICE:
            return GrammarSpec(kind, json.dumps(content, ensure_ascii=False), PARAM)
        case GrammarKind.REGEX:
            return GrammarSpec(kind, text.removesuffix("\n").removesuffix("\r"), "")
    return GrammarSpec(kind, text, "")


@contextmanager
def grammar_bench(arguments: GrammarArguments, plugins: Plugins) -> Iterator[GrammarBench]:
    """Over the model's tokenizer; its weights are not read."""
    directory = resolve_model(arguments.model, arguments.trust_remote_code)
    tokenizer = Tokenizer.load(directory, arguments.trust_remote_code)
    tokens = read_answer_tokens(directory, tokenizer, arguments.trust_remote_code)
    bench = GrammarBench(plugins.grammar_backends, tokenizer, tokens.vocab_size, tokens.stop_token_ids)
    try:
        yield bench
    finally:
        bench.close()
