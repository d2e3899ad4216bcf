"""Programs that people use, over a scripted model: `scripts/test -m clients`, which fetches them once. They reach no other machine.

The Vercel AI SDK, Codex, Claude Code, and the suites of llm-comply, which validate every answer against the published schemas.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.scripted_model.served import ServedScript, served_script, write_script
from tests.clients.programs import HERE, llm_comply, node_modules, run

pytestmark = pytest.mark.clients

# Some tests of llm-comply run only for models with such names.
COMPLY_MODEL = "gpt-5-claude-sonnet-4"
PLACE = {"city": "Oslo", "country": "Norway"}


def two_steps(tool: str, parameter: str, **others: str) -> list[dict[str, Any]]:
    """An agent that has this tool writes a file, then reads it."""
    return [
        {
            "when": {"prompt": {"contains": f'"{tool}"'}, "turn": turn},
            "reasoning": "A file.",
            "content": f"Step {turn + 1}. ",
            "tool_calls": [{"name": tool, "arguments": {parameter: line, **others}}],
        }
        for turn, line in enumerate(("echo written by the agent > note.txt", "cat note.txt"))
    ]


LINES: list[dict[str, Any]] = [
    {"model": {"name": "demo", "image_tokens": 16}},
    *two_steps("exec_command", "cmd"),
    *two_steps("Bash", "command", description="Run it"),
    {"when": {"tool_result": True}, "content": "It is done."},
    {
        "when": {"user": {"contains": "What is the weather?"}},
        "content": "Looking. ",
        "tool_calls": [{"name": "weather", "arguments": {"city": "Zürich"}}],
    },
    {
        "when": {"user": {"contains": "JSON"}, "prompt": {"contains": '"name": "json"'}},
        "tool_calls": [{"name": "json", "arguments": PLACE}],
    },
    {"when": {"user": {"contains": "JSON"}}, "content": json.dumps(PLACE)},
    {"when": {"user": {"matches": "hello|15 . 37|[Tt]hink"}}, "reasoning": "A greeting.", "content": "Hello there!"},
    {
        "when": {"prompt": {"contains": '"get_weather"'}},
        "tool_calls": [{"name": "get_weather", "arguments": {"location": "San Francisco, CA"}}],
    },
    {"content": "A plain answer."},
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedScript]:
    path = write_script(tmp_path_factory.mktemp("script") / "answers.jsonl", LINES)
    names = ("--served-model-name", "demo", "--served-model-name", COMPLY_MODEL)
    # An answer that was given before is drafted, and may come in one piece.
    with served_script(path, *names, "--max-num-batched-tokens", "4096", "--speculation", "none") as served:
        yield served


@pytest.mark.parametrize("endpoint", ["chat", "responses", "open-responses", "messages"])
def test_the_ai_sdk_gets_texts_objects_and_two_steps_with_a_tool(served: ServedScript, tmp_path: Path, endpoint: str) -> None:
    (tmp_path / "node_modules").symlink_to(node_modules())
    script = tmp_path / "ai_sdk.mjs"
    script.write_bytes((HERE / "ai_sdk.mjs").read_bytes())  # packages are looked for beside it
    given = json.loads(run(["node", script, served.url, endpoint], environment={}))
    for way in ("text", "textStream"):
        assert (given[way]["text"], given[way]["finishReason"], given[way]["numSteps"]) == ("Hello there!", "stop", 1)
        assert given[way]["outputTokens"] == len("<Hello there!A greeting.>") + 1  # each marker is one token
    assert given["textStream"]["numPieces"] > 1
    if endpoint in ("open-responses", "messages"):  # what the SDK reads of the others is without reasoning
        assert given["text"]["reasoning"] == given["textStream"]["reasoning"] == "A greeting."
    assert given["object"] == PLACE
    for way in ("agent", "agentStream"):
        assert given[way]["calls"] == [["weather", {"city": "Zürich"}]]
        assert given[way]["results"] == ["18 degrees in Zürich"]
        assert (given[way]["text"], given[way]["numSteps"]) == ("It is done.", 2)
    assert [given[way]["warnings"] for way in ("text", "textStream", "agent", "agentStream")] == [[]] * 4


def test_codex_runs_two_tools_and_reads_its_prefix_from_the_cache(served: ServedScript, tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (home / "config.toml").write_text(
        "check_for_update_on_startup = false\nmodel_provider = 'local'\n[analytics]\nenabled = false\n"
        f"[model_providers.local]\nname = 'local'\nbase_url = '{served.url}'\nwire_api = 'responses'\nenv_key = 'LOCAL_KEY'\n"
        "request_max_retries = 0\nstream_max_retries = 0\n"
    )
    options = ["--model", "demo", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    environment = {"HOME": str(home), "CODEX_HOME": str(home), "LOCAL_KEY": "none"}
    said = run([node_modules() / ".bin/codex", "exec", *options, "Write a note."], environment=environment, cwd=work)
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    commands = [item for item in items if item["type"] == "command_execution"]
    assert [(item["exit_code"], item["aggregated_output"]) for item in commands] == [(0, ""), (0, "written by the agent\n")]
    assert [item["text"] for item in items if item["type"] == "agent_message"] == ["Step 1. ", "Step 2. ", "It is done."]
    assert [item["text"] for item in items if item["type"] == "reasoning"] == ["A file.", "A file."]
    [usage] = [event["usage"] for event in events if event["type"] == "turn.completed"]
    assert usage["cached_input_tokens"] > 0.6 * usage["input_tokens"]  # of three turns the first finds nothing


def test_claude_code_runs_two_tools_and_reads_its_prefix_from_the_cache(served: ServedScript, tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    environment = {
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": served.url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": "demo",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "demo",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_TELEMETRY": "1",
    }
    options = ["--output-format", "json", "--allowedTools", "Bash"]
    result = json.loads(run([node_modules() / ".bin/claude", "-p", "Write a note.", *options], environment=environment, cwd=work))
    assert (result["is_error"], result["result"], result["num_turns"]) == (False, "It is done.", 3)
    assert (work / "note.txt").read_text() == "written by the agent\n"
    usage = result["usage"]
    read, created = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
    assert read > 1.9 * created  # of three turns the first finds nothing, and the others nearly everything


@pytest.mark.parametrize(
    ("api", "options"),
    [
        ("open-responses", []),
        ("openai-chat", []),
        ("anthropic", ["--auth-header", "x-api-key", "--no-bearer", "-H", "anthropic-version:2023-06-01"]),
    ],
)
def test_answers_are_valid_by_the_published_schemas(served: ServedScript, api: str, options: list[str]) -> None:
    program = "from llm_comply.cli import main; main()"  # which fails where a test does
    arguments = ["--format", api, "-u", served.url, "-k", "none", "-m", COMPLY_MODEL, "--json", *options]
    environment = {"PYTHONPATH": str(llm_comply())}
    report = json.loads(run(["python", "-c", program, *arguments], environment=environment))
    results = report["results"]
    assert len(results) >= 9
    assert {result["id"]: result["errors"] for result in results if result["status"] != "passed"} == {}
