# mypy: disable-error-code="import-untyped"
"""The benchmark against a server that answers at once: what it asks and counts, what it copes with, what it writes."""

import asyncio
import json
import os
import re
import shlex
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from benchmarks import natural, serve
from benchmarks.client import BadAnswer, Recording, read_answer
from benchmarks.measurement import METRICS, percentile
from benchmarks.report import ratio
from benchmarks.scenarios import SCENARIOS, NaturalScenario, WordScenario, long_prompt
from benchmarks.target import ProcessTree, TargetError, launched, split_command
from tests.benchmarks.served.fake_server import FINISH, ROLE, TEXT, FakeServer, sse, usage

OF_WORDS = [scenario for scenario in SCENARIOS if isinstance(scenario, WordScenario)]
NATURAL = [scenario for scenario in SCENARIOS if isinstance(scenario, NaturalScenario)]
COMMAND = f"{shlex.quote(sys.executable)} -m tests.benchmarks.served.fake_server --port {{port}}"


def measured(server: FakeServer, tmp_path: Path, *flags: str, status: int = 0) -> dict[str, Any]:
    """What the script writes after it has driven this server, which ends with this status."""
    written = tmp_path / "made" / "results.json"

    async def drive(url: str) -> None:
        flags_for_all = ["--url", f"fake={url}", "--json", str(written), "--rounds", "1", "--pid", str(os.getpid())]
        assert await asyncio.to_thread(serve.main, [*flags_for_all, *flags]) == status

    asyncio.run(server.while_up(drive))
    whole: dict[str, Any] = json.loads(written.read_text())
    return whole


def answer_bodies(server: FakeServer, num_requests: int) -> list[dict[str, Any]]:
    """Those that were measured: they come after the one that asks what is refused, and after the warm-up."""
    return server.bodies[-num_requests:]


@pytest.fixture(scope="module")
def tokenizer(default_model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(default_model_dir)


@pytest.mark.parametrize("scenario", OF_WORDS, ids=lambda scenario: scenario.name)
def test_prompts_have_the_stated_number_of_tokens_of_the_default_model(scenario: WordScenario, tokenizer: Any) -> None:
    for prompt in scenario.prompts("seed", 2):
        messages = [{"role": "user", "content": prompt}]
        assert len(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]) == scenario.prompt_tokens


@pytest.mark.parametrize("scenario", OF_WORDS, ids=lambda scenario: scenario.name)
def test_prompts_share_only_the_words_that_they_are_to_share(scenario: WordScenario) -> None:
    prompts = [prompt.split() for seed in ("1", "2") for prompt in scenario.prompts(seed, 16)]
    shared = scenario.shared_tokens
    assert len({tuple(words[:shared]) for words in prompts}) == (2 if shared else 1)
    assert len({tuple(words[shared : shared + 16]) for words in prompts}) == len(prompts)


@pytest.mark.parametrize("scenario", OF_WORDS, ids=lambda scenario: scenario.name)
def test_each_scenario_of_words_asks_for_its_tokens_with_its_concurrency(scenario: WordScenario, tmp_path: Path) -> None:
    server = FakeServer(concurrency=scenario.concurrency)
    result = measured(server, tmp_path, "--scenario", scenario.name)["scenarios"][scenario.name]["servers"]["fake"]["rounds"][0]
    bodies = answer_bodies(server, scenario.num_conversations)
    assert [body["max_tokens"] for body in bodies] == [scenario.output_tokens] * scenario.num_conversations
    assert all(body["ignore_eos"] and body["stream_options"] == {"include_usage": True} for body in bodies)
    assert server.most_running == scenario.concurrency + (scenario.long_tokens > 0)
    assert server.num_held == 0
    assert result["output_tokens"] == scenario.num_conversations * scenario.output_tokens
    assert result["prompt_tokens"] == scenario.num_conversations * 100
    assert 0 < result["rss_bytes"] <= result["rss_peak_bytes"]
    assert result["processor_s_per_1000_tokens"] is not None


def test_processor_time_is_that_of_the_whole_tree() -> None:
    tree = ProcessTree(psutil.Process())
    tree.look_for_children()
    before, own = tree.processor_seconds(), time.process_time()
    while time.process_time() < own + 0.05:
        pass
    assert before + 0.05 <= tree.processor_seconds() + 0.02  # a clock of hundredths


@pytest.mark.parametrize("scenario", NATURAL, ids=lambda scenario: scenario.name)
def test_natural_conversations_differ_from_each_other_and_from_round_to_round(scenario: NaturalScenario) -> None:
    said = [(one.system, *one.turns) for seed in ("1", "2") for one in scenario.conversations(seed, scenario.num_conversations)]
    assert len(set(said)) == 2 * scenario.num_conversations
    assert scenario.conversations("1", 3) == scenario.conversations("1", 3)


