"""The field's words: names, docstrings, comments, help, metrics, errors and docs are searched for phrases to avoid."""

import re
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli.admin import build_admin_parser
from penstock.cli.flags import (
    build_config_parser,
    build_keys_parser,
    build_new_plugin_parser,
    build_parse_parser,
    build_parser,
    build_plugins_parser,
)
from penstock.cli.grammar.arguments import PARSERS as GRAMMAR_PARSERS
from penstock.cli.selftest.arguments import build_selftest_parser

ROOT = Path(__file__).parents[2]
FOLDERS = ("api", "benchmarks", "cli", "docs", "engine", "examples", "integrations", "llm", "plugins", "scripts", "serving", "testing")
VENDORED = ROOT / "api" / "pages" / "swagger_ui"
SUFFIXES = (".py", ".md", ".h", ".cpp", ".toml", ".txt", "")  # the last two: what `penstock new-plugin` writes, and scripts

# A phrase, and what to write in its place. A blank is any white space, a comment's sign or an underscore.
AVOIDED = {
    r"who|whom|whoever": "things are not persons; for a person, name the role: client, caller, operator",
    r"nobody|somebody|anybody|everybody": "things are not persons: nothing, no request, no thread",
    r"what came of|came of its|became of": "the result or outcome of",
    r"what it (?:came|comes) to|(?:came|comes?) to an end": "the result; ended",
    r"tr(?:y|ies|ied)(?: tokens)? ahead": "speculative decoding, draft tokens",
    r"put(?:s|ting)? off": "deferred, postponed; cancelled",
    r"(?:is|are|be|was|were) let in|lets? in": "admit, accept",
    r"taken? back|takes back|took back": "roll back, undo, return",
    r"withdraw[ns]?|withdrew": "cancel, unpublish",
    r"(?:come|came)s? later": "is scheduled later, follows",
    r"there (?:is|are|was|were) none": "without one; None; is missing",
    r"(?:stands?|stood)(?! for\b)": "is, occurs, is written",
    r"told(?! apart)": "is passed, gets, describes; distinguished",
    r"in vain": "for nothing, wasted",
    r"drawers?": "module, package",
    r"of late": "recently, recent",
    r"as ever": "as usual",
    r"comes? again": "retry; is repeated",
    r"kn(?:ows?|ew) nothing": "is unaffected, is independent of",
    r"hold(?:s|ing)? up": "delay, block",
    r"unasked": "by default",
}
AVOIDED_IN_PAGES = AVOIDED | {  # pages and help only, but not the names of tests and flags in them
    r"go(?:es|ing)?\s+on": "continue",
    r"(?<![-_])beside(?![-_])": "next to, in addition to, with",
    r"(?<!_)whatever(?!_)": "regardless of, any",
    r"(?:counted|kept) apart": "separately",
}

ALLOWED = {  # by file: the words around a phrase in its ordinary sense
    "benchmarks/quality_tasks.py": ("left the box with somebody else", "To whom it may concern"),
    "docs/deployment.md": ("--kill-whom=main",),
    "docs/grammars.md": ("## Tool calls beside a constraint",),
    "docs/structured-quality.md": ("### Tool calls beside a schema",),
    "examples/embeddings.py": ("Who wrote Hamlet?",),
}
PROSE = ("benchmarks/passages.py",)  # passages of literature
PERSONS = re.compile(r"(?<![a-z])(?:who|whom|whoever|nobody|somebody|anybody|everybody)(?![a-z])", re.IGNORECASE)
ASKED = (
    "tests/project/test_words.py",
    "tests/cli/test_commands.py",
    "tests/real_models/test_agents.py",
    "tests/engine/test_equivalence.py",
)  # these phrases themselves, and prompts


