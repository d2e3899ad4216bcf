"""`--api-servers N`: N processes that serve HTTP, and the engine's process, which starts them, computes for them and ends them.

All listen at one port, among whose sockets the kernel distributes connections (SO_REUSEPORT). Each speaks to the engine over a socket that
it inherits, which nothing else can reach, and at whose end it sees that the other process has died.
"""

import asyncio
import contextlib
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.flags import parse_arguments
from penstock.engine.errors import ConfigurationError, EngineUnavailable, start_error
from penstock.engine.system.process import end_after_parent, settled_heap
from penstock.server import (
    CLEANUP_SECONDS,
    ENGINE_FAILED,
    announce,
    bind,
    counted,
    ends_by_failure,
    listen,
    load_model,
    loop_factory,
    outlast_hangups,
    start_line,
    stop_on_signals,
    stopping_line,
    warn_if_open,
)
from penstock.serving.limits import KeyRing
from penstock.serving.observability.logs import set_up_logging
from penstock.serving.options import Arguments

if TYPE_CHECKING:
    from penstock.assembly import Assembled
    from penstock.engine.adapters.registry import AdapterRegistry
    from penstock.engine.remote.client import RemoteEngine
    from penstock.engine.remote.server import Connection, EngineServer
    from penstock.plugins.manager import Plugins
    from penstock.serving.context import RemoteContext

log = logging.getLogger("penstock.server")

MAX_RESTARTS = 5  # within RESTART_SECONDS, of all servers together; then something else is wrong
RESTART_SECONDS = 60.0
EXIT_SECONDS = 5.0  # for a process whose connection has ended


class ServersFailed(Exception):
    """API servers end as often as they are started."""


def serve_apart(arguments: Arguments, plugins: "Plugins", words: Sequence[str], config_path: Path | None = None) -> int:
    """As `server.serve`, with API servers in processes of their own. `words` is the command line, which they read as well."""
    from penstock.api.admin.sockets import bound as bound_admin
    from penstock.engine.system.process import raise_descriptor_limit

    if arguments.server.files_dir is not None:
        raise ConfigurationError("--files-dir: files and batches belong to one process, so --api-servers cannot be used beside it")
    if arguments.server.adapter_dir is not None:
        raise ConfigurationError("--adapter-dir: adapters are loaded in one process, so it cannot be combined with --api-servers")
    if arguments.models is not None:
        raise ConfigurationError("--models: models are loaded in one process, so --api-servers cannot be used beside it")
    if arguments.engine.enable_prompt_embeds:
        raise ConfigurationError("--enable-prompt-embeds: API servers read no tensors, so --api-servers cannot be used beside it")
    if arguments.engine.kv_transfer_dir is not None:
        raise ConfigurationError("--kv-transfer-dir: prompts are handed over in one process, so --api-servers cannot be used beside it")
    started = time.monotonic()
    raise_descriptor_limit()
    if arguments.server.keys_file is not None:
        KeyRing.of(arguments.server, counts=False)  # raises before any process is started
    outlast_hangups(arguments)  # here and in the API servers
    with contextlib.ExitStack() as on_exit:
        listeners = bind_all(arguments.host, arguments.port, arguments.api_servers)
        for listener in listeners:
            on_exit.enter_context(listener)
        warn_if_open(arguments, listeners[0])
        admin = on_exit.enter_context(bound_admin(arguments.admin))
        if arguments.server.response_store is None:
            words = [*words, *on_exit.enter_context(shared_response_store())]
        if config_path is not None:
            words = [*words, *on_exit.enter_context(copied_config(config_path))]
        servers = ApiServers(words, listeners)
        on_exit.callback(servers.kill)
        servers.start()  # they import what they need while the model is loaded
        assembled = load_model(arguments, plugins)
        from penstock.assembly import Assembled

        assert isinstance(assembled, Assembled), "the flag is refused for other models"
        with settled_heap(), asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(run_engine(arguments, assembled, servers, started, admin))


