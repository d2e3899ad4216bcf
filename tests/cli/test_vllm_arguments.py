"""What vLLM's users type: taken where it means what is the case or is one of ours, else refused with the right hint."""

import contextlib
import re
import shlex

import pytest

from penstock.cli.flags import build_parser, parse_arguments
from penstock.engine.errors import ConfigurationError
from penstock.server import main
from penstock.serving.vllm_arguments import ALL, SHORT_FLAGS, flag_of, to_our_flags

OWN = {flag for action in build_parser()._actions for flag in action.option_strings}
# Of its reference, those that people give every day.
DAILY = shlex.split("""
    --allowed-origins --allowed-headers --allowed-methods --api-key --api-server-count --async-scheduling --block-size --chat-template
    --chat-template-content-format --compilation-config --config --config-format --convert --cpu-offload-gb --cudagraph-capture-sizes
    --data-parallel-size --device --disable-custom-all-reduce --disable-fastapi-docs --disable-frontend-multiprocessing
    --disable-log-requests --disable-log-stats --disable-sliding-window --disable-uvicorn-access-log --distributed-executor-backend
    --download-dir --dtype --enable-auto-tool-choice --enable-chunked-prefill --enable-expert-parallel --enable-force-include-usage
    --enable-log-outputs --enable-log-requests --enable-lora --enable-prefix-caching --enable-prompt-embeds --enable-prompt-tokens-details
    --enable-reasoning --enable-request-id-headers --enable-server-load-tracking --enable-sleep-mode --enforce-eager
    --gpu-memory-utilization --guided-decoding-backend --hf-config-path --hf-overrides --hf-token --host --kv-cache-dtype
    --kv-cache-memory-bytes --kv-transfer-config --limit-mm-per-prompt --load-format --log-config-file --logits-processors --logprobs-mode
    --lora-modules --max-cpu-loras --max-log-len --max-logprobs --max-lora-rank --max-loras --max-model-len --max-num-batched-tokens
    --max-num-queued-reqs --max-num-seqs --max-seq-len-to-capture --middleware --mm-processor-kwargs --model --model-impl
    --moe-backend --nnodes --num-gpu-blocks-override --otlp-traces-endpoint --pipeline-parallel-size --pooler-config --port
    --quantization --reasoning-parser --reasoning-parser-plugin --response-role --return-tokens-as-token-ids --revision --root-path
    --rope-scaling --runner --scheduling-policy --seed --served-model-name --shutdown-timeout --skip-tokenizer-init --speculative-config
    --sse-keep-alive-interval --ssl-certfile --ssl-keyfile --stream-interval --structured-outputs-config --swap-space --task
    --tensor-parallel-size --tokenizer --tokenizer-mode --tokenizer-revision --tool-call-parser --tool-parser-plugin
    --trust-remote-code --trust-request-chat-template --uds --uvicorn-log-level
""")


@pytest.mark.parametrize("flag", sorted({*DAILY, *SHORT_FLAGS} - OWN))
def test_every_daily_flag_has_an_answer(flag: str) -> None:
    with contextlib.suppress(ConfigurationError):  # which says what to use instead: see below
        assert {word for word in to_our_flags([flag, "value"], OWN) if word.startswith("-")} <= OWN


def test_no_argument_is_declared_that_is_ours() -> None:
    assert not {flag_of(name) for name in ALL} & OWN


def test_every_hint_names_flags_that_there_are() -> None:
    for argument in ALL.values():
        assert argument.hint
        assert {flag_of(name) for name in re.findall(r"\{(\w+)", argument.hint)} <= OWN
        assert all(flag_of(name) in OWN for _, name, _ in argument.meanings)