def searched_files() -> list[str]:
    paths = [*ROOT.glob("*.py"), ROOT / "README.md", *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    names = (str(path.relative_to(ROOT)) for path in paths if path.is_file() and path.suffix in SUFFIXES and path.parent != VENDORED)
    return sorted(name for name in names if name not in PROSE)


def hits(text: str, allowed: tuple[str, ...] = (), avoided: dict[str, str] = AVOIDED) -> list[str]:
    for words in allowed:
        text = text.replace(words, "")
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", text)  # as in GiveBack
    phrases = "|".join(f"({phrase})" for phrase in avoided).replace(" ", r"(?:[\s_#*/]+)")
    return [
        f"line {words.count(chr(10), 0, match.start()) + 1}: {match.group()!r}; rather: {[*avoided.values()][(match.lastindex or 1) - 1]}"
        for match in re.finditer(rf"(?<![A-Za-z])(?:{phrases})(?![A-Za-z])", words, re.IGNORECASE)
    ]


@pytest.mark.parametrize("folder", ["", *FOLDERS])
def test_the_words_are_those_of_the_field(folder: str) -> None:
    paths = [path for path in searched_files() if path.partition("/")[0] == folder or (not folder and "/" not in path)]
    assert paths
    avoided = AVOIDED_IN_PAGES if folder == "docs" else AVOIDED
    found = {path: hits((ROOT / path).read_text(encoding="utf-8"), ALLOWED.get(path, ()), avoided) for path in paths}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_things_are_no_persons_in_tests_either() -> None:
    paths = [path for path in (ROOT / "tests").rglob("*.py") if str(path.relative_to(ROOT)) not in ASKED]
    assert [f"{path}: {match.group()}" for path in paths for match in PERSONS.finditer(path.read_text(encoding="utf-8"))] == []


HELP: list[Callable[[], ArgumentParser]] = [
    build_config_parser,
    build_keys_parser,
    build_selftest_parser,
    build_plugins_parser,
    build_parse_parser,
    build_new_plugin_parser,
    build_admin_parser,
    *GRAMMAR_PARSERS.values(),
    build_parser,
]


@pytest.mark.parametrize("build", HELP)
def test_help_has_the_words_of_the_field(build: Callable[[], ArgumentParser]) -> None:
    assert hits(build().format_help(), avoided=AVOIDED_IN_PAGES) == []


@pytest.mark.parametrize(
    "text",
    [
        "whoever waits",
        "class NobodyWaits:",
        "def take_back(self):",
        "def _let_in(): ...",
        "None where there is\n    # none",
        "where the\nengine stands",
        "is told of",
        "the rate of late",
        "knows\n# nothing of it",
    ],
)
def test_a_phrase_is_found_in_names_and_across_lines(text: str) -> None:
    assert hits(text)


@pytest.mark.parametrize("text", ["It goes on.", "beside it", "whatever\nit says", "are counted apart"])
def test_pages_and_help_avoid_more(text: str) -> None:
    assert hits(text, avoided=AVOIDED_IN_PAGES)
    assert hits(text) == []


@pytest.mark.parametrize("text", ["a request whose grammar", "standalone", "`*` stands for all", "told apart", "wholly", "outlet in use"])
def test_ordinary_words_are_not_found(text: str) -> None:
    assert hits(text) == []


WORDS = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("\n## Words\n")[1].split("\n## ")[0]
GLOSSARY = re.findall(r"^\| ([^|]+?) \|", WORDS, re.MULTILINE)[2:]


def test_every_word_of_the_glossary_is_used() -> None:
    def spaced(text: str) -> str:  # as in num_draft_tokens, DraftTokens and draft-tokens
        return re.sub(r"[\s_#*-]+", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", text)).lower()

    used = spaced(" ".join((ROOT / path).read_text(encoding="utf-8") for path in searched_files() if not path.endswith(".md")))
    words = [word for words in GLOSSARY for word in words.split(", ")]
    assert len(words) > 60
    assert [word for word in words if spaced(word) not in used] == []


def test_what_is_excepted_exists() -> None:
    assert [path for path in (*PROSE, *ALLOWED) if not (ROOT / path).exists()] == []
    assert all(words in (ROOT / path).read_text(encoding="utf-8") for path, allowed in ALLOWED.items() for words in allowed)
