"""`penstock admin`: a client of the admin interface of a running server, without curl."""

import argparse
import http.client
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from penstock.cli.flags import CommandParser, reported
from penstock.engine.errors import ConfigurationError
from penstock.engine.options import integer, seconds
from penstock.serving.options import OPTIONS, AdminAddress

ADDRESS_VARIABLE, KEY_VARIABLE = OPTIONS["admin"].variable, OPTIONS["admin_key"].variable
ANSWER_SECONDS = 600.0  # beyond what the server is asked to wait
REFUSED = 1  # the exit code where the server refuses, or there was nothing to do
Shown = Callable[[Any], Iterator[str]]


@dataclass(frozen=True, slots=True)
class AdminArguments:
    """What is asked of which server. `key` is None without one; `output` is the file that a profile is written to."""

    address: AdminAddress
    key: str | None
    is_json: bool
    action: str
    options: Mapping[str, Any] = field(default_factory=dict)
    output: Path | None = None


@dataclass(frozen=True, slots=True)
class Action:
    """A route of the admin interface, how a person reads its answer, and whether that says that nothing was done."""

    method: str
    path: str
    show: Shown
    is_futile: Callable[[Any], bool] = lambda answer: False


def parse_admin_arguments(argv: list[str]) -> AdminArguments:
    """Of what follows `penstock admin`."""
    parser = build_admin_parser()
    place = next((place for place, word in enumerate(argv) if word in ACTIONS), len(argv))
    parser.check_flags(argv[:place])
    if place < len(argv):
        parser.actions[argv[place]].check_flags(argv[place + 1 :])
    given = vars(argparse.ArgumentParser.parse_args(parser, argv))
    if (address := given.pop("address")) is None:
        parser.error(f"say where the server's admin interface is: --address HOST:PORT or unix:PATH, or {ADDRESS_VARIABLE}")
    fixed = {name: given.pop(name, None) for name in ("action", "is_json", "output")}
    options = {name: value for name, value in given.items() if value is not None}
    return AdminArguments(address, os.environ.get(KEY_VARIABLE) or None, fixed["is_json"], fixed["action"], options, fixed["output"])


class AdminParser(CommandParser):
    """`actions` are the parsers of what follows an action."""

    actions: Mapping[str, CommandParser]


def build_admin_parser() -> AdminParser:
    parser = AdminParser(
        prog="penstock admin",
        description="Lists and aborts the requests of a running server, puts its model to sleep and wakes it, and more, over its admin "
        "interface (--admin). Exit code: 0; 1 if the server refuses, or no request to abort is open; 2 wrong usage, or no "
        "server at the address.",
        epilog=f"The address may be in {ADDRESS_VARIABLE}, and the key, if the server has one, is read from {KEY_VARIABLE}.",
        allow_abbrev=False,
    )
    _add_connection(parser, address=os.environ.get(ADDRESS_VARIABLE) or None, is_json=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=CommandParser)
    parser.actions = actions.choices

    def add(name: str, help: str) -> CommandParser:
        action = actions.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.", allow_abbrev=False)
        _add_connection(action, address=argparse.SUPPRESS, is_json=argparse.SUPPRESS)
        return action

    add("list", "list the open requests, the oldest first")
    abort = add("abort", "end requests at once; their clients get an error")
    abort.add_argument("ids", nargs="*", metavar="ID", help="as `list` shows them, in either column")
    abort.add_argument("--all", action="store_true", default=None, help="all that are open")
    reset = _of_a_model(add("reset-prefix-cache", "forget what earlier prompts have left in the KV cache"))
    reset.add_argument("--disk", action="store_true", default=None, help="delete this model's blocks in --kv-cache-dir as well")
    _add_sleep(_of_a_model(add("sleep", "free the memory of the KV cache, or of the model, until it is woken")))
    _of_a_model(add("wake", "wake the model"))
    _of_a_model(add("status", "show whether the model sleeps, and what that has freed"))
    add("models", "list the models that are served, with their adapters")
    for name, help in (
        ("load-model", "load one of several models, in place of idle ones if need be"),
        ("unload-model", "unload one of several models once no request uses it"),
        ("pin-model", "never unload one of several models for another one, or for being idle"),
    ):
        add(name, help).add_argument("model", metavar="NAME")
    unpin = add("unpin-model", "let one of several models be unloaded again")
    unpin.add_argument("model", metavar="NAME")
    unpin.set_defaults(pinned=False)
    load = add("load-adapter", "serve an adapter as a model of its name")
    load.add_argument("name", metavar="NAME")
    load.add_argument("path", metavar="DIR", help="a directory of the server's machine")
    load.add_argument("--replace", action="store_true", default=None, help="replace an adapter of this name")
    add("unload-adapter", "serve an adapter no longer").add_argument("name", metavar="NAME")
    level = add("log-level", "show or set the lowest level that is logged")
    level.add_argument("level", nargs="?", choices=("debug", "info", "warning", "error"))
    profile = _of_a_model(add("profile", "record the next steps as a Chrome trace, which ui.perfetto.dev opens"))
    profile.add_argument("--steps", type=reported(integer(1)), metavar="N", help="how many (default: 20)")
    profile.add_argument("--timeout", type=reported(seconds), metavar="SECONDS", help="the longest time to wait for them (default: 60)")
    profile.add_argument("--output", type=Path, metavar="FILE", default=Path("penstock-trace.json"), help="default: penstock-trace.json")
    add("stats", "print counters and sizes")
    add("threads", "print what every thread and every task is doing")
    return parser


