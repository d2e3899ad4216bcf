"""`penstock keys`, which makes API keys and checks a file of them."""

import sys
from pathlib import Path

from msgspec import structs

from penstock.cli.flags import KeysArguments
from penstock.engine.errors import ConfigurationError
from penstock.serving.limits import NO_NAME, ApiKey, hash_of, is_name, new_secret, read_keys

MIN_LENGTH = 24  # of a key that was made elsewhere: a short one could be guessed from its hash


def run_keys_command(arguments: KeysArguments) -> int:
    """Returns the exit code. Raises `ConfigurationError`."""
    if arguments.check is not None:
        for key in read_keys(arguments.check):
            print(described(key))
        return 0
    assert arguments.name is not None
    if not is_name(arguments.name):
        raise ConfigurationError(f"{arguments.name!r} {NO_NAME}")
    secret = read_secret() if arguments.reads_key else new_secret()
    table = f'[keys.{quoted(arguments.name)}]\nhash = "{hash_of(secret)}"\n'
    if arguments.append_to is not None:
        append(arguments.append_to, arguments.name, table)
    if not arguments.reads_key:
        print(secret)
    if arguments.append_to is None:
        print(f"\n{table}", end="")
    return 0


def quoted(name: str) -> str:
    """As a part of a table's header, where a dot separates parts."""
    return f'"{name}"' if "." in name else name


def read_secret() -> str:
    secret = sys.stdin.readline().strip()
    if len(secret) < MIN_LENGTH:
        raise ConfigurationError(f"a key has {MIN_LENGTH} characters or more: a shorter one could be guessed from its hash")
    return secret


def append(path: Path, name: str, table: str) -> None:
    """Adds a table to a file, which may be empty, and is made where it is missing. Raises `ConfigurationError` where it cannot be used."""
    is_new = not path.exists() or not path.stat().st_size
    if not is_new and any(key.name == name for key in read_keys(path)):
        raise ConfigurationError(f"{path} has a key with the name {name} already")
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(table if is_new else f"\n{table}")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}") from error


def described(key: ApiKey) -> str:
    """Its name, and the limits that it has."""
    limits = {name: value for name, value in structs.asdict(key.limits).items() if value is not None}
    if "models" in limits:
        limits["models"] = ",".join(limits["models"])
    return " ".join((key.name, *(f"{name}={value}" for name, value in limits.items())))
