"""The file of API keys: what is read from it, and what is said of one that cannot be used."""

import logging
from pathlib import Path

import pytest

from penstock.engine.errors import ConfigurationError
from penstock.serving.limits import ApiKey, KeyRing, MistakeInKeys, hash_of, new_secret, parse_keys
from penstock.serving.models.startup import server_options
from penstock.serving.options import Arguments, ServerOptions

FILE = f"""\
[defaults]
requests_per_minute = 60

[keys.alice]
hash = "{hash_of("one")}"
models = ["qwen", "team-*"]
priority = 5

[keys.bob]
hash = ["{hash_of("two")}", "{hash_of("three")}"]
requests_per_minute = 5
tenant = "ops"
"""


def keys_of(source: str) -> dict[str, ApiKey]:
    return {key.name: key for key in parse_keys(source)}


def ring_of(path: Path, source: str, **options: object) -> KeyRing:
    path.write_text(source, encoding="utf-8")
    return KeyRing.of(ServerOptions(keys_file=str(path), **options))  # type: ignore[arg-type]


def test_keys_have_the_limits_of_their_table_and_for_the_rest_the_defaults() -> None:
    keys = keys_of(FILE)
    assert {name: key.limits.requests_per_minute for name, key in keys.items()} == {"alice": 60, "bob": 5}
    assert (keys["alice"].limits.priority, keys["bob"].limits.priority) == (5, None)
    assert len(keys["bob"].digests) == 2


def test_a_key_may_use_the_models_that_its_patterns_match() -> None:
    keys = keys_of(FILE)
    assert [name for name in ("qwen", "qwen2", "team-a", "Team-a") if keys["alice"].allows_model(name)] == ["qwen", "team-a"]
    assert keys["bob"].allows_model("anything")


@pytest.mark.parametrize(
    ("source", "line", "message"),
    [
        ("[keys.a]\nhash = sha", 2, "Invalid value"),
        (f"[keys.a]\nmax_tokens = {'1' * 5000}", 2, "Exceeds the limit"),
        ("[keys.a]\nhash = 'sha256:00'", 2, r"\[keys.a\]: `hash` is .* 64 hexadecimal digits"),
        ("[keys]\na = 'sha256:00'", 2, r"\[keys.a\] is a table, not a value"),
        ("[keys.'a.b']\nhash = 'sha256:00'", 2, r"\[keys.'a.b'\]: `hash` is"),
        ("[keys.a]\n# nothing\n[keys.b]", 1, r"\[keys.a\]: Object missing required field `hash`"),
        (
            f"[keys.a]\nhash = '{hash_of('a')}'\nrequests_per_minutes = 5",
            3,
            "unknown field `requests_per_minutes`; did you mean `requests_per_minute`",
        ),
        (f"[defaults]\ntokens_per_minute = -1\n[keys.a]\nhash = '{hash_of('a')}'", 2, r"\[defaults\]: Expected `int` >= 1"),
        (f"[keys.a]\nhash = '{hash_of('a')}'\n[keys.b]\n\nhash = '{hash_of('a')}'", 5, "b has the same hash as a"),
        (f"[keys.'a b']\nhash = '{hash_of('a')}'", 1, "is not a name"),
        (f"[keys.a]\nhash = '{hash_of('a')}'\nmodels = [\n  'x',\n  5,\n]", 3, "Expected `str`, got `int`"),
        (f"[keys.a]\nhash = '{hash_of('a')}'\ntenant = 'b c'", 3, r"\[keys.a\]: the tenant 'b c' is not a name"),
        ("[key.a]\nhash = 'x'", 1, "unknown field `key`; did you mean `keys`"),
        ("keys = {}", None, "no key"),
    ],
)
def test_a_mistake_is_described_with_its_line(source: str, line: int | None, message: str) -> None:
    with pytest.raises(MistakeInKeys, match=message) as caught:
        parse_keys(source)
    assert caught.value.line == line


def test_a_ring_finds_keys_by_their_secrets_alone(tmp_path: Path) -> None:
    ring = ring_of(tmp_path / "keys.toml", FILE, api_keys=("four",))
    found = {secret: ring.find(secret) for secret in ("one", "two", "three", "four", "five", "", hash_of("one"))}
    names = {secret: key and key.name for secret, key in found.items()}
    assert names == {"one": "alice", "two": "bob", "three": "bob", "four": "api-key", "five": None, "": None, hash_of("one"): None}


def test_keys_of_one_tenant_have_one_owner_that_stays_when_a_key_is_replaced(tmp_path: Path) -> None:
    more = f'\n[keys.carol]\nhash = "{hash_of("five")}"\ntenant = "ops"\n'
    ring = ring_of(tmp_path / "keys.toml", FILE + more)
    owners = {secret: key.owner for secret in ("one", "two", "three", "five") if (key := ring.find(secret))}
    assert owners["two"] == owners["three"] == owners["five"]
    assert owners["one"] != owners["two"]


def test_a_file_is_read_again_and_a_broken_one_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.toml"
    ring = ring_of(path, FILE)
    path.write_text("[keys.dave]\nhash = 5\n", encoding="utf-8")
    with caplog.at_level(logging.INFO, "penstock"):
        ring.reload()
    assert ring.find("one") is not None
    assert f"--keys {path}, line 2: [keys.dave]: Expected" in caplog.text
    assert "stay as they were" in caplog.text
    path.write_text(f"[keys.dave]\nhash = '{hash_of('six')}'\n", encoding="utf-8")
    ring.reload()
    assert (ring.find("one"), ring.find("six") is not None) == (None, True)
    path.unlink()
    ring.reload()
    assert ring.find("six") is not None


@pytest.mark.parametrize(("source", "complaint"), [(None, "No such file"), ("[keys.a]\nhash = 1", "line 2"), ("[keys.api-key]", "line 1")])
def test_a_server_does_not_start_with_a_file_that_cannot_be_used(tmp_path: Path, source: str | None, complaint: str) -> None:
    path = tmp_path / "keys.toml"
    if source is not None:
        path.write_text(source, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=complaint):
        server_options(Arguments(server=ServerOptions(keys_file=str(path))))


def test_a_file_that_all_users_can_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(FILE, encoding="utf-8")
    path.chmod(0o666)
    with pytest.raises(ConfigurationError, match="chmod o-w"):
        KeyRing.of(ServerOptions(keys_file=str(path)))


def test_a_name_is_not_given_twice(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="api-key is the name of a key of --api-key"):
        ring_of(tmp_path / "keys.toml", f"[keys.api-key]\nhash = '{hash_of('a')}'", api_keys=("b",))


def test_secrets_are_long_and_never_the_same() -> None:
    secrets = {new_secret() for _ in range(100)}
    assert len(secrets) == 100
    assert all(secret.startswith("sk-") and len(secret) == 46 for secret in secrets)
