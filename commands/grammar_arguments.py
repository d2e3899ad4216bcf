"""The command line of `penstock grammar`: its flags, their defaults and their meaning. Imports nothing heavy."""

import argparse
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from penstock.arguments import CommandParser, add_model_choice, add_plugin_choice, add_reading_choice, integer
from penstock.engine.grammar import AdditionalProperties

KINDS = {"json": "json_schema", "regex": "regex", "lark": "lark", "gbnf": "gbnf", "choice": "choice"}  # each with its `GrammarKind`
KINDS_BY_SUFFIX = {".json": "json", ".lark": "lark", ".gbnf": "gbnf", ".ebnf": "gbnf", ".regex": "regex"}
_EPILOG = "Only the tokenizer and the config of the model are read, not its weights. FILE may be -, which is standard input."


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarArguments:
    """What the command line said. `backend` is None for `auto`; `kind` is one of `KINDS`, for `check` only."""

    action: Literal["check", "test"]
    path: str
    kind: str
    backend: str | None
    is_strict: bool
    additional_properties: AdditionalProperties
    is_json: bool
    limit: int | None
    model: str | None
    trust_remote_code: bool
    plugins: tuple[str, ...]
    without: tuple[str, ...]


def parse_grammar_arguments(argv: list[str]) -> GrammarArguments:
    """Of what follows `penstock grammar`. Exits with code 2 for what cannot be read, and with 0 after help."""
    if not argv or argv[0] not in PARSERS:
        parser = build_overview_parser()
        parser.parse_args(argv)
        parser.error("say which: check or test")
    parser = PARSERS[argv[0]]()
    given = parser.parse_args(argv[1:])
    kind = getattr(given, "kind", None) or KINDS_BY_SUFFIX.get(PurePath(given.file).suffix.lower())
    if kind is None and argv[0] == "check":
        parser.error(f"{given.file} does not say what it holds: add --kind {'|'.join(KINDS)}")
    return GrammarArguments(
        action="check" if argv[0] == "check" else "test",
        path=given.file,
        kind=kind or "json",
        backend=None if given.backend == "auto" else given.backend,
        is_strict=given.strict,
        additional_properties=given.additional_properties,
        is_json=given.json,
        limit=getattr(given, "limit", None),
        model=given.model,
        trust_remote_code=given.trust_remote_code,
        plugins=tuple(given.plugin),
        without=tuple(given.without),
    )


def build_overview_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="penstock grammar",
        description="Try schemas and grammars against the grammar backends, without a server. "
        "check: which backend takes one constraint, and what in it is unsupported. "
        "test: whether backends accept and refuse what they should, on a file of schemas with instances.",
        epilog="`penstock grammar check --help` and `penstock grammar test --help` list the flags.",
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=tuple(PARSERS), help="what to do")
    return parser


def build_check_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="penstock grammar check",
        description="Says which backend a request without a named one would get, and for every backend whether it enforces the whole "
        "constraint, what it would leave out, or why it refuses; with compile times (medians) and sizes. "
        "Exit code: 0 taken, 1 taken by none (or not by the named one), 2 wrong usage or an unreadable file.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="the constraint: a JSON Schema, a regex, a grammar, or a JSON array of choices")
    parser.add_argument(
        "--kind", choices=tuple(KINDS), help="what FILE holds (default: by its name: .json is a JSON Schema; .lark, .gbnf, .ebnf, .regex)"
    )
    _add_common_flags(parser, "closed")
    return parser


def build_test_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="penstock grammar test",
        description='Reads lines of {"schema": ..., "tests": [{"valid": true or false, "data": ...}]}; other keys are '
        "ignored. Compiles each schema, spells each instance in the model's tokens and takes it through the grammar token by token, to "
        "an allowed end. The text of an instance is that of Python's json.dumps(data, ensure_ascii=False): one blank after each comma and "
        "colon, no other white space, members in the file's order or, where that is refused, in the schema's. A schema is "
        "tried exactly first, leniently where that is refused; the two are counted apart. Compile times are medians of three, none from a "
        "cache; times of masks are of every one. Exit code: 0 where "
        "every exactly compiled schema accepts what is valid and refuses what is not, and no "
        "lenient one refuses what is valid; 1 otherwise, where a backend failed (reported as such; the next schema is tried) or where a "
        "line is malformed; 2 wrong usage or an unreadable file. Ctrl-C prints what has been tried so far.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE.jsonl", help="schemas with instances, one schema a line")
    parser.add_argument("--limit", type=integer(1), metavar="N", help="only the first N schemas (default: all)")
    _add_common_flags(parser, "open")
    return parser


def _add_common_flags(parser: argparse.ArgumentParser, reading: AdditionalProperties) -> None:
    parser.add_argument("--backend", default="auto", metavar="NAME", help="one backend (default: auto, as for a request that names none)")
    fallback = parser.add_mutually_exclusive_group()
    fallback.add_argument(
        "--strict", action="store_true", help="as `strict: true`: refused unless all of it is enforced (default: then try leniently)"
    )
    fallback.add_argument("--lenient", dest="strict", action="store_false", help="the default: try leniently what is refused exactly")
    add_reading_choice(parser, "", reading)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_choice(parser.add_argument_group("model"))
    add_plugin_choice(parser.add_argument_group("plug-ins"), "load a plug-in and ask its grammar backends too; repeatable")
    parser.set_defaults(strict=False)


PARSERS = {"check": build_check_parser, "test": build_test_parser}
