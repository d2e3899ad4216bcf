"""The command line: what it reads, what it refuses, and what it costs to ask for help."""

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import COMMANDS
from penstock.cli.flags import build_parser, parse_arguments
from penstock.cli.pages import pages
from penstock.engine.config import AdapterSource, EngineConfig
from penstock.engine.errors import ConfigurationError
from penstock.engine.options import options_of, size
from penstock.serving.options import OPTIONS, OPTIONS_BY_ANY_NAME, AdminAddress, Arguments, ServerOptions

ROOT = Path(__file__).parents[2]
KINDS: tuple[type, ...] = (EngineConfig, ServerOptions, Arguments)


EVERY_FLAG = """
    --model m --runner pooling --served-model-name a --served-model-name b --dtype float32 --device cpu --max-model-len 10
    --trust-remote-code --language-model-only --matryoshka --verify-weights --native-kernels none
    --models models.toml --models-memory 24GiB --models-wait 30
    --quantization int8 --plugin deepseek_r1 --plugin hermes --without granite --reasoning-parser deepseek_r1 --tool-parser hermes
    --content-special-tokens text
    --reasoning-field both --metrics-without-key --no-playground --max-tool-calls 3 --share-prefix-cache --isolate-keys --min-priority -5
    --write-timeout 4 --request-timeout 9.5
    --chat-template think --thinking-token-budget 5 --trust-request-chat-template --additional-properties open
    --allow-unknown-fields --allow-image-urls
    --host 0.0.0.0 --port 0 --api-key k1 --api-key k2 --keys keys.toml --allowed-origins http://a http://b --max-body-size 1MiB
    --allowed-hosts Example.com *.example.com --max-connections 9 --read-timeout 6 --keep-alive-timeout 7
    --keep-alive-interval 2.5 --drain-timeout 3 --log-level debug --no-access-log --max-num-seqs 7 --max-num-batched-tokens 99
    --kv-cache-memory 2GiB --kv-cache-dtype fp8 --no-prefix-caching --enable-prompt-embeds --max-waiting-requests 4
    --max-queue-time 2.5 --compile off --speculation none --draft-model d --no-adaptive-speculation
    --tensor-parallel-size 4 --pipeline-parallel-size 3 --distributed-address 10.0.0.1:29500 --distributed-timeout 30
    --kv-cache-dir kv --kv-cache-dir-size 3GiB --kv-transfer-dir shm --kv-transfer-dir-size 2GiB
    --max-waiting-tokens 8K --priority-aging 1.5 --no-hybrid-kv-cache --api-servers 3
    --no-docs --log-format json --metric-prefix vllm --otlp-endpoint http://c:4318
    --kv-events tcp://*:5557 --kv-events-topic t --kv-events-replay tcp://*:5558
    --adapter a=dir/a --adapter '{"name": "b", "path": "b"}' --adapter-dir dir --enable-lora --max-loras 3 --max-lora-rank 32
    --max-cpu-loras 9
    --files-dir files --max-file-size 3MiB --files-quota 1GiB --max-batch-requests 8
    --response-store /tmp/r.sqlite --response-store-size 1MiB --response-store-count 5 --response-store-age 60
    --async-scheduling --threads 2 --pin-threads on --seed 11 --generation-config vllm --override-generation-config '{"top_k": 5}'
    --default-chat-template-kwargs '{"enable_thinking": false}'
    --admin 127.0.0.1:9000 --admin-key k3 --sleep-idle-seconds 60 --sleep-idle-level 1
"""


