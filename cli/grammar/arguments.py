"""The arguments of `penstock grammar`: check, test, audit."""

import argparse
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Literal

from penstock.cli.flags import CommandParser, add_model_choice, add_plugin_choice, add_reading_choice, read_arguments, reported
from penstock.engine.contracts.grammar import AdditionalProperties
from penstock.engine.options import integer

KINDS = {"json": "json_schema", "regex": "regex", "lark": "lark", "gbnf": "gbnf", "choice": "choice"}  # each with its `GrammarKind`
KINDS_BY_SUFFIX = {".json": "json", ".lark": "lark", ".gbnf": "gbnf", ".ebnf": "gbnf", ".regex": "regex"}
_EPILOG = "Only the tokenizer and the config of the model are read, not its weights. FILE may be -, which is standard input."


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEffort:
    """What an audit tries of each valid instance: spellings, tokenizations of each, and completions for each of those."""

    spellings: int = 8
    tokenizations: int = 8
    completions: int = 2
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarArguments:
    """`backend` is None for `auto`; `kind` is one of `KINDS`, for `check` only; `limit` and `effort` are not for `check`."""

    action: Literal["check", "test", "audit"]
    path: str
    kind: str
    backend: str | None
    is_strict: bool
    additional_properties: AdditionalProperties
    is_json: bool
    limit: int | None = None
    effort: AuditEffort = AuditEffort()
    beside: tuple[str, ...] = ()
    model: str | None
    trust_remote_code: bool
    plugins: tuple[str, ...]
    without: tuple[str, ...]


def parse_grammar_arguments(argv: list[str]) -> GrammarArguments:
    """Of what follows `penstock grammar`."""
    if not argv or argv[0] not in PARSERS:
        parser = build_overview_parser()
        parser.parse_args(argv)
        parser.error(f"say which: {', '.join(PARSERS)}")
    parser = PARSERS[argv[0]]()
    given = read_arguments(parser, argv[1:], GrammarArguments, action=argv[0])
    kind = given.kind or KINDS_BY_SUFFIX.get(PurePath(given.path).suffix.lower())
    if not kind:
        parser.error(f"{given.path} does not say what it holds: add --kind {'|'.join(KINDS)}")
    return replace(given, kind=kind)


def build_overview_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="penstock grammar",
        description="Try schemas and grammars against the grammar backends, without a server. "
        "check: the backend that compiles one constraint, and its unsupported parts. "
        "test: whether backends accept valid and refuse invalid instances, on a file of schemas with instances. "
        "audit: whether their masks forbid a token of a valid text, or allow one that leads to none, on such a file.",
        epilog="`penstock grammar check --help` and the like list the flags.",
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=tuple(PARSERS), help="what to do")
    return parser


def build_check_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="penstock grammar check",
        description="Prints which backend would compile the constraint by default, and for every backend whether it enforces the whole "
        "constraint, what it would leave out, or why it refuses; with compile times (medians) and sizes. "
        "Exit code: 0 accepted, 1 refused by all backends (or by the named one), 2 wrong usage or an unreadable file.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="FILE", help="the constraint: a JSON Schema, a regex, a grammar, or a JSON array of choices")
    parser.add_argument(
        "--kind",
        choices=tuple(KINDS),
        default="",
        help="kind of FILE (default: by its suffix: .json is a JSON Schema; .lark, .gbnf, .ebnf, .regex)",
    )
    _add_common_flags(parser, "closed")
    return parser


