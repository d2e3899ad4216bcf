"""The arguments of `penstock selftest`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.cli.flags import COMMAND_LINE, CommandParser, Configuration, add_server_flags, configured, given_flags, reported
from penstock.engine.errors import ConfigurationError
from penstock.engine.options import integer
from penstock.engine.scripted.file import PREFIX, is_scripted
from penstock.serving.options import OPTIONS

ROUNDING = 0.5  # nats; see docs/selftest.md
# What the test varies itself, and why a value for it cannot be taken.
VARIED = {
    "models": "one model is tested",
    "api_servers": "the test runs in one process",
    "kv_cache_dir": "the test has one of its own",
    "prefix_caching": "the test switches it itself",
    "adaptive_speculation": "the test switches it itself",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SelftestArguments:
    """`model` is None for the built-in script. `options` are the engine's, as keywords of `AsyncLLM`.

    `proposers` are the values of --speculation to be tested, None for all. `max_margin` is in nats.
    """

    model: str | None
    options: Mapping[str, Any]
    proposers: tuple[str, ...] | None
    num_runs: int
    num_jobs: int
    seed: int
    max_margin: float
    json_path: Path | None


def build_selftest_parser() -> CommandParser:
    parser = CommandParser(
        prog="penstock selftest",
        usage="%(prog)s [--runs N] [--seed S] [--max-margin NATS] [--json FILE] [FLAG ...]",
        description="Tests on this machine that greedy answers do not depend on how they are computed: without speculative decoding, with "
        "n-grams, suffixes and a draft model; under a grammar, with tools, reasoning, a thinking budget and stop strings; alone, in a "
        "batch with joins and aborts, preempted, after a cached prefix, from blocks on disk, and all of it at once. Every answer is "
        "compared token by token with the answer of an engine without any of these. Without --model it tests a built-in script, which "
        "needs no weights. The other flags are the server's: --speculation tests one proposer alone, and --seed draws the test's "
        "prompts and constraints as well. "
        "Exit code: 0; 1 if an answer differs; 2 wrong usage.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--runs", dest="num_runs", type=reported(integer(1)), default=2000, metavar="N", help="answers in all (default: %(default)s)"
    )
    parser.add_argument(
        "--jobs",
        dest="num_jobs",
        type=reported(integer(1)),
        default=1,
        metavar="N",
        help="processes, each with its own model (default: %(default)s)",
    )
    parser.add_argument(
        "--max-margin",
        type=reported(nats),
        metavar="NATS",
        help="count a difference as rounding if an error of this size in log probabilities explains it: such answers are counted "
        f"separately, and do not fail the test (default: {ROUNDING:g}; 0 for a script, which is computed exactly)",
    )
    parser.add_argument("--json", dest="json_path", type=Path, metavar="FILE", help="write the results to this file")
    add_server_flags(parser)
    return parser


def margin_for(model: str | None) -> float:
    return 0.0 if is_scripted(model or PREFIX) else ROUNDING


def nats(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise ValueError(f"a margin is 0 or more, got {text}")
    return value


def parse_selftest_arguments(argv: list[str]) -> SelftestArguments:
    """Of what follows `penstock selftest`. Raises `ConfigurationError`."""
    parser = build_selftest_parser()
    given = given_flags(parser, argv)
    configuration = configured(parser, given)
    options = engine_options(configuration)
    model, speculation = options.pop("model", None), options.pop("speculation", None)
    return SelftestArguments(
        model=model,
        options=options,
        proposers=None if speculation is None else (speculation,),
        num_runs=given["num_runs"],
        num_jobs=given["num_jobs"],
        seed=options.get("seed") or 0,
        max_margin=margin_for(model) if given["max_margin"] is None else given["max_margin"],
        json_path=given["json_path"],
    )


def engine_options(configuration: Configuration) -> dict[str, Any]:
    """Those that are set, without the server's own, which the environment or the file may set. Raises `ConfigurationError`."""
    options: dict[str, Any] = {}
    for name, setting in configuration.settings.items():
        option = OPTIONS[name]
        if name in VARIED:
            raise ConfigurationError(f"{option.flag}: {VARIED[name]}; leave it out")
        if not option.is_server_only:
            options[name] = setting.value
        elif setting.source == COMMAND_LINE:
            raise ConfigurationError(f"{option.flag} is an option of the server, which is not running here")
    return options
