"""File descriptors: how many the process may have, and how many of these are left for connections."""

import resource

from penstock.engine.errors import ConfigurationError

MAX_CONNECTIONS = 16_384  # the most by default: each takes some 20 KB
OTHER_DESCRIPTORS = 64  # for files, pipes of helper processes, and what libraries open
MAX_DESCRIPTORS = 65_536  # not more than that are asked for, though the hard limit may be a billion


def raise_descriptor_limit() -> None:
    """Makes as many file descriptors available as the system allows. The soft limit is often 1,024, for programs that use `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_limit(asked: int | None) -> int:
    """How many connections may be open: as many as were asked for, else as many as the descriptors allow. Raises `ConfigurationError`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return asked or MAX_CONNECTIONS
    available = soft - min(OTHER_DESCRIPTORS, soft // 2)
    if asked is not None and asked > available:
        raise ConfigurationError(f"--max-connections {asked}: `ulimit -n` is {soft}, which leaves {available} for connections")
    return asked or min(available, MAX_CONNECTIONS)
