"""The command line: `python server.py --plugin deepseek_r1`, or `penstock`. Wires the parts together and runs them."""

import asyncio
import contextlib
import importlib.util
import ipaddress
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.cli import COMMANDS
from penstock.cli.config import summary
from penstock.cli.flags import parse_configuration
from penstock.engine.errors import ConfigurationError, StartFailed, start_error
from penstock.engine.system.cpus import SPIN_COUNT, limit_libraries
from penstock.engine.system.process import collector_paused, memory_shortage_refused, notify_supervisor, settled_heap, startup_phase
from penstock.serving.observability.logs import JsonFormatter, set_up_logging
from penstock.serving.options import Arguments

if TYPE_CHECKING:
    from penstock.assembly import AnyAssembled
    from penstock.plugins.manager import Plugins
    from penstock.serving.context import RunningEngine

START_FAILED = 1  # the exit code where another start may succeed
MISCONFIGURED = 2  # the exit code where it cannot
ENGINE_FAILED = 3  # the exit code where the engine has failed for good, such as after an error of CUDA: to be started again
STANDARD_OUTPUT = 1
OUTPUT_CLOSED = 128 + signal.SIGPIPE  # as a shell has it of a program that this signal has ended
CLEANUP_SECONDS = 5.0  # for handlers to send their last words once the engine has stopped

