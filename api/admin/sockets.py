"""The socket of the admin interface: at a port or at a path, taken before the model is loaded."""

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.engine.errors import start_error
from penstock.serving.options import AdminAddress

PRIVATE = 0o177  # the umask under which a socket is for its user alone
BACKLOG = 32


@contextmanager
def bound(address: AdminAddress | None) -> Iterator[socket.socket | None]:
    """A socket at the address, which listens once it is served; a Unix socket is removed at the end.

    Raises `ConfigurationError` where the address is in use, or cannot be used.
    """
    if address is None:
        yield None
        return
    try:
        listener = _bound_to_path(address.path) if address.path else _bound_to_port(address.host, address.port)
    except OSError as error:
        raise start_error(f"--admin {address}: {error.strerror or error}", error) from error
    with listener, _removed_at_the_end(address.path):
        yield listener


@contextmanager
def _removed_at_the_end(path: str) -> Iterator[None]:
    """Leaves what another server has put at the path meanwhile, which it may while this one does not listen yet."""
    own = os.lstat(path) if path else None
    try:
        yield
    finally:
        if own is not None:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.lstat(path), own):
                    os.unlink(path)


def _bound_to_port(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with contextlib.ExitStack() as on_failure:
        listener = on_failure.enter_context(socket.socket(family, kind, protocol))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        on_failure.pop_all()
    return listener


def _bound_to_path(path: str) -> socket.socket:
    """What a server that was killed has left at the path is replaced; anything else is not. Raises `OSError`."""
    _remove_stale(path)
    with contextlib.ExitStack() as on_failure:
        listener = on_failure.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        mask = os.umask(PRIVATE)
        try:
            listener.bind(path)
        finally:
            os.umask(mask)
        on_failure.pop_all()
    return listener


def _remove_stale(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(None, f"{path} exists, and is no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
            else:
                raise OSError(errno.EADDRINUSE, f"another process listens at {path}")


def shown_address(listener: socket.socket) -> str:
    if listener.family == socket.AF_UNIX:
        return str(AdminAddress(path=listener.getsockname()))
    host, port = listener.getsockname()[:2]
    return str(AdminAddress(host, port))
