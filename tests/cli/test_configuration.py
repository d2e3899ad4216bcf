"""Options from the command line, the environment and files: which of them counts, what is refused, and what `penstock config` prints."""

import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import COMMANDS
from penstock.cli.config import summary
from penstock.cli.flags import Configuration, build_parser, configured, parse_arguments
from penstock.cli.settings import MASK
from penstock.engine.config import AdapterSource
from penstock.engine.errors import ConfigurationError
from penstock.serving.limits import hash_of
from penstock.serving.options import OPTIONS, Arguments
from tests.cli.test_commands import EVERY_FLAG


def configuration(*words: str, environ: Mapping[str, str] | None = None) -> Configuration:
    parser = build_parser()
    return configured(parser, vars(parser.parse_intermixed_args(words)), environ or {})


def of_file(folder: Path, text: str, suffix: str = "toml") -> Arguments:
    path = folder / f"penstock.{suffix}"
    path.write_text(text, encoding="utf-8")
    return configuration("--config", str(path)).arguments


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert COMMANDS["config"]([*words]) == 0
    return capsys.readouterr().out


def test_each_source_overrides_those_after_it(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text('port = 1\nhost = "a"\nmax-num-seqs = 3\nserved-model-name = ["x", "y"]\n')
    environ = {"PENSTOCK_CONFIG": str(path), "PENSTOCK_PORT": "2", "PENSTOCK_HOST": "b", "PENSTOCK_SERVED_MODEL_NAME": "z"}
    given = configuration("--port", "4", environ=environ)
    assert (given.arguments.port, given.arguments.host, given.arguments.engine.max_num_seqs) == (4, "b", 3)
    assert given.arguments.served_model_names == ("z",)
    assert {name: setting.source for name, setting in given.settings.items()} == {
        "port": "command line",
        "host": "PENSTOCK_HOST",
        "max_num_seqs": f"{path}:3",
        "served_model_name": "PENSTOCK_SERVED_MODEL_NAME",
    }
    assert summary(given.settings) == f"1 from the command line, 2 from the environment, 1 from {path}"


def test_the_command_line_alone_needs_no_summary() -> None:
    assert summary(configuration("--port", "4").settings) == ""


def test_the_model_may_be_in_a_file_or_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text('model = "a/b"\n')
    assert configuration("--config", str(path)).arguments.engine.model == "a/b"
    assert configuration("serve", "c/d", "--config", str(path)).arguments.engine.model == "c/d"


YAML = """
model: 007
max-model-len: 8k
kv_cache_memory: 2GiB
keep-alive-interval: 2.5
compile: off          # false, as YAML has it
playground: no
trust-remote-code: true
allowed-hosts: [A.example, b.example]
plugin: hermes
adapter: [a=dir/a, {name: b, path: dir/b}]
override-generation-config: {temperature: 0.5, top_k: null}
swap-space: 4
disable-fastapi-docs: true
"""


def test_yaml_is_read_as_it_is_written(tmp_path: Path) -> None:
    given = of_file(tmp_path, YAML, "yaml")
    assert (given.engine.model, given.engine.max_model_len, given.engine.kv_cache_memory) == ("007", 8000, 2 * 2**30)
    assert (given.engine.compile, given.server.playground, given.engine.trust_remote_code) == ("off", False, True)
    assert (given.server.allowed_hosts, given.plugins, given.server.docs) == (("a.example", "b.example"), ("hermes",), False)
    assert given.engine.adapters == (AdapterSource("a", "dir/a"), AdapterSource("b", "dir/b"))
    assert (given.override_generation_config, given.server.keep_alive_interval) == ({"temperature": 0.5, "top_k": None}, 2.5)


def test_a_file_of_comments_sets_nothing(tmp_path: Path) -> None:
    for suffix in ("toml", "yaml"):
        assert of_file(tmp_path, "# port = 1\n", suffix) == Arguments()


LEVELS = [f"&{name} [{', '.join([f'*{last}'] * 9)}]" for last, name in zip("abcdefgh", "bcdefghi", strict=True)]
BOMB = f"plugin: [&a [x], {', '.join(LEVELS)}]"


@pytest.mark.parametrize(
    ("suffix", "text", "message"),
    [
        ("toml", "\nport = 1\nmax-num-seq = 2", "penstock.toml:3: max-num-seq: there is no such flag (did you mean max-num-seqs?)"),
        ("toml", "[server]\nport = 1", "penstock.toml:1: server: there is no such flag; flags are at the top level of the file"),
        ("toml", "no-playground = true", "penstock.toml:1: no-playground: there is no such flag (for --no-playground, write playground"),
        ("toml", "host = 'a'\nport = 1\n'port' = 2\n", "penstock.toml:3: port: it is set already: "),
        ("toml", "a.b = 1\na.b = 2\n", "penstock.toml is not TOML: Cannot overwrite a value (at line 2, column 8)"),
        ("toml", "port = 1\n'max-num-seqs' = 1\nmax_num_seqs = 2", "toml:3: max_num_seqs: it is set already: "),
        ("toml", "port = 70000", "penstock.toml:1: port: '70000' is not an integer from 0 to 65535"),
        ("toml", "port = [1]", "penstock.toml:1: port: it takes one value, not a list"),
        ("toml", "port = true", "penstock.toml:1: port: it takes PORT, not true"),
        ("toml", "port = 8000.0", "penstock.toml:1: port: '8000.0' is not an integer"),
        ("toml", "compile = false", "penstock.toml:1: compile: it takes {auto,off,on}, not false"),
        ("toml", "model.path = 'a'", "penstock.toml:1: model: it takes ID|DIR|GGUF, not a table"),
        ("toml", "docs = 'no'", "penstock.toml:1: docs: 'no' is not true or false"),
        ("toml", "docs = 1", "penstock.toml:1: docs: '1' is not true or false"),
        ("toml", "allowed-hosts = ['a', {b = 1}]", "penstock.toml:1: allowed-hosts: [1]: it takes NAME, not a table"),
        ("toml", "adapter = [{name = 'a'}]", 'penstock.toml:1: adapter: [0]: \'{"name": "a"}\' is not NAME=DIR'),
        ("toml", "swap-space = 8", "penstock.toml:1: swap-space: `swap_space=8`: sequences that do not fit the KV cache are preempted"),
        ("toml", "gpu-memory-utilization = 0.9", "`gpu_memory_utilization` is not supported: use --kv-cache-memory 8GiB"),
        (
            "toml",
            "override-generation-config = {temperatur = 0.6}",
            "penstock.toml:1: override-generation-config: temperatur: the names are temperature, ",
        ),
        ("toml", "\noverride-generation-config.top_p = 2", "penstock.toml:2: override-generation-config: `top_p` must be greater than 0"),
        ("toml", "override-generation-config = {top_k = 2026-01-01}", "penstock.toml:1: override-generation-config: `top_k` must be"),
        ("toml", "otlp-endpoint = 'foo'", "penstock.toml:1: otlp-endpoint: 'foo' is not a URL such as http://127.0.0.1:4318"),
        ("toml", "otlp-endpoint = 'grpc://foo'", "OTEL_EXPORTER_OTLP_PROTOCOL=grpc chooses gRPC"),
        ("toml", "api-key = ['', 'a']", "--api-key is empty"),
        ("toml", "api-key = []", "--api-key is empty"),
        ("toml", f"port = {'1' * 5000}", "penstock.toml is not TOML: Exceeds the limit (4300 digits)"),
        ("toml", f"plugin = {'[' * 5000}{']' * 5000}", "penstock.toml is not TOML: it is nested too deeply"),
        ("toml", "port = \n", "penstock.toml is not TOML: Invalid value (at line 1, column 8)"),
        ("yaml", "a: b\nmax-modle-len: 3", "penstock.yaml:1: a: there is no such flag"),
        ("yaml", "host: a\nmax-modle-len: 3", "penstock.yaml:2: max-modle-len: there is no such flag (did you mean max-model-len?)"),
        ("yaml", "port: 1\nport: 2", "penstock.yaml:2: port: it is set already: "),
        ("yaml", "port:", "penstock.yaml:1: port: it has no value; leave it out for the default"),
        ("yaml", "port: [[1]]", "penstock.yaml:1: port: it takes one value, not a list"),
        ("yaml", "plugin: [[a]]", "penstock.yaml:1: plugin: [0]: it takes no lists in a list"),
        ("yaml", "host: yes", "penstock.yaml:1: host: it takes HOST, not yes"),
        (
            "yaml",
            "override-generation-config: {top_k: 2026-01-01}",
            "penstock.yaml:1: override-generation-config: a table can hold what JSON can",
        ),
        ("yaml", "host: 2026-13-01", "penstock.yaml:1: host: month must be in 1..12"),
        ("yaml", "port: !!int abc", "penstock.yaml:1: port: invalid literal for int()"),
        ("yaml", BOMB, "penstock.yaml: with its aliases written out, it has more than 10000 values"),
        ("yaml", "- port: 1", "penstock.yaml:1: a configuration file is a mapping of flags to values"),
        ("yaml", "port: 1\nhost: [", "penstock.yaml:2: it is not YAML: "),
        ("yaml", "port: 1\n\thost: a", "penstock.yaml:2: it is not YAML: "),
        ("yaml", "port: !!python/name:os.system 1", "penstock.yaml:1: it is not YAML: could not determine a constructor"),
        ("ini", "port = 1", "ends in .toml, .yaml, .yml"),
    ],
)
def test_a_mistake_in_a_file_is_located(tmp_path: Path, suffix: str, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        of_file(tmp_path, text, suffix)
    assert message in str(refused.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"host = '\xe9'")
    for name, reason in (("none.toml", "No such file"), ("latin.toml", "can't decode byte")):
        with pytest.raises(ConfigurationError, match=f"--config .*{name} cannot be read: .*{reason}"):
            configuration("--config", str(tmp_path / name))


@pytest.mark.parametrize(
    ("variable", "text", "name", "expected"),
    [
        ("PENSTOCK_PLAYGROUND", "off", "playground", False),
        ("PENSTOCK_TRUST_REMOTE_CODE", "YES", "trust_remote_code", True),
        ("PENSTOCK_API_KEY", "one, two,", "api_key", ("one", "two")),
        ("PENSTOCK_API_KEY", '["with, comma"]', "api_key", ("with, comma",)),
        ("PENSTOCK_ALLOWED_ORIGINS", '["http://a", "http://b"]', "allowed_origins", ("http://a", "http://b")),
        ("PENSTOCK_ADAPTER", "a=b,[c=d", "adapter", (AdapterSource("a", "b"), AdapterSource("[c", "d"))),
        ("PENSTOCK_ADAPTER", '[{"name": "a", "path": "b"}, "c=d"]', "adapter", (AdapterSource("a", "b"), AdapterSource("c", "d"))),
        ("PENSTOCK_OVERRIDE_GENERATION_CONFIG", '{"top_k": 5}', "override_generation_config", {"top_k": 5}),
        ("PENSTOCK_KV_CACHE_MEMORY", "2GiB", "kv_cache_memory", 2 * 2**30),
    ],
)
def test_a_variable_sets_a_flag(variable: str, text: str, name: str, expected: Any) -> None:
    assert configuration(environ={variable: text}).settings[name].value == expected


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("PENSTOCK_PORT", "http", "PENSTOCK_PORT: 'http' is not an integer from 0 to 65535"),
        ("PENSTOCK_OTLP_ENDPOINT", "foo", "PENSTOCK_OTLP_ENDPOINT: 'foo' is not a URL"),
        ("PENSTOCK_OVERRIDE_GENERATION_CONFIG", '{"stop": "a"}', "PENSTOCK_OVERRIDE_GENERATION_CONFIG: stop: the names are"),
        ("PENSTOCK_DOCS", "maybe", "PENSTOCK_DOCS: 'maybe' is not true or false"),
        ("PENSTOCK_API_KEY", ",", "PENSTOCK_API_KEY: it holds no value"),
        ("PENSTOCK_API_KEY", "[]", "PENSTOCK_API_KEY: it holds no value"),
        ("PENSTOCK_API_KEY", "[null]", "PENSTOCK_API_KEY: it holds no value"),
        ("PENSTOCK_API_KEY", '["secret', "PENSTOCK_API_KEY: it is not a JSON list: Unterminated string"),
        ("PENSTOCK_ALLOWED_ORIGINS", '["a"', "is not a JSON list"),
        ("PENSTOCK_API_KEYS", "secret", "unknown environment variable PENSTOCK_API_KEYS (did you mean PENSTOCK_API_KEY?)"),
        ("PENSTOCK_CACHE_", "x", "did you mean PENSTOCK_CACHE?"),
    ],
)
def test_a_mistake_in_a_variable_is_named(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        configuration(environ={variable: text})


def test_variables_that_set_nothing() -> None:
    of_kubernetes = {
        "PENSTOCK_SERVICE_HOST": "10.0.0.1",
        "PENSTOCK_SERVICE_PORT_HTTP": "80",
        "PENSTOCK_PORT": "tcp://10.0.0.1:80",
        "PENSTOCK_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    others = {"PENSTOCK_HOST": "", "PENSTOCK_CACHE": "/cache", "PENSTOCK_DEPLOYMENT_COLOUR": "blue", "PORT": "1"}
    assert configuration(environ={**of_kubernetes, **others}).settings == {}


EVERY = parse_arguments(shlex.split(EVERY_FLAG))
SECRETS = {option.name: value for option, value in EVERY.values() if option.is_secret}


def every_flag(capsys: pytest.CaptureFixture[str], folder: Path) -> dict[str, Any]:
    """By name, what the file has that `penstock config` prints for `EVERY_FLAG`."""
    with pytest.raises(ConfigurationError, match=r"keys\.toml: cannot be read"):
        COMMANDS["config"](["--toml", *shlex.split(EVERY_FLAG)])
    text = capsys.readouterr().out
    (folder / "every.toml").write_text(text, encoding="utf-8")
    return {key.replace("-", "_"): value for key, value in tomllib.loads(text).items()}


def variables(values: Mapping[str, Any]) -> dict[str, str]:
    texts = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return {OPTIONS[name].variable: value if isinstance(value, str) else json.dumps(value) for name, value in texts.items()}


def test_every_flag_can_be_set_in_a_file_that_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values = every_flag(capsys, tmp_path)
    assert set(values) == set(OPTIONS)
    masked = {name: values.pop(name) for name in SECRETS}
    assert masked == {name: [MASK] * len(value) if OPTIONS[name].is_repeatable else MASK for name, value in SECRETS.items()}
    environ = variables(SECRETS)
    assert configuration("--config", str(tmp_path / "every.toml"), environ=environ).arguments == EVERY
    json_lines = "\n".join(f"{name}: {json.dumps(value)}" for name, value in values.items())  # each of which is YAML
    (tmp_path / "every.yaml").write_text(json_lines, encoding="utf-8")
    assert configuration("--config", str(tmp_path / "every.yaml"), environ=environ).arguments == EVERY


def test_every_flag_can_be_set_by_a_variable(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert configuration(environ=variables(every_flag(capsys, tmp_path) | SECRETS)).arguments == EVERY


def test_the_printed_defaults_are_a_file_that_changes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = printed(capsys, "--toml")
    assert tomllib.loads(text) == {}
    assert "# port = 8000\n" in text
    assert "# max-num-seqs: 64 on CPU, 256 on CUDA\n" in text
    uncommented = "\n".join(line.removeprefix("# ") for line in text.splitlines() if re.match(r"# [\w-]+ = ", line))
    assert of_file(tmp_path, uncommented) == Arguments()


def test_config_prints_each_value_with_its_source(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.toml"
    path.write_text('host = "::"\n\nmax-num-seqs = 7\n')
    monkeypatch.setenv("PENSTOCK_DOCS", "no")
    flags = ("--config", str(path), "--api-key", "secret")
    rows = [line.split(maxsplit=2) for line in printed(capsys, "serve", "a/b", "--changed", *flags).splitlines()]
    assert rows == [
        ["flag", "value", "source"],
        ["--model", '"a/b"', "command line"],
        ["--max-num-seqs", "7", f"{path}:3"],
        ["--host", '"::"', f"{path}:1"],
        ["--api-key", f'["{MASK}"]', "command line"],
        ["--docs", "false", "PENSTOCK_DOCS"],
    ]
    everything = printed(capsys, *flags)
    assert len(everything.splitlines()) == len(OPTIONS) + 1
    assert re.search(r"^--kv-cache-dir +in memory only +default$", everything, re.MULTILINE)
    assert "secret" not in everything + printed(capsys, "--toml", *flags)


@pytest.mark.parametrize(
    ("flag", "text", "mistake"),
    [
        ("--keys", '[keys.alice]\nhash = "sha256:2"\n', "--keys .*, line 2: "),
        ("--models", "[models.small]\nport = 1\n", r"--models .*: models.small.port: this is set for the whole server"),
        ("--models", None, "--models .* cannot be read"),
    ],
)
def test_config_reads_the_files_of_keys_and_models(
    flag: str, text: str | None, mistake: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "file.toml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=mistake):
        COMMANDS["config"](["--changed", flag, str(path)])
    assert str(path) in capsys.readouterr().out
    path.write_text(f'[keys.alice]\nhash = "{hash_of("secret")}"\n' if flag == "--keys" else "[models.smollm2]\n", encoding="utf-8")
    assert str(path) in printed(capsys, "--changed", flag, str(path))


def test_what_is_printed_for_a_secret_is_not_taken_for_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"penstock.toml:1: api-key: \*+ is what `penstock config` prints in place of a secret"):
        of_file(tmp_path, f'api-key = ["{MASK}"]')


def test_options_that_hold_secrets_are_marked() -> None:
    named = {option.name for option in OPTIONS.values() if re.search(r"(^|_)(key|secret|password|token)$", option.name)}
    assert {name for name in named if OPTIONS[name].kind is not bool} <= {option.name for option in OPTIONS.values() if option.is_secret}


def test_help_names_the_variable_of_each_flag() -> None:
    text = " ".join(build_parser().format_help().split())
    for option in OPTIONS.values():
        assert f"[env: {option.variable}]" in text
    assert "[env: PENSTOCK_CONFIG]" in text


def test_api_servers_read_a_copy_of_the_file(tmp_path: Path) -> None:
    from penstock.cli.api_servers import copied_config

    path = tmp_path / "penstock.toml"
    path.write_text("port = 1\n")
    with copied_config(path) as words:
        path.write_text("prot = 1\n")
        assert configuration("--config", str(path.with_name("other.toml")), *words).arguments.port == 1
    assert not Path(words[1]).exists()