log = logging.getLogger("penstock.server")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 after a shutdown that was asked for, 1 where the server cannot start now and may later, 2 where it cannot
    start as asked, 3 where the engine failed. Other commands have 1 for findings of their own, and 2 for whatever they cannot begin with.
    """
    words = sys.argv[1:] if argv is None else argv
    is_command = bool(words) and words[0] in COMMANDS
    log_format = "text"
    try:
        if is_command:
            set_up_logging("warning")
            return run_command(words[0], words[1:])
        configuration = parse_configuration(words)
        arguments = configuration.arguments
        log_format = arguments.log_format
        set_up_logging(arguments.log_level, access_log=arguments.access_log, log_format=log_format)
        if sources := summary(configuration.settings):
            log.info("options: %s", sources)
        # Everything from here on takes torch and seconds; `--help` and wrong flags never come this far.
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
        limit_libraries(arguments.engine.num_threads, os.environ)
        if "TORCHELASTIC_RUN_ID" in os.environ and os.environ["RANK"] != "0":
            from penstock.cli.worker import run_rank_of_torchrun

            return run_rank_of_torchrun()
        with memory_shortage_refused(), collector_paused(), startup_phase("plug-ins"):
            from penstock.plugins.manager import Plugins

            plugins = Plugins.asked_for(arguments)
        if arguments.api_servers:
            from penstock.cli.api_servers import serve_apart

            return serve_apart(arguments, plugins, words, configuration.path)
        return serve(arguments, plugins)
    except (ConfigurationError, MemoryError) as error:  # where there was no memory even for a message, the error has none
        message = " ".join(str(error).split()) or "out of memory"
        print(formatted(logging.CRITICAL, message, log_format) or f"penstock: error: {message}", file=sys.stderr)
        return START_FAILED if isinstance(error, StartFailed) and not is_command else MISCONFIGURED
    except KeyboardInterrupt:
        return 130


def run_command(name: str, words: list[str]) -> int:
    """The exit code. A reader that leaves before the end, such as `head`, is no error."""
    try:
        code = COMMANDS[name](words)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), STANDARD_OUTPUT)  # Python flushes the rest when it ends, and would fail again
        return OUTPUT_CLOSED
    return code


def serve(arguments: Arguments, plugins: "Plugins") -> int:
    """Loads the model and serves until a signal, or until the engine has failed; returns the exit code.

    The address is taken first: a port that is in use should not cost a model's loading.
    """
    started = time.monotonic()
    with collector_paused(), startup_phase("import of the API"):
        from penstock.api.admin.sockets import bound as bound_admin
        from penstock.engine.system.process import raise_descriptor_limit

    raise_descriptor_limit()
    outlast_hangups(arguments)
    listener = bind(arguments.host, arguments.port)
    warn_if_open(arguments, listener)
    with listener, bound_admin(arguments.admin) as admin:
        assembled = load_model(arguments, plugins)
        with settled_heap(), asyncio.Runner(loop_factory=loop_factory()) as runner:
            listen(listener)
            return runner.run(run(arguments, assembled, listener, started, admin))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Makes uvloop's event loop where that is installed. None is asyncio's own."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return factory


@memory_shortage_refused()
def load_model(arguments: Arguments, plugins: "Plugins") -> "AnyAssembled":
    """Imports what computes models, which takes seconds, and assembles one that is ready for its first request, or what loads several."""
    from penstock.engine.system.process import triton_left_out
    from penstock.serving.models.file import read_models_file

    file = None if arguments.models is None else read_models_file(arguments)
    with collector_paused(), startup_phase("import of torch"):
        importlib.import_module("torch")
    with triton_left_out(arguments.engine.device):
        with collector_paused(), startup_phase("import of the engine"):
            from penstock.assembly import assemble, assemble_models
        assembled = assemble(arguments, plugins, is_prepared=True) if file is None else assemble_models(arguments, file)
    with collector_paused(), startup_phase("grammar backends"):
        assembled.context.warm_up()
    return assembled


async def run(
    arguments: Arguments,
    assembled: "AnyAssembled",
    listener: socket.socket,
    started: float,
    admin: socket.socket | None = None,
) -> int:
    """Serves until SIGTERM or SIGINT; then answers new requests with 503, lets running ones end within the drain timeout, and stops.

    So it does when the engine has failed. Returns the exit code.
    """
    from penstock.api.admin.app import administered
    from penstock.api.admin.routes import Administration
    from penstock.api.app import build_app, build_runner
    from penstock.api.batches import stop_batches
    from penstock.api.connections import Listener
    from penstock.api.middleware import GATE
    from penstock.api.requests import KEYS

    log.debug("the event loop is %s's", type(asyncio.get_running_loop()).__module__.partition(".")[0])
    stop, context = stop_on_signals(), assembled.context
    await context.engine.start()
    app = build_app(context)
    if arguments.server.keys_file is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, app[KEYS].reload)
    runner = build_runner(app, CLEANUP_SECONDS)
    await runner.setup()
    connections = Listener(runner, listener, context.options)
    connections.start()
    async with administered(arguments, Administration(context), admin):
        announce(start_line(assembled, connections.address, time.monotonic() - started), arguments.log_format)
        has_failed = await ends_by_failure(stop, context.engine)
        gate = app[GATE]
        gate.is_open = False
        await stop_batches(app)
        log.info("%s", stopping_line(gate.num_inside, arguments.drain_timeout))
        # Connections are accepted until the drain ends: a refused one would tell a load balancer that the server has crashed.
        if not await gate.drain(arguments.drain_timeout):
            log.warning("not ended in time, and aborted: %s", counted(gate.num_inside))
    connections.close()
    await context.engine.stop(0)
    await runner.cleanup()
    context.close()
    return ENGINE_FAILED if has_failed else 0


async def ends_by_failure(stop: asyncio.Event, engine: "RunningEngine", *others: asyncio.Task[None]) -> bool:
    """Waits for a signal or for the failure of the engine, which the end of one of the `others` is as well; True where that came first."""
    signalled, failed = asyncio.create_task(stop.wait()), asyncio.create_task(engine.failed())
    await asyncio.wait([signalled, failed, *others], return_when=asyncio.FIRST_COMPLETED)
    has_failed = not stop.is_set()
    for task in (signalled, failed):
        task.cancel()
    return has_failed


def stopping_line(num_requests: int, seconds: float) -> str:
    if not num_requests:
        return "shutting down"
    return f"shutting down: up to {seconds:g} s for {counted(num_requests)} to end; a second Ctrl-C or SIGTERM ends the server at once"


def counted(num_requests: int) -> str:
    return "1 request" if num_requests == 1 else f"{num_requests} requests"


def outlast_hangups(arguments: Arguments) -> None:
    """Has SIGHUP ignored: with `--keys` until there is a server that reads them again, without them for good.

    So a service manager's reload ends no server that has nothing to read. Without keys, one on a terminal ends with that, as others do.
    """
    if arguments.server.keys_file is not None or not os.isatty(0):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def stop_on_signals() -> asyncio.Event:
    """The event that the first SIGTERM or SIGINT sets. The second one ends the process at once."""
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            log.warning("a second signal (%s): the server ends at once, and what still runs is cut", signal.Signals(number).name)
            logging.shutdown()  # lines are written by a thread
            os._exit(128 + number)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound but does not listen yet: clients are refused until the model is there, and the port is taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        try:
            return bound(socket.socket(family, kind, protocol), address)
        except OSError:
            # Connections of a server that has ended may hold the port for a minute. With SO_REUSEADDR they do not, but then another
            # server could bind the port as well until one of them listens: it is switched on only here, and off again.
            return bound(socket.socket(family, kind, protocol), address, is_reused=True)
    except OSError as error:
        raise start_error(f"cannot listen at {host}:{port}: {error.strerror or error}", error) from error


def warn_if_open(arguments: Arguments, listener: socket.socket) -> None:
    """Logs that other machines may use the server, where nothing keeps them from it."""
    address = listener.getsockname()[0]
    if not arguments.server.requires_key and not ipaddress.ip_address(address).is_loopback:
        log.warning("every machine that reaches %s can use this server: it asks for no key (--api-key or --keys)", address)


def bound(listener: socket.socket, address: Any, *, is_reused: bool = False) -> socket.socket:
    """Closes the socket where it cannot be bound."""
    with contextlib.ExitStack() as on_failure:
        on_failure.enter_context(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, is_reused)
        listener.bind(address)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        on_failure.pop_all()
    return listener


def listen(listener: socket.socket) -> None:
    """Clients can connect from now on. The next server on this port needs what `bind` has switched off, on our connections too."""
    from penstock.api.connections import BACKLOG

    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise start_error(f"cannot listen at {host}:{port}: {error.strerror or error}", error) from error


def announce(line: str, log_format: str) -> None:
    """Prints that the server serves, in the format of the log, and notifies the supervisor."""
    print(formatted(logging.INFO, line, log_format) or line, flush=True)
    notify_supervisor("READY=1")


def formatted(level: int, message: str, log_format: str) -> str:
    """As an object of the log where that is JSON, else empty."""
    record = {"name": log.name, "levelno": level, "levelname": logging.getLevelName(level), "msg": message}
    return JsonFormatter().format(logging.makeLogRecord(record)) if log_format == "json" else ""


def start_line(assembled: "AnyAssembled", address: tuple[str, int], seconds: float) -> str:
    """What is served where, and by what means: the one line that a person looks for."""
    host, port = address
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    names = ", ".join(model.name for model in assembled.context.descriptions() if model.parent is None)
    playground = f", with a playground at {url}" if assembled.context.options.playground else ""
    return f"penstock {__version__} serves {names} at {url}/v1{playground} ({assembled.summary}; started in {seconds:.1f} s)"


if __name__ == "__main__":
    from penstock.server import main as packaged_main  # the module by its own name, so that it exists once

    sys.exit(packaged_main())