@contextlib.contextmanager
def shared_response_store() -> Iterator[list[str]]:
    """The flag for a temporary file of stored responses: a client's next request may reach another server."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        yield ["--response-store", os.path.join(directory, "responses.sqlite")]


@contextlib.contextmanager
def copied_config(path: Path) -> Iterator[list[str]]:
    """The flag for a copy of the configuration file: an API server that is started again must not find an edited one."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        yield ["--config", shutil.copy(path, directory)]


def bind_all(host: str, port: int, number: int) -> list[socket.socket]:
    """That many sockets at one port. The first is bound alone, so that a port that another server has is refused; 0 is a free port."""
    first = bind(host, port)
    listeners = [first]
    try:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        for _ in range(1, number):
            listeners.append(socket.socket(first.family, first.type, first.proto))
            listeners[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listeners[-1].bind(first.getsockname())
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise start_error(f"--api-servers: {host}:{port} cannot be shared: {error.strerror or error}", error) from error
    return listeners


@dataclass(slots=True)
class ServerProcess:
    """A process that has been started, and this end of its connection."""

    process: "subprocess.Popen[bytes]"
    connected: socket.socket
    connection: "Connection | None" = None


class ApiServers:
    """The API servers. One that dies is restarted. Its requests are aborted; clients in the queue of its socket stay there."""

    def __init__(self, words: Sequence[str], listeners: Sequence[socket.socket]) -> None:
        self._words = words
        self._listeners = listeners
        self._servers: list[ServerProcess] = []
        self._restarts: deque[float] = deque()
        self._is_stopping = False

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listeners[0].getsockname()[:2]
        return host, port

    @property
    def pids(self) -> list[int]:
        return [server.process.pid for server in self._servers]

    def start(self) -> None:
        self._servers = [self._spawn(listener) for listener in self._listeners]

    async def keep(self, engine: "EngineServer", ready: asyncio.Event) -> None:
        """Connects them to the engine and starts again those that end; sets `ready` once all of them listen. Raises `ServersFailed`."""
        async with asyncio.TaskGroup() as group:
            for place in range(len(self._servers)):
                group.create_task(self._keep_one(engine, place, ready))

    def reload_keys(self) -> None:
        """Has them read the file of API keys again. One that starts reads it anyway."""
        for server in self._servers:
            if server.connection is not None and server.connection.ready.is_set():
                server.process.send_signal(signal.SIGHUP)

    async def drain(self, seconds: float) -> None:
        """Lets them answer what they have begun for so long, and end; kills those that do not."""
        self._is_stopping = True
        connections = [server.connection for server in self._servers if server.connection is not None]
        for connection in connections:
            connection.drain(seconds)
        ends = [asyncio.create_task(connection.ended.wait()) for connection in connections]
        if ends:
            await asyncio.wait(ends, timeout=seconds + CLEANUP_SECONDS + EXIT_SECONDS)
        await asyncio.gather(*(asyncio.to_thread(exit_code_of, server.process) for server in self._servers))

    def kill(self) -> None:
        """Ends what is left of them at once."""
        for server in self._servers:
            server.connected.close()
            server.process.kill()
            server.process.wait()

    def _spawn(self, listener: socket.socket) -> ServerProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = (theirs.fileno(), listener.fileno())
            command = [sys.executable, "-P", "-m", "penstock.cli.api_servers", str(os.getpid()), *map(str, descriptors), *self._words]
            path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
            environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}  # numpy computes nothing there
            process = subprocess.Popen(command, pass_fds=descriptors, env=environment, stdin=subprocess.DEVNULL)
        return ServerProcess(process, ours)

    async def _keep_one(self, engine: "EngineServer", place: int, ready: asyncio.Event) -> None:
        while True:
            server = self._servers[place]
            server.connection = await engine.connect(server.connected)
            await first_of(server.connection.ready.wait(), server.connection.ended.wait())
            if all(each.connection is not None and each.connection.ready.is_set() for each in self._servers):
                ready.set()
            await server.connection.ended.wait()
            code = await asyncio.to_thread(exit_code_of, server.process)
            if self._is_stopping:
                return
            if not server.connection.ready.is_set():
                raise ServersFailed(f"an API server did not start: it ended with {code}")
            self._count_restart(code)
            log.error("API server %d ended with %d: its requests have been aborted, and it is started again", server.process.pid, code)
            self._servers[place] = self._spawn(self._listeners[place])

    def _count_restart(self, code: int) -> None:
        now = time.monotonic()
        while self._restarts and self._restarts[0] < now - RESTART_SECONDS:
            self._restarts.popleft()
        if len(self._restarts) == MAX_RESTARTS:
            raise ServersFailed(f"API servers have ended {MAX_RESTARTS + 1} times in {RESTART_SECONDS:g} s, the last one with {code}")
        self._restarts.append(now)