def _of_a_model(parser: CommandParser) -> CommandParser:
    parser.add_argument("--model", metavar="NAME", help="the model to act on, if the server has several (--models)")
    return parser


def _add_connection(parser: CommandParser, *, address: Any, is_json: Any) -> None:
    """Flags that may be before the action or after it."""
    parser.add_argument(
        "--address",
        type=reported(AdminAddress.read),
        default=address,
        metavar="HOST:PORT|unix:PATH",
        help=f"the server's --admin address (default: {ADDRESS_VARIABLE})",
    )
    parser.add_argument("--json", dest="is_json", action="store_true", default=is_json, help="print the server's answer as it is")


def _add_sleep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--level", type=int, choices=(1, 2), help="1: the KV cache; 2: the weights too (default: 1)")
    parser.add_argument(
        "--mode",
        choices=("wait", "abort", "keep"),
        help="running requests end first, are aborted, or continue once the model is awake (default: wait)",
    )
    parser.add_argument("--timeout", type=reported(seconds), metavar="SECONDS", help="how long `wait` waits (default: 60)")
    parser.add_argument("--wake-on-request", action="store_true", default=None, help="the next request wakes the model (default: refused)")


def run_admin_command(arguments: AdminArguments) -> int:
    """Raises `ConfigurationError` where no server answers, or a profile could not be written."""
    action = ACTIONS[arguments.action]
    if arguments.output is not None:
        check_writable(arguments.output)  # taking a profile slows the server down, and may last minutes
    method = "POST" if arguments.action == "log-level" and arguments.options else action.method
    try:
        status, answer = ask(arguments, method, action.path)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "strerror", None) or error or type(error).__name__
        raise ConfigurationError(f"there is no admin interface at {arguments.address}: {reason}") from error
    if status >= 400:
        hint = f"; {KEY_VARIABLE} is not set" if status == http.HTTPStatus.UNAUTHORIZED and arguments.key is None else ""
        print(f"penstock admin: {message_of(answer)}{hint}", file=sys.stderr)
        return REFUSED
    if arguments.output is not None:
        return write_trace(arguments.output, answer)
    for line in [json.dumps(answer)] if arguments.is_json else action.show(answer):
        print(line)
    return REFUSED if action.is_futile(answer) else 0


def ask(arguments: AdminArguments, method: str, path: str) -> tuple[int, Any]:
    """The status and the decoded answer."""
    headers = {"Content-Type": "application/json"}
    if arguments.key is not None:
        headers["Authorization"] = f"Bearer {arguments.key}"
    body = json.dumps(dict(arguments.options)) if method == "POST" else None
    if method == "GET" and arguments.options:
        path = f"{path}?{urlencode(arguments.options)}"
    with closing(connection_to(arguments.address, ANSWER_SECONDS + float(arguments.options.get("timeout", 60)))) as connection:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def connection_to(address: AdminAddress, timeout: float) -> http.client.HTTPConnection:
    if address.path:
        return UnixConnection(address.path, timeout)
    return http.client.HTTPConnection(address.host, address.port, timeout=timeout)


class UnixConnection(http.client.HTTPConnection):
    """HTTP over the Unix socket at a path."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def message_of(answer: Any) -> str:
    """Of an error's body."""
    try:
        return str(answer["error"]["message"])
    except (LookupError, TypeError):
        return "the server refuses, and does not say why"


def check_writable(path: Path) -> None:
    """Leaves what is there as it is, and a new file nowhere. Raises `ConfigurationError`."""
    is_new = not os.path.lexists(path)
    try:
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}") from error