@pytest.mark.parametrize(
    "argv",
    [
        "--enable-reasoning --enable-auto-tool-choice --enable-chunked-prefill --disable-log-requests --no-enable-log-requests",
        "-tp 1 -pp=1 -dp 1 --tensor-parallel-size 1 --pipeline-parallel-size=1 --data-parallel-size 1",
        "--task auto --revision main --load-format auto --swap-space 4 --response-role assistant --max-logprobs 20",
        "--disable-log-stats --enable-prompt-tokens-details --enable-request-id-headers --no-enable-expert-parallel",
        """--exclude-tools-when-tool-choice-none --limit-mm-per-prompt {"video":0} --limit-mm-per-prompt={"video":0,"audio":0}""",
        """--allowed-methods ["*"] --allowed-headers ["*"] --hf-overrides {} --middleware []""",
    ],
)
def test_what_is_the_case_changes_nothing(argv: str) -> None:
    assert parse_arguments(argv.split()) == parse_arguments([])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--enforce-eager --port 1", "--compile off --port 1"),
        ("--task embed", "--runner pooling"),
        ("--task=generate", "--runner generate"),
        ("--enable-prefix-caching", "--prefix-caching"),
        ("--no-enable-prefix-caching", "--no-prefix-caching"),
        ("--kv-cache-memory-bytes 2G", "--kv-cache-memory 2G"),
        ("--served_model_name m.port", "--served-model-name=m.port"),
        (
            "--kv_cache_memory_bytes=2G --max_model_len 64 --no_prefix_caching",
            "--kv-cache-memory 2G --max-model-len 64 --no-prefix-caching",
        ),
        ("--disable-uvicorn-access-log", "--no-access-log"),
        ("--shutdown-timeout 3 --sse-keep-alive-interval 0", "--drain-timeout 3 --keep-alive-interval 0"),
        ("--dtype half --kv-cache-dtype fp8_e4m3", "--dtype float16 --kv-cache-dtype fp8"),
        ("--dtype float -q int8", "--dtype float32 --quantization int8"),
        ("--max-model-len 8k --max-num-batched-tokens 1.5K", "--max-model-len 8000 --max-num-batched-tokens 1536"),
        ("--max-model-len auto", ""),
        ("""--limit-mm-per-prompt {"image":0} --port 1""", "--language-model-only --port 1"),
        ("""--limit-mm-per-prompt={"image":0,"video":0}""", "--language-model-only"),
        ("--max-model-len -1", ""),
        ("serve Qwen/Qwen3-0.6B", "--model Qwen/Qwen3-0.6B"),
        ("serve --port 1 ./here", "--port 1 --model ./here"),
        ("serve --model m m", "--model m"),
        ("serve m -tp 1 --enable-auto-tool-choice", "--model m"),
        ("serve --enable-reasoning m", "--model m"),
        ("--served-model-name a b --plugin c d", "--served-model-name a --served-model-name b --plugin c --plugin d"),
        ("--without a b --api-key c d", "--without a --without b --api-key c --api-key d"),
    ],
)
def test_what_is_ours_by_another_name(theirs: str, ours: str) -> None:
    assert parse_arguments(theirs.split()) == parse_arguments(ours.split())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("-dp 2", "error: -dp 2: a model is shared among ranks by --tensor-parallel-size or --pipeline-parallel-size alone"),
        ("--data-parallel-size", "--data-parallel-size needs a value"),
        ("--no-enable-chunked-prefill", "--no-enable-chunked-prefill is not supported: long prompts are always computed in chunks"),
        ("--gpu-memory-utilization 0.9", "use --kv-cache-memory 8GiB"),
        ("--block-size=32", "--block-size 32: blocks of the KV cache hold 16 tokens"),
        ("""--limit-mm-per-prompt {"image":1}""", "--limit-mm-per-prompt is not supported: a request may have 32 images"),
        ("--no-exclude-tools-when-tool-choice-none", "tools are not in the prompt if `tool_choice` is `none`"),
        ("--enable-log-requests", "the access log, on by default, has a line for each (--access-log)"),
        ("--compilation-config.level 3", "--compilation-config.level is not supported: use --compile"),
        ("--speculative-config {}", "use --speculation"),
        ("--revision abc", "name a local directory"),
        ("--uvicorn-log-level info", "use --log-level"),
        ("--tool-parser-plugin x.py", "--plugin FILE.py loads a parser"),
        ("--reasoning-parser-plugin x.py", "--plugin FILE.py loads a parser"),
        ("--no-enable-auto-tool-choice", "use --tool-parser none"),
        ("--log-error-stack", "use --log-level debug"),
        ("--disable-async-output-proc", "use --no-async-scheduling"),
        ("Qwen/Qwen3-0.6B", "there is no command 'Qwen/Qwen3-0.6B'; to serve a model: penstock serve Qwen/Qwen3-0.6B"),
        ("model.gguf --port 1", "to serve a model: penstock serve model.gguf"),
        ("sevre m", "did you mean `serve`?"),
        ("--plugin deepseek_r1 Qwen/Qwen3-0.6B", "'Qwen/Qwen3-0.6B' is no plug-in; a model goes right after `serve`"),
        ("serve a --model b", "two models are given: 'a', and 'b' by --model"),
        ("--kv-cache-dtyp int8", "unknown flag --kv-cache-dtyp (did you mean --kv-cache-dtype?)"),
        ("--max-model-len.x 8", "unknown flag --max-model-len.x (did you mean --max-model-len?)"),
        ("--max_model_le 8", "unknown flag --max_model_le (did you mean --max-model-len?)"),
        ("--max-model-len 8x", "'8x' is not a number of tokens"),
        ("--max-model-len 0", "'0' is not a number of tokens"),
        ("--max-model-len 1.5", "'1.5' is not a number of tokens"),
        ("--quantization awq", "invalid choice: 'awq'"),
        ("-z", "unknown flag -z"),
    ],
)
def test_everything_else_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], argv: str, said: str) -> None:
    try:
        code: object = main(argv.split())
    except SystemExit as stopped:
        code = stopped.code
    message = capsys.readouterr().err
    assert code == 2
    assert re.fullmatch(r"penstock: error: [^\n]+\n", message)
    assert said in message


def test_a_model_name_with_a_slash_may_be_a_name_for_clients() -> None:
    assert parse_arguments(["--served-model-name", "a/b", "c/d"]).served_model_names == ("a/b", "c/d")


@pytest.mark.parametrize("flag", ["--enable-foo", "--disable-bar", "--response-format", "--request-timeout", "--workers", "--num-ctx"])
def test_a_flag_that_is_like_none_gets_no_offer(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([flag])
    assert "did you mean" not in capsys.readouterr().err


def test_help_says_that_vllms_flags_are_taken_and_hides_none_of_ours() -> None:
    text = build_parser().format_help()
    assert "vLLM's flags" in text
    assert all(flag in text for flag in OWN)