def exit_code_of(process: "subprocess.Popen[bytes]") -> int:
    """Of a process that is about to end; one that does not is killed."""
    try:
        return process.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


async def run_engine(
    arguments: Arguments, assembled: "Assembled", servers: ApiServers, started: float, admin: socket.socket | None = None
) -> int:
    """Computes for the API servers until SIGTERM or SIGINT, or until the engine or the servers have failed; returns the exit code."""
    from penstock.api.admin.app import administered
    from penstock.api.admin.routes import Administration

    stop, context = stop_on_signals(), assembled.context
    await context.engine.start()
    engine, ready = engine_server(assembled), asyncio.Event()
    if arguments.server.keys_file is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, servers.reload_keys)
    context.engine.sleeper.on_change = engine.send_state
    keeping = asyncio.create_task(servers.keep(engine, ready))
    try:
        await first_of(ready.wait(), stop.wait(), asyncio.wait([keeping]))
        if ready.is_set():
            announce(start_line(assembled, servers.address, time.monotonic() - started), arguments.log_format)
        async with administered(arguments, Administration(context, engine), admin):
            has_failed = await ends_by_failure(stop, context.engine, keeping)
            if keeping.done() and not ready.is_set():
                raise ConfigurationError(f"--api-servers: {failure_of(keeping)}")
            if keeping.done():
                log.error("%s", failure_of(keeping))
            engine.send_state()
            log.info("%s", stopping_line(engine.num_streams, arguments.drain_timeout))
            await servers.drain(arguments.drain_timeout)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await context.engine.stop(0)
        context.close()
    return ENGINE_FAILED if has_failed else 0


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Returns with the first of them."""
    tasks = [asyncio.create_task(each) for each in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def failure_of(keeping: "asyncio.Task[None]") -> str:
    """Why `ApiServers.keep` has ended."""
    error = keeping.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)


def engine_server(assembled: "Assembled") -> "EngineServer":
    """What API servers speak to."""
    from penstock.engine.remote.messages import Hello
    from penstock.engine.remote.server import EngineServer, RequestReader
    from penstock.serving.observability.exposition import metrics_text
    from penstock.serving.observability.metrics import EngineCollector, GrammarCollector, merged_registry

    context, name = assembled.context, assembled.context.model_names[0]
    reader = RequestReader(
        tokenizer=context.tokenizer,
        vocab_size=context.vocab_size,
        processors=context.plugins.logits_processors,
        reasoning_parser=context.reasoning_parser,
        tool_parser=context.tool_parser,
        adapters=context.adapters,
    )
    collectors = (EngineCollector(context.engine.stats, name), GrammarCollector(context.grammar_compiler.stats, name))
    hello = Hello(str(assembled.directory), context.max_model_len, context.vocab_size, context.stop_token_ids, context.default_sampling)

    def merge(reports: Sequence[bytes]) -> bytes:
        return metrics_text(merged_registry(collectors, reports), context.options.metric_prefix)

    return EngineServer(context.engine, context.grammar_compiler, reader, merge, hello)


def main(argv: Sequence[str]) -> int:
    """An API server: `argv` are the engine's process id, the descriptors of the connection to it and of the listener, and the command line.

    Nothing here computes: neither torch nor transformers is imported, which would take seconds and 350 MB.
    """
    end_after_parent(int(argv[0]), CLEANUP_SECONDS + EXIT_SECONDS)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the engine's process gets them as well, and says when to end
    connected, listener = (socket.socket(fileno=int(descriptor)) for descriptor in argv[1:3])
    arguments = parse_arguments(list(argv[3:]))
    set_up_logging(arguments.log_level, access_log=arguments.access_log, log_format=arguments.log_format)
    logging.getLogger("penstock.serving.models.startup").setLevel(logging.ERROR)  # the engine's process has said it
    from penstock.engine.remote.client import RemoteEngine
    from penstock.plugins.manager import Plugins

    import_module("penstock.api.app")  # before the engine is waited for
    plugins = Plugins.asked_for(arguments)
    if arguments.server.max_connections is not None:
        share = math.ceil(arguments.server.max_connections / arguments.api_servers)
        arguments = replace(arguments, server=replace(arguments.server, max_connections=share))
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(run_server(arguments, plugins, RemoteEngine(connected, plugins.logits_processors), listener))


async def run_server(arguments: Arguments, plugins: "Plugins", engine: "RemoteEngine", listener: socket.socket) -> int:
    """Serves until the engine's process says that it is over, or has ended; returns the exit code."""
    from penstock.api.app import build_app, build_runner
    from penstock.api.connections import Listener
    from penstock.api.middleware import GATE
    from penstock.api.requests import KEYS

    try:
        await engine.start()
    except EngineUnavailable:
        return ENGINE_FAILED
    context = remote_context(arguments, plugins, engine)
    context.warm_up()
    app = build_app(context)
    if arguments.server.keys_file is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, app[KEYS].reload)
    runner = build_runner(app, CLEANUP_SECONDS)
    await runner.setup()
    with settled_heap():
        listen(listener)
        connections = Listener(runner, listener, context.options)
        connections.start()
        engine.send_ready()
        await first_of(engine.draining.wait(), engine.failed())
        is_lost = not engine.draining.is_set()
        gate = app[GATE]
        if not await gate.drain(CLEANUP_SECONDS if is_lost else engine.drain_seconds):
            log.warning("not ended in time, and aborted: %s", counted(gate.num_inside))
        connections.close()
        await engine.stop()
        await runner.cleanup()
    context.close()
    return ENGINE_FAILED if is_lost else 0