def write_trace(path: Path, trace: Any) -> int:
    """Raises `ConfigurationError` where the file cannot be written."""
    try:
        path.write_text(json.dumps(trace), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}") from error
    print(f"{trace['penstock']['steps']} steps are in {path}: open it at ui.perfetto.dev or chrome://tracing")
    return 0


def _table(rows: list[list[str]]) -> Iterator[str]:
    """Columns as wide as their longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def show_requests(answer: Any) -> Iterator[str]:
    header = ["ID", "HTTP_ID", "STATE", "MODEL", "CLIENT", "AGE", "PROMPT", "CACHED", "OUTPUT", "BLOCKS"]
    rows = [
        [
            one["id"],
            one["http_id"] or "-",
            one["state"],
            one["model"],
            one["client"] or "-",
            f"{one['age']:.1f}s",
            *(str(one[name]) for name in ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_blocks")),
        ]
        for one in answer["requests"]
    ]
    yield from _table([header, *rows])


def show_aborted(answer: Any) -> Iterator[str]:
    yield f"aborted: {len(answer['aborted'])}"
    yield from (f"not open: {request_id}" for request_id in answer["unknown"])


def has_aborted_nothing(answer: Any) -> bool:
    """Of what was named; that there is nothing at all to abort is no failure of `--all`."""
    return bool(answer["unknown"]) and not answer["aborted"]


def show_reset(answer: Any) -> Iterator[str]:
    yield f"forgotten: {answer['blocks']} blocks in memory, {answer['files']} on disk"


def show_status(answer: Any) -> Iterator[str]:
    level = f" at level {answer['level']}" if answer["level"] else ""
    yield f"{answer['state'].replace('_', ' ')}{level} for {answer['seconds']:.0f} s"
    if answer["level"]:
        yield f"freed: {size_of(answer['freed_kv_cache_bytes'])} of the KV cache, {size_of(answer['freed_weight_bytes'])} of weights"
        yield "the next request wakes it" if answer["wakes_on_request"] else "requests are refused until it is woken"


def show_models(answer: Any) -> Iterator[str]:
    for model in answer["models"]:
        parts = [model["state"].replace("_", " ")]
        parts += [] if model["max_model_len"] is None else [f"{model['max_model_len']} tokens"]
        if model["num_bytes"] is not None:
            if model["num_bytes"] and not model["num_loads"]:
                parts.append(f"about {size_of(model['num_bytes'])} once it is loaded")
            elif model["num_bytes"]:
                parts.append(size_of(model["num_bytes"]) + (" when it was loaded" if model["state"] in ("unloaded", "failed") else ""))
            parts += [f"{model['num_users']} requests", f"{model['num_waiting']} waiting"]
            parts += ["pinned"] * model["is_pinned"]
        yield f"{', '.join(model['names'])}: {', '.join(parts)}"
        yield from (f"  adapter {name}: {path}" for name, path in model["adapters"].items())


def show_level(answer: Any) -> Iterator[str]:
    yield answer["level"]


def show_stats(answer: Any) -> Iterator[str]:
    yield from json.dumps(answer, indent=2).splitlines()


def show_stacks(answer: Any) -> Iterator[str]:
    for kind in ("threads", "tasks"):
        for one in answer[kind]:
            yield f"{kind.removesuffix('s')} {one['name']}"
            yield from (f"  {line}" for line in one["stack"])


def size_of(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


ACTIONS: Mapping[str, Action] = {
    "list": Action("GET", "/requests", show_requests),
    "abort": Action("POST", "/requests/abort", show_aborted, has_aborted_nothing),
    "reset-prefix-cache": Action("POST", "/prefix-cache/reset", show_reset),
    "sleep": Action("POST", "/sleep", show_status),
    "wake": Action("POST", "/wake", show_status),
    "status": Action("GET", "/sleep", show_status),
    "models": Action("GET", "/models", show_models),
    "load-model": Action("POST", "/models/load", show_models),
    "unload-model": Action("POST", "/models/unload", show_models),
    "pin-model": Action("POST", "/models/pin", show_models),
    "unpin-model": Action("POST", "/models/pin", show_models),
    "load-adapter": Action("POST", "/adapters/load", show_models),
    "unload-adapter": Action("POST", "/adapters/unload", show_models),
    "log-level": Action("GET", "/log-level", show_level),
    "profile": Action("POST", "/profile", show_stats),
    "stats": Action("GET", "/stats", show_stats),
    "threads": Action("GET", "/threads", show_stacks),
}