def test_the_tool_parser_has_vllms_name_too() -> None:
    assert parse_arguments(["--tool-call-parser", "hermes"]).tool_parser == "hermes"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_other_commands_go_before_all_flags(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert f"`{command}` goes before all flags" in complaint(capsys, "--port", "0", command)


def test_help_of_other_commands_does_not_wait_for_torch() -> None:
    ask = "try:\n    penstock.server.main(['{}', '--help'])\nexcept SystemExit: pass"
    loaded = loaded_after("\n".join(["import penstock.server", *map(ask.format, sorted(COMMANDS))]))
    assert not {"torch", "transformers", "aiohttp", "jinja2", "pluggy"} & loaded


def complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        parse_arguments(list(argv))
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_no_flags_mean_the_default_model_at_the_default_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    arguments = parse_arguments([])
    assert arguments.engine == EngineConfig()
    assert (arguments.host, arguments.port, arguments.server.api_keys) == ("127.0.0.1", 8000, ())
    assert (arguments.plugins, arguments.reasoning_parser, arguments.tool_parser) == ((), "auto", "auto")


@pytest.mark.parametrize(
    ("words", "origins"),
    [
        (["*"], ("*",)),
        (["http://a", "http://b"], ("http://a", "http://b")),
        (['["*"]'], ("*",)),
        (['["http://a", "http://b"]', "http://c"], ("http://a", "http://b", "http://c")),
    ],
)
def test_allowed_origins_are_words_or_vllms_json_list(words: list[str], origins: tuple[str, ...]) -> None:
    assert parse_arguments(["--allowed-origins", *words]).server.allowed_origins == origins


def test_a_list_of_origins_that_is_no_json_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ('["http://a"', "[1]"):
        assert "no JSON list of strings" in complaint(capsys, "--allowed-origins", words)


def test_every_flag_reaches_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    argv = shlex.split(EVERY_FLAG)
    engine = EngineConfig(
        model="m",
        dtype="float32",
        quantization="int8",
        device="cpu",
        max_model_len=10,
        max_num_seqs=7,
        max_num_batched_tokens=99,
        kv_cache_memory=2 * 2**30,
        kv_cache_dtype="fp8",
        kv_cache_dir="kv",
        kv_cache_dir_size=3 * 2**30,
        kv_transfer_dir="shm",
        kv_transfer_dir_size=2 * 2**30,
        kv_events="tcp://*:5557",
        kv_events_topic="t",
        kv_events_replay="tcp://*:5558",
        tensor_parallel_size=4,
        pipeline_parallel_size=3,
        distributed_address="10.0.0.1:29500",
        distributed_timeout=30,
        async_scheduling=True,
        enable_prefix_caching=False,
        enable_prompt_embeds=True,
        hybrid_kv_cache=False,
        max_waiting_requests=4,
        max_waiting_tokens=8192,
        max_queue_time=2.5,
        priority_aging=1.5,
        compile="off",
        native_kernels="none",
        seed=11,
        speculation="none",
        draft_model="d",
        adaptive_speculation=False,
        num_threads=2,
        pin_threads="on",
        trust_remote_code=True,
        language_model_only=True,
        matryoshka=True,
        adapters=(AdapterSource("a", "dir/a"), AdapterSource("b", "b")),
        enable_lora=True,
        max_loras=3,
        max_lora_rank=32,
        max_cpu_loras=9,
    )
    server = ServerOptions(
        default_chat_template_kwargs={"enable_thinking": False},
        reasoning_field="both",
        max_tool_calls=3,
        trust_request_chat_template=True,
        adapter_dir="dir",
        additional_properties="open",
        allow_unknown_fields=True,
        allow_image_urls=True,
        api_keys=("k1", "k2"),
        keys_file="keys.toml",
        share_prefix_cache=True,
        isolate_keys=True,
        min_priority=-5,
        docs=False,
        metric_prefix="vllm",
        otlp_endpoint="http://c:4318",
        metrics_without_key=True,
        playground=False,
        allowed_hosts=("example.com", "*.example.com"),
        allowed_origins=("http://a", "http://b"),
        max_body_size=2**20,
        max_connections=9,
        read_timeout=6.0,
        write_timeout=4.0,
        request_timeout=9.5,
        keep_alive_timeout=7.0,
        keep_alive_interval=2.5,
        files_dir="files",
        max_file_size=3 * 2**20,
        files_quota=2**30,
        max_batch_requests=8,
        response_store="/tmp/r.sqlite",
        response_store_size=2**20,
        response_store_count=5,
        response_store_age=60.0,
    )
    expected = Arguments(
        engine=engine,
        server=server,
        verify_weights=True,
        models="models.toml",
        models_memory=24 * 2**30,
        models_wait=30.0,
        runner="pooling",
        served_model_names=("a", "b"),
        plugins=("deepseek_r1", "hermes"),
        without=("granite",),
        reasoning_parser="deepseek_r1",
        tool_parser="hermes",
        chat_template="think",
        generation_config="vllm",
        override_generation_config={"top_k": 5},
        thinking_token_budget=5,
        content_special_tokens="text",
        host="0.0.0.0",
        port=0,
        api_servers=3,
        drain_timeout=3.0,
        admin=AdminAddress("127.0.0.1", 9000),
        admin_key="k3",
        sleep_idle_seconds=60.0,
        sleep_idle_level="1",
        log_level="debug",
        log_format="json",
        access_log=False,
    )
    assert parse_arguments(argv) == expected
    default = {option.name: value for option, value in parse_arguments([]).values()}
    same = {option.name for option, value in expected.values() if value == default[option.name]}
    assert same == set(), "a flag is not in this test"


def test_keys_come_from_the_environment_unless_flags_name_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "one, two")
    assert parse_arguments([]).server.api_keys == ("one", "two")
    assert parse_arguments(["--api-key", "three"]).server.api_keys == ("three",)


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--api-key"):
        parse_arguments(["--api-key", ""])


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1024", 1024), ("2GiB", 2 * 2**30), ("2gib", 2 * 2**30), ("1.5 GiB".replace(" ", ""), 3 * 2**29), ("16M", 16_000_000), ("1kb", 1000)],
)
def test_sizes_take_units(text: str, num_bytes: int) -> None:
    assert size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2XB", "1e9", "2 G i B"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        size(text)