def build_test_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="penstock grammar test",
        description='Reads lines of {"schema": ..., "tests": [{"valid": true or false, "data": ...}]}; other keys are '
        "ignored. Compiles each schema, spells each instance in the model's tokens and takes it through the grammar token by token, to "
        "an allowed end. The text of an instance is that of Python's json.dumps(data, ensure_ascii=False): one blank after each comma and "
        "colon, no other white space, members in the file's order or, if that is refused, in the schema's. A schema is "
        "tried exactly first, and leniently if that is refused; the two are counted separately. Compile times are medians of three, none "
        "from a cache; mask times are of every mask. Exit code: 0 if "
        "every exactly compiled schema accepts valid instances and refuses invalid ones, and no "
        "lenient one refuses a valid instance; 1 otherwise, if a backend failed (reported as such; the next schema is tried) or if a "
        "line is malformed; 2 wrong usage or an unreadable file. Ctrl-C prints the results so far.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.set_defaults(kind="json")
    parser.add_argument("path", metavar="FILE.jsonl", help="schemas with instances, one schema a line")
    parser.add_argument("--limit", type=reported(integer(1)), metavar="N", help="only the first N schemas (default: all)")
    _add_common_flags(parser, "open")
    return parser


class _OfEffort(argparse.Action):
    """Puts a flag's value into the effort."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        namespace.effort = replace(namespace.effort, **{self.option_strings[0].removeprefix("--"): values})


def build_audit_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="penstock grammar audit",
        description='Reads the file of `penstock grammar test`; a line may also be {"regex": ...}, {"choice": [...]}, {"lark": ...}, '
        '{"gbnf": ...} or {"tool": {"name": ..., "parameters": ...}}, with "tests" of its own. Each valid instance is written in random '
        "legal spellings (white space that the backend generates) and in random tokens; texts for a regex, choice or grammar are "
        "generated, and a tool is called in every wire format. At every position, the tokens with which the text may continue must be "
        "allowed, and tokens that no text has there masked; some of the other allowed tokens are completed by walking the masks to an end, "
        "which must be valid. Constraints that no backend enforces exactly are counted and left out. Exit code: 0 if nothing was found; "
        "1 otherwise, or if a line is malformed; 2 wrong usage or an unreadable file. Ctrl-C prints the results so far.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.set_defaults(kind="json", effort=AuditEffort())
    parser.add_argument("path", metavar="FILE.jsonl", help="constraints with instances, one a line")
    parser.add_argument("--limit", type=reported(integer(1)), metavar="N", help="only the first N lines (default: all)")
    parser.add_argument(
        "--beside",
        action="append",
        default=[],
        choices=("backends", "raw"),
        help="audit every grammar backend too, or the engines as they come, and compare; repeatable; does not affect the exit code",
    )
    for name, least, what in (
        ("spellings", 1, "of each valid instance"),
        ("tokenizations", 1, "of each spelling"),
        ("completions", 0, "of allowed tokens, for each tokenization"),
        ("seed", 0, "of the random choices"),
    ):
        number = getattr(AuditEffort(), name)
        parser.add_argument(
            f"--{name}",
            action=_OfEffort,
            dest="effort",
            type=reported(integer(least)),
            metavar="N",
            help=f"{what} (default: {number})",
        )
    _add_common_flags(parser, "open")
    return parser


def _add_common_flags(parser: argparse.ArgumentParser, reading: AdditionalProperties) -> None:
    parser.add_argument(
        "--backend",
        default="auto",
        metavar="NAME",
        type=_named_backend,
        help="one backend (default: auto, as for a request that names none)",
    )
    fallback = parser.add_mutually_exclusive_group()
    fallback.add_argument(
        "--strict",
        dest="is_strict",
        action="store_true",
        help="as `strict: true`: refuse constraints that cannot be enforced completely (default: try them leniently)",
    )
    fallback.add_argument(
        "--lenient", dest="is_strict", action="store_false", help="the default: leave out keywords that cannot be enforced, with a warning"
    )
    add_reading_choice(parser, reading)
    parser.add_argument("--json", dest="is_json", action="store_true", help="print one JSON object")
    add_model_choice(parser.add_argument_group("model"))
    add_plugin_choice(parser.add_argument_group("plug-ins"), "load a plug-in and ask its grammar backends too; repeatable")
    parser.set_defaults(is_strict=False)


def _named_backend(name: str) -> str | None:
    return None if name == "auto" else name


PARSERS = {"check": build_check_parser, "test": build_test_parser, "audit": build_audit_parser}