def remote_context(arguments: Arguments, plugins: "Plugins", engine: "RemoteEngine") -> "RemoteContext":
    """What handlers need, of a model that the engine's process has loaded."""
    from penstock.engine.text.tokenizer import Tokenizer
    from penstock.serving.context import RemoteContext
    from penstock.serving.models.startup import ModelFiles, context_fields, template_of

    hello = engine.hello.result()
    directory = Path(hello.directory)
    files = ModelFiles(directory, Tokenizer.load(directory, arguments.engine.trust_remote_code), template_of(arguments))
    return RemoteContext(
        **context_fields(arguments, plugins, files),
        engine=engine,
        grammar_compiler=engine,
        max_model_len=hello.max_model_len,
        vocab_size=hello.vocab_size,
        stop_token_ids=hello.stop_token_ids,
        default_sampling=hello.default_sampling,
        adapters=named_adapters(arguments),
    )


def named_adapters(arguments: Arguments) -> "AdapterRegistry":
    """The operator's, by their names: what is in them is known to the engine's process alone."""
    from penstock.engine.adapters.registry import Adapter, AdapterRegistry

    registry = AdapterRegistry(len(arguments.engine.adapters))
    for source in arguments.engine.adapters:
        registry.add(Adapter(source.name, source.path))
    return registry


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