def test_a_mistyped_flag_gets_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean --max-model-len?" in complaint(capsys, "--max-modle-len", "5")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--port", "70000"], "an integer from 0 to 65535"),
        (["--max-num-seqs", "0"], "an integer of 1 or more"),
        (["--kv-cache-memory", "lots"], "is not a size such as 2GiB"),
        (["--kv-cache-memory", "0"], "more than 0 bytes"),
        (["--drain-timeout", "-1"], "not a number of seconds"),
        (["--keep-alive-interval", "nan"], "not a number of seconds"),
        (["--dtype", "int3"], "bfloat16"),
        (["--override-generation-config", "{top_k: 5}"], "is not JSON"),
        (["--override-generation-config", '{"topk": 5}'], "--override-generation-config: topk: the names are temperature, top_p"),
        (["--otlp-endpoint", "foo"], "--otlp-endpoint/--otlp-traces-endpoint: 'foo' is not a URL"),
        (["--default-chat-template-kwargs", "[]"], "is not a JSON object"),
        (["--mod", "x"], "unknown flag --mod"),
        (["plug"], "plugins"),
    ],
)
def test_a_wrong_value_is_explained(capsys: pytest.CaptureFixture[str], argv: list[str], expected: str) -> None:
    assert re.search(expected, complaint(capsys, *argv))


def test_every_flag_has_a_help_text() -> None:
    assert [action.dest for action in build_parser()._actions if not action.help] == []


def test_help_speaks_plainly() -> None:
    private = "tried ahead|whoever|nobody|what came of|comes of it|put off|let in|taken back"
    assert [option.name for option in OPTIONS.values() if re.search(private, option.whole_help)] == []


def test_every_field_is_an_option() -> None:
    without = {kind: {field.name for field in dataclasses.fields(kind)} - {option.field for option in options_of(kind)} for kind in KINDS}
    assert without == {EngineConfig: {"block_size"}, ServerOptions: set(), Arguments: {"engine", "server"}}


def test_a_default_has_the_type_that_a_flag_reads() -> None:
    for option in OPTIONS.values():
        if option.kind in (int, float):
            text = "1" if option.default is None else f"{option.default:g}" if option.kind is float else str(option.default)
            assert type(option.value_of(text)) is option.kind
            assert option.default is None or option.value_of(text) == option.default
        elif option.choices:
            assert option.default in option.choices
            assert set(option.synonyms.values()) <= set(option.choices)


def test_no_two_options_share_a_name() -> None:
    names = [name for option in OPTIONS.values() for name in {option.name, option.field, *option.aliases}]
    assert sorted(names) == sorted(OPTIONS_BY_ANY_NAME)


@pytest.mark.parametrize("path", sorted(pages()), ids=lambda path: path.name)
def test_docs_hold_what_is_declared(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == pages()[path], "python -m penstock.cli.pages writes it"


def loaded_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split())


def test_importing_the_package_is_cheap() -> None:
    assert not {"torch", "transformers", "aiohttp", "jinja2", "msgspec", "pluggy", "numpy"} & loaded_after("import penstock")


def test_help_does_not_wait_for_torch() -> None:
    code = "import penstock.server\ntry:\n    penstock.server.main(['--help'])\nexcept SystemExit: pass"
    loaded = loaded_after(code)
    assert "penstock.server" in loaded
    assert not {"torch", "transformers", "aiohttp", "jinja2"} & loaded


def test_a_reader_that_leaves_before_the_end_of_the_output_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run([sys.executable, "server.py", "keys", "alice"], stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize("started_as", [["server.py"], ["-m", "penstock"]])
def test_the_server_file_and_the_package_run_by_their_names(started_as: list[str]) -> None:
    shown = subprocess.run([sys.executable, *started_as, "--version"], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert re.fullmatch(r"penstock \d+\.\d+\.\d+\n", shown)