@pytest.mark.parametrize("scenario", NATURAL, ids=lambda scenario: scenario.name)
def test_natural_answers_end_where_the_model_ends_them(scenario: NaturalScenario, tmp_path: Path) -> None:
    server = FakeServer()
    measured(server, tmp_path, "--quick", "--warmup", "0", "--scenario", scenario.name)
    bodies = server.bodies[1:]
    assert not any("ignore_eos" in body for body in bodies)
    assert {body["temperature"] for body in bodies} == {scenario.temperature}
    assert len({body.get("seed") for body in bodies}) == (len(bodies) if scenario.temperature else 1)


def test_each_turn_of_a_tool_loop_brings_all_that_was_said(tmp_path: Path) -> None:
    server = FakeServer()
    measured(server, tmp_path, "--quick", "--warmup", "0", "--scenario", "agent")
    histories = sorted((body["messages"] for body in server.bodies[1:]), key=lambda messages: (messages[1]["content"], len(messages)))
    assert [len(messages) for messages in histories] == 2 * [2, 4, 6, 8, 10, 12]
    for shorter, longer in pairwise(histories):
        if len(longer) > len(shorter):
            assert longer[: len(shorter)] == shorter
            assert longer[len(shorter)] == {"role": "assistant", "content": "time" * 4}


