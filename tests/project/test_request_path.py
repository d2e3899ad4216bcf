"""How much of the code a request runs through: the fewer files, the fewer a reader has to open to follow it."""

import json
import threading
import urllib.request
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

from tests.api.threaded_server import ThreadedServer
from tests.llm.model_directory import write_model

ROOT = Path(__file__).parents[2]
FLAGS = [
    "--served-model-name",
    "m",
    "--plugin",
    "deepseek_r1",
    "--plugin",
    "hermes",
    "--chat-template",
    "think",
    "--compile",
    "off",
    "--kv-cache-memory",
    "64MiB",
]
MAX_FILES, MAX_FILES_OF_A_NEW_SCHEMA = 60, 69


class Files:
    """The files of the project whose functions are called in threads that start while `profile` is set."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self.seen.add(frame.f_code.co_filename)

    def of_the_product(self) -> list[str]:
        paths = [Path(file).relative_to(ROOT) for file in self.seen if Path(file).is_relative_to(ROOT)]
        return sorted(str(path) for path in paths if path.parts[0] not in ("tests", ".venv"))


def ask(url: str, city: list[str]) -> None:
    """Reasoning, a strict tool and a schema in one chat request."""
    schema = {"type": "object", "properties": {"city": {"enum": city}}, "required": ["city"]}
    body: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "Where?"}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": schema, "strict": True}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}},
        "thinking_token_budget": 8,
        "max_tokens": 100,
        "temperature": 0,
    }
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        assert json.load(response)["choices"][0]["message"]["reasoning_content"]


def test_a_chat_request_runs_through_few_files(tmp_path: Path) -> None:
    files = Files()
    threading.setprofile(files.profile)
    try:
        with closing(ThreadedServer(["--model", str(write_model(tmp_path, max_position_embeddings=4096)), *FLAGS])) as server:
            ask(server.url, ["Paris", "Rome"])
            files.seen.clear()
            ask(server.url, ["Paris", "Rome"])
            known = files.of_the_product()
            files.seen.clear()
            ask(server.url, ["Oslo", "Lima"])
            new = files.of_the_product()
    finally:
        threading.setprofile(None)
    assert {"api/answers.py", "serving/preparing.py", "engine/core.py", "plugins/reasoning/think_format.py"} <= set(known)
    assert len(known) <= MAX_FILES, "\n".join(known)
    assert len(new) <= MAX_FILES_OF_A_NEW_SCHEMA, "\n".join(new)
