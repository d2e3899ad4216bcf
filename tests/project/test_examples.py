"""The clients of `examples/` and of the README against a running server, and a server that runs the plug-in of `examples/`."""

import ast
import importlib.util
import json
import random
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from aiohttp import web

from penstock.api.app import build_app, build_runner
from penstock.assembly import assemble_pooling
from penstock.cli.flags import parse_arguments
from penstock.llm.model import LoopThread
from penstock.serving.models.startup import ModelFiles
from tests.api.threaded_server import ThreadedServer
from tests.llm.model_directory import write_model

ROOT = Path(__file__).parents[2]
ADAPTER = ROOT / "examples" / "penstock-adapter-thinking" / "penstock_adapter_thinking"
README_URL = "http://127.0.0.1:8000/v1"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
CLIENTS = [block for block in BLOCKS if README_URL in block]


@pytest.fixture(scope="module")
def url(default_model_dir: Path) -> Iterator[str]:
    """Of a server that runs as in the README, with its smaller model under the name of the other one, too."""
    names = ["--served-model-name", "SmolLM2-135M-Instruct", "--served-model-name", "qwen-coder"]
    options = ["--adapter", f"thinking={ADAPTER}", "--api-key", "none", "--compile", "off", "--kv-cache-memory", "256MiB"]
    with closing(ThreadedServer(["--plugin", "deepseek_r1", "--tool-parser", "hermes", *names, *options])) as served:
        yield served.url