def test_documents_come_first_in_several_prompts() -> None:
    turns = [one.turns[0] for one in natural.questions_on_documents("seed", 24)]
    documents = Counter(turn.rpartition("\n\n")[0] for turn in turns)
    assert set(documents.values()) == {24 // natural.NUM_DOCUMENTS}
    assert all(len(document) > 5000 for document in documents)


def test_code_to_be_edited_is_code() -> None:
    for conversation in natural.code_edits("seed", 4):
        compile(conversation.turns[0].split("```")[1].removeprefix("python"), "file", "exec")


def test_the_long_request_has_the_stated_number_of_tokens(default_model_dir: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(default_model_dir)
    (scenario,) = [scenario for scenario in SCENARIOS if scenario.long_tokens]
    messages = [{"role": "user", "content": long_prompt(scenario.long_tokens, "seed")}]
    assert len(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]) == scenario.long_tokens


def test_a_long_answer_that_ends_before_the_others_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured(FakeServer(holds_longest=False), tmp_path, "--quick", "--scenario", "long-among-short", status=1)
    assert "the long answer ended" in capsys.readouterr().err


def test_another_checkout_runs_the_same_command_with_its_own_package(tmp_path: Path) -> None:
    checkout = tmp_path / "older"
    checkout.mkdir()
    (checkout / "server.py").write_text("import os, penstock\nprint(os.getcwd(), penstock.__file__)\n")
    (checkout / "__init__.py").touch()
    with launched("older", [os.path.relpath(sys.executable), "server.py"], checkout) as server:
        assert server.process.wait(60) == 0
        folder, package = server.tail().split()
    assert Path(folder) == checkout
    assert Path(package).name == "__init__.py"
    assert not Path(package).is_relative_to(Path.cwd())


def test_a_field_that_the_server_refuses_is_left_out_and_said(tmp_path: Path) -> None:
    server = FakeServer(refused="ignore_eos")
    assert measured(server, tmp_path, "--quick")["servers"]["fake"]["refused_fields"] == ["ignore_eos"]


def test_ignore_eos_can_be_switched_off(tmp_path: Path) -> None:
    server = FakeServer()
    measured(server, tmp_path, "--quick", "--no-ignore-eos")
    assert not any("ignore_eos" in body for body in server.bodies)


def test_chunks_are_counted_where_the_server_does_not_count(tmp_path: Path) -> None:
    whole = measured(FakeServer(has_usage=False), tmp_path, "--quick", "--scenario", "concurrency-1")
    result = whole["scenarios"]["concurrency-1"]["servers"]["fake"]["rounds"][0]
    assert not result["is_counted_by_server"]
    assert result["output_tokens"] == result["num_requests"] * 4
    assert result["prompt_tokens"] is None


def test_what_was_measured_before_an_error_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer(fails_after=5)  # one to agree, one to warm up, two measured: the next warm-up fails
    whole = measured(server, tmp_path, "--quick", status=1)
    assert "out of memory" in capsys.readouterr().err
    assert list(whole["scenarios"]) == [SCENARIOS[0].name]
    assert not whole["is_complete"]


def test_keys_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--quick", "--api-key", "fake=s3cret"]
    monkeypatch.setattr(sys, "argv", ["serve.py", *flags])
    assert measured(FakeServer(), tmp_path, *flags)["command_line"] == ["serve.py", "--quick", "--api-key", "fake=***"]


def test_fields_of_one_server_go_into_its_requests_only(tmp_path: Path) -> None:
    server = FakeServer()
    measured(server, tmp_path, "--quick", "--extra-body", 'fake={"top_k": 1}', "--model", "other=x", "--model", "fake=y")
    assert {(body["top_k"], body["model"]) for body in server.bodies} == {(1, "y")}


@pytest.mark.parametrize(
    "restart", [pytest.param([], id="standing", marks=pytest.mark.thorough), pytest.param(["--restart"], id="restarted")]
)
def test_servers_started_here_take_turns_and_are_gone_afterwards(
    restart: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = psutil.Process().children(recursive=True)
    written = tmp_path / "results.json"
    flags = ["--launch", f"one={COMMAND}", "--against", f"two={COMMAND}", "--rounds", "2", "--quick", "--json", str(written), *restart]
    assert serve.main(flags) == 0
    out, err = capsys.readouterr()
    assert re.findall(r"^round \d of 2: (\w+)$", err, re.MULTILINE) == ["one", "two"] * 2
    assert len(re.findall(r"^\S+ +one/two", out, re.MULTILINE)) == len([scenario for scenario in SCENARIOS if scenario.by_default])
    whole = json.loads(written.read_text())
    assert {"date", "command_line", "hardware", "versions", "seed"} <= whole.keys()
    assert all(len(server["startup_s"]) == (2 if restart else 1) for server in whole["servers"].values())
    assert all(result["ratios"].keys() == {"one/two"} for result in whole["scenarios"].values())
    assert set(psutil.Process().children(recursive=True)) <= set(before)


def test_a_server_that_ends_at_its_start_is_an_error_with_its_last_words(capsys: pytest.CaptureFixture[str]) -> None:
    command = shlex.join([sys.executable, "-c", "import sys; sys.exit('no such model')", "--port", "1"])
    assert serve.main(["--launch", f"broken={command}"]) == 1
    assert "no such model" in capsys.readouterr().err


REFUSING = """
from aiohttp import web
import sys
async def models(_):
    return web.json_response({"data": [{"id": "base"}]})
async def chat(_):
    return web.json_response({"error": "the model has no chat template"}, status=400)
app = web.Application()
app.add_routes([web.get("/v1/models", models), web.post("/v1/chat/completions", chat)])
web.run_app(app, host="127.0.0.1", port=int(sys.argv[2]), print=None)
"""


def test_a_server_that_refuses_a_plain_request_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "refusing.py"
    program.write_text(REFUSING)
    command = f"{shlex.join([sys.executable, str(program)])} --port {{port}}"
    assert serve.main(["--launch", f"refusing={command}"]) == 1
    assert "refusing refuses a plain request: HTTP 400" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "either --url or --launch"),
        (["--url", "http://a", "--launch", "a=b"], "either --url or --launch"),
        (["--url", "a=http://a", "--against", "a=http://b"], "the same name"),
        (["--url", "http://a", "--restart"], "--restart needs commands"),
        (["--url", "http://a", "--extra-body", "[1]"], "--extra-body"),
        (["--url", "http://a", "--against", "before=/"], "a checkout is started by"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve.main(flags)
    assert message in capsys.readouterr().err


def test_the_port_of_a_command_is_found() -> None:
    assert split_command("serve --port 8123 --x") == (["serve", "--port", "8123", "--x"], 8123)
    assert split_command("serve --port=8123")[1] == 8123
    arguments, port = split_command("serve -p {port}")
    assert arguments == ["serve", "-p", str(port)]
    with pytest.raises(TargetError, match="no port"):
        split_command("serve")


@given(st.sets(st.integers(1, 600), max_size=6))
def test_a_stream_reads_the_same_however_it_was_cut(cuts: set[int]) -> None:
    stream = sse(ROLE, TEXT, TEXT, TEXT, FINISH, usage(100, 3))
    ends = sorted({*(cut for cut in cuts if cut < len(stream)), len(stream)})
    pieces = [stream[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    answer = read_answer(Recording(10.0, [(11.0 + number, piece) for number, piece in enumerate(pieces)]))
    assert (answer.prompt_tokens, answer.output_tokens) == (100, 3)
    assert answer.started < answer.started + answer.time_to_first_token <= answer.ended
    assert answer.time_per_output_token == answer.generation / 2


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (sse(ROLE, TEXT), "broke off"),
        (sse(ROLE, FINISH), "empty"),
        (sse(ROLE, TEXT, {"error": {"message": "out of memory"}}), "out of memory"),
    ],
)
def test_a_stream_without_a_whole_answer_is_an_error(stream: bytes, message: str) -> None:
    with pytest.raises(BadAnswer, match=message):
        read_answer(Recording(0.0, [(1.0, stream)]))


def test_a_token_without_text_is_timed_by_what_ends_the_stream() -> None:
    stream = sse(ROLE, FINISH, usage(100, 1))
    answer = read_answer(Recording(0.0, [(1.0, stream[:60]), (2.0, stream[60:])]))
    assert (answer.time_to_first_token, answer.time_per_output_token) == (2.0, None)


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_run_from_the_least_to_the_greatest(values: list[float]) -> None:
    assert percentile(values, 0) == min(values)
    assert percentile(values, 100) == max(values)
    assert min(values) <= percentile(values, 99) <= max(values)


def test_a_ratio_above_one_is_better_for_every_metric() -> None:
    for metric in METRICS:
        better, worse = (2.0, 1.0) if metric.is_higher_better else (1.0, 2.0)
        assert ratio(better, worse, metric) == 2.0
        assert ratio(None, worse, metric) is None