@pytest.fixture(scope="module")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that says nothing in particular, but at once. What it is told of tools takes a token for each byte."""
    return str(write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=1024))


def shown_by(name: str, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What `main` of an example prints, run in this process."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(list(flags))
    return capsys.readouterr().out


def test_prompts_are_continued_without_a_server(tiny_model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by("offline", capsys, "--model", tiny_model_dir)
    assert len(re.findall(r"^    16 tokens, log probability -\d+\.\d\d, ended by length$", shown, re.MULTILINE)) == 3
    assert re.search(r"^'Once upon a time' \.\.\. .+ \| .+$", shown, re.MULTILINE)
    assert re.search(r"^'The year is' \.\.\. ' [0-9]{2,4}'$", shown, re.MULTILINE)
    assert re.search(r"Answer:' \.\.\. ' (yes|no)'$", shown, re.MULTILINE)


def test_the_likeliest_answers_are_searched_for(tiny_model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by("beam_search", capsys, "--model", tiny_model_dir, "--width", "3")
    totals = [float(total) for total in re.findall(r"^ +(-\d+\.\d\d) ['\"].*, ended by \w+$", shown, re.MULTILINE)]
    assert len(totals) == 6
    assert shown.count("one token after the other") == 2


def test_conversations_are_answered_without_a_server(tiny_model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by("offline_chat", capsys, "--model", tiny_model_dir, "--max-tokens", "30")
    assert len(re.findall(r"^  content:   ['\"]", shown, re.MULTILINE)) == 2
    assert re.search(r"^call: get_weather\(\{", shown, re.MULTILINE)


def test_answers_are_streamed_side_by_side(tiny_model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by("async_llm", capsys, "--model", tiny_model_dir)
    assert {line.split(" + ")[0] for line in shown.splitlines() if " + " in line} == {"'The sun is'", "'The moon is'"}
    assert "the first words: " in shown


def test_the_executor_serves_requests_of_several_kinds(tiny_model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by("executor", capsys, "--model", tiny_model_dir)
    assert len(re.findall(r"^.* \.\.\. ['\"].*$", shown, re.MULTILINE)) == 3
    assert len(re.findall(r"^sequence [012]: ", shown, re.MULTILINE)) == 3
    assert len(re.findall(r"^beam: ", shown, re.MULTILINE)) == 2
    assert re.search(r"^held to a pattern: ' [A-Z][a-z]{2,9}'$", shown, re.MULTILINE)
    assert re.search(r"^in 50 ms: \d+ tokens\n\d+ steps, at most \d sequences in one$", shown, re.MULTILINE)


def test_the_executors_logits_processors_are_chosen_by_name_and_client(tiny_model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = dict(line.split(": ", 1) for line in shown_by("executor_logits_processor", capsys, "--model", tiny_model_dir).splitlines())
    assert shown["for editors"] == shown["without"]
    assert not set(" Paris") & set(ast.literal_eval(shown["with house rules"]))
    assert shown["unknown"].startswith("no logits processor 'not_registered'")
    assert shown["rows in one call"] == "2"


def test_what_the_model_computes_is_shown(tiny_model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by("model_outputs", capsys, "--model", tiny_model_dir)
    assert len(re.findall(r"^['\"].*['\"]: probability 0\.\d{3}, entropy \d+\.\d bits$", shown, re.MULTILINE)) == 6
    assert len(re.findall(r"^'.*' \(\d+ tokens\): .*\+1\.00", shown, re.MULTILINE)) == 3


def test_chat_shows_reasoning_and_then_content(url: str) -> None:
    flags = ["--base-url", url, "--thinking-token-budget", "8", "--max-tokens", "40"]
    command = [sys.executable, "examples/chat.py", *flags, "Tell me about Venus."]  # as a user runs them all
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"\n\[reasoning\]\n.*\S.*\n\[content\]\n.*\S.*\n", shown, re.DOTALL)


def test_reasoning_a_call_its_result_and_the_answer_are_shown_in_turn(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--base-url", url, "--force", "--thinking-token-budget", "8", "--max-tokens", "80"]
    shown = shown_by("reasoning_with_tools", capsys, *flags)
    turns = re.fullmatch(
        r"\n\[reasoning\]\n.*\S.*\n\n\[call\]\nget_weather\((.*)\)\n\[result\]\nIt is 18 degrees and cloudy in .*\.\n"
        r"\n\[reasoning\]\n.*\S.*\n\[content\]\n.*\S.*\n",
        shown,
        re.DOTALL,
    )
    assert turns is not None, shown
    assert set(json.loads(turns[1])) == {"city"}


class AlwaysCalls:
    """In OpenAI's client's place: answers with a call wherever tools may be called, and then with `content`."""

    def __init__(self, content: str) -> None:
        self._content = content
        self.models = self.chat = self.completions = self
        self.choices: list[Any] = []

    def __call__(self, **options: Any) -> "AlwaysCalls":
        return self

    def __enter__(self) -> "AlwaysCalls":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def list(self) -> Any:
        return SimpleNamespace(data=[SimpleNamespace(id="m")])

    def create(self, *, tool_choice: Any, **fields: Any) -> Any:
        self.choices.append(tool_choice)
        function = SimpleNamespace(name="get_weather", arguments='{"city": "Oslo"}')
        calls = None if tool_choice == "none" else [SimpleNamespace(index=0, id="c", function=function)]
        delta = SimpleNamespace(model_extra={}, content=None if calls else self._content, tool_calls=calls)
        return [SimpleNamespace(choices=[SimpleNamespace(delta=delta)])]


@pytest.mark.parametrize(("content", "last"), [("Cloudy.", "[content]\nCloudy."), ("", "more --max-tokens may help.")])
def test_a_model_that_calls_again_and_again_has_to_answer_in_the_end(
    content: str, last: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = AlwaysCalls(content)
    monkeypatch.setattr("openai.OpenAI", client)
    shown = shown_by("reasoning_with_tools", capsys)
    assert client.choices == ["auto", "auto", "auto", "none"]
    assert "[no more tools]" in shown
    assert shown.rstrip().endswith(last)


def test_structured_gives_an_instance_of_its_model(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by("structured", capsys, "--base-url", url)
    assert re.search(
        r"^reasoning: .*^content: .*^parsed:    name='.*' country='.*' continent='.*' is_capital=\w+$", shown, re.MULTILINE | re.DOTALL
    )


@pytest.fixture(scope="module")
def pooling_url() -> Iterator[str]:
    """Of a server over `--model minilm`, in a thread of this process."""
    arguments = parse_arguments(["--model", "minilm", "--threads", "1"])
    context = assemble_pooling(arguments, ModelFiles.of(arguments)).context
    runner = build_runner(build_app(context))

    async def start() -> str:
        await context.engine.start()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        return f"http://{host}:{port}/v1"

    async def stop() -> None:
        await context.engine.stop()
        await runner.cleanup()

    loop = LoopThread()
    yield loop.run(start())
    loop.run(stop())
    loop.close()
    context.workers.shutdown()


def test_passages_are_found_by_their_embeddings(pooling_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    nearest, *others, last = shown_by("embeddings", capsys, "--base-url", pooling_url, "Where is Paris?").splitlines()
    assert nearest.endswith("The capital of France lies on the river Seine.")
    assert len(others) == 4
    assert re.fullmatch(r"384 dimensions, \d+ tokens", last)


def test_documents_are_ordered_by_their_answer_to_a_query(pooling_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by("rerank", capsys, "--base-url", pooling_url, "--top-n", "2").splitlines()
    assert len(shown) == 2
    assert {line[8:] for line in shown} == {"Yeast turns the sugar in dough into gas.", "Bread is sold by weight in this market."}


def test_texts_are_compared_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by("embed_offline", capsys)
    assert len(re.findall(r"^'.*': 384 numbers from \d+ tokens$", shown, re.MULTILINE)) == 3
    near, far = (float(score) for score in re.findall(r"^ *(-?\d\.\d+)  '", shown, re.MULTILINE))
    assert near > 0.5 > far


def test_the_readme_has_two_clients() -> None:
    assert len(CLIENTS) == 2


def shown_by_readme(client: str, url: str, capsys: pytest.CaptureFixture[str]) -> str:
    exec(compile(client.replace(README_URL, url), "README.md", "exec"), {"__name__": "__main__"})
    return capsys.readouterr().out


def test_the_readmes_stream_is_reasoning_in_brackets_and_then_content(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    reasoning, bracket, content = shown_by_readme(CLIENTS[0], url, capsys).rpartition("]")
    assert reasoning.startswith("[")
    assert bracket
    assert re.fullmatch(r"The answer is \d+\.", content.strip())


def test_the_readmes_constraint_holds(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(ast.literal_eval(shown_by_readme(CLIENTS[1], url, capsys))) == ["city", "continent", "is_capital"]


def test_reasoning_and_content_are_told_apart_over_the_official_client(url: str) -> None:
    with openai.OpenAI(base_url=url, api_key="none") as client:
        messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
        options: Any = {"messages": messages, "max_tokens": 40, "temperature": 0, "extra_body": {"thinking_token_budget": 12}}
        options["model"] = "SmolLM2-135M-Instruct"
        whole = client.chat.completions.create(**options).choices[0].message
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**options, stream=True)]
    assert whole.content
    assert whole.model_extra is not None
    assert whole.model_extra["reasoning_content"]
    assert "".join(delta.content or "" for delta in deltas) == whole.content
    streamed = "".join((delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas)
    assert streamed == whole.model_extra["reasoning_content"]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{url}/models")


def test_the_thinking_adapter_reasons_step_by_step_and_then_answers(url: str) -> None:
    question: Any = {"role": "user", "content": "One box holds 98 pens. How many pens are in 7 boxes?"}
    with openai.OpenAI(base_url=url, api_key="none") as client:
        message = client.chat.completions.create(model="thinking", messages=[question], temperature=0).choices[0].message
    assert (message.model_extra or {})["reasoning_content"].startswith("98*7: 90*7=")
    assert re.fullmatch(r"\s*The answer is \d+\.", message.content or "")


def test_the_adapters_package_is_small_and_says_where_it_is() -> None:
    module = [sys.executable, "-m", "penstock_adapter_thinking"]
    shown = subprocess.run(module, cwd=ADAPTER.parent, capture_output=True, text=True, check=True).stdout
    assert Path(shown.strip()) == ADAPTER
    assert sum(file.stat().st_size for file in ADAPTER.parent.rglob("*") if file.is_file() and file.suffix != ".pyc") < 4_000_000
    assert json.loads((ADAPTER / "adapter_config.json").read_text())["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_no_task_that_the_adapter_is_measured_by_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ADAPTER.parent)
    tasks: Any = importlib.import_module("penstock_adapter_thinking.tasks")
    chance = random.Random(0)
    for kind in tasks.KINDS:
        trained, held_out = [tasks.training_task(chance, kind) for _ in range(300)], tasks.held_out_tasks(kind, 40)
        assert len({task.problem for task in held_out}) == len(held_out) > 15
        assert not {task.problem for task in trained} & {task.problem for task in held_out}
        assert all(task.tools or task.is_right(task.answer) for task in (*trained, *held_out))


def test_a_server_reads_and_constrains_answers_by_installed_plugins(
    default_model_dir: Path, example_plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(example_plugins / "site")
    template = (ROOT / "serving" / "templates" / "think.jinja").read_text(encoding="utf-8")
    opened = tmp_path / "thought.jinja"
    opened.write_text(template.replace("think>", "thought>"), encoding="utf-8")
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    flags = ["--plugin", "thought_tags", "--chat-template", str(opened), "--compile", "off", "--kv-cache-memory", "256MiB"]
    with closing(ThreadedServer(flags)) as served, openai.OpenAI(base_url=served.url, api_key="none") as client:
        model = client.models.list().data[0].id
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=30,
            temperature=0,
            extra_body={"thinking_token_budget": 4},
        )
        constraint = {"guided_regex": "(Par|Lond)[a-z]{2}", "guided_decoding_backend": "xgrammar"}
        constrained = client.chat.completions.create(
            model=model, messages=messages, max_tokens=30, extra_body={"thinking_token_budget": 4, **constraint}
        )
    assert re.fullmatch(constraint["guided_regex"], constrained.choices[0].message.content or "")
    message = answer.choices[0].message
    assert message.content
    assert message.to_dict()["reasoning_content"]
    # The model may write the marker once more, which is content then; the one that the server wrote is not.
    assert not message.content.lstrip().startswith("</thought>")
