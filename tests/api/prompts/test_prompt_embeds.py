"""`prompt_embeds` of /v1/completions."""

import base64
import io
import json
import pickle
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import save as save_safetensors
from torch import Tensor

from penstock.engine.scripted.file import MARKER_IDS, VOCAB_SIZE
from penstock.engine.scripted.model import token_bits
from tests.api.scripted_model.served import ServedScript, served_script, write_script

LINES: list[dict[str, Any]] = [
    {"model": {"name": "demo"}},
    {"when": {"user": {"equals": "one"}}, "content": "First."},
    {"when": {"user": {"equals": "two"}}, "content": "Second."},
    {"content": "Neither."},
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedScript]:
    folder = tmp_path_factory.mktemp("script")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE", str(folder / "cache"))
        with served_script(write_script(folder / "answers.jsonl", LINES), "--enable-prompt-embeds", "--max-model-len", "2000") as served:
            yield served


def vectors(text: str) -> Tensor:
    """What the scripted model would have for the tokens of a prompt."""
    return token_bits(VOCAB_SIZE)[[*text.encode(), MARKER_IDS["<|im_start|>"]]]


def saved(tensor: Any) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def post(served: ServedScript, **body: Any) -> tuple[int, Any]:
    content = json.dumps({"model": "demo", "max_tokens": 20, **body}).encode()
    request = urllib.request.Request(f"{served.url}/completions", content, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


def test_prompts_of_vectors_are_answered_in_their_order(served: ServedScript) -> None:
    first, second = encoded(save_safetensors({"prompt": vectors("one")})), encoded(saved(vectors("two").bfloat16()))
    _, whole = post(served, prompt_embeds=[first, second])
    assert [choice["text"] for choice in whole["choices"]] == ["First.", "Second."]
    assert whole["usage"]["prompt_tokens"] == 8
    assert post(served, prompt_embeds=first)[1]["choices"][0]["text"] == "First."


def deflated(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    return file.getvalue()


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("run",))


class Made:
    """A tensor that torch.load makes, of whatever memory held before, or bytes of any number."""

    def __init__(self, kind: Any, *arguments: int) -> None:
        self.made = kind, arguments

    def __reduce__(self) -> Any:
        return self.made


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "must be the base64 of a tensor"),
        (b"PK\x03\x04", "must be the base64 of a tensor"),
        (saved(Evil()), "must be the base64 of a tensor"),
        (pickle.dumps(Evil()), "must be the base64 of a tensor"),
        (saved(torch.zeros(1, 16).expand(10_000_000, 16)), "the tensor is larger than the file"),
        (deflated(saved(torch.zeros(1000, 16))), "its parts are compressed"),
        (saved(Made(torch.Tensor, 3, 16)), "it holds torch Tensor, which is no part of a tensor"),
        (saved(Made(bytearray, 100)), "it holds __builtin__ bytearray, which is no part of a tensor"),
        (saved([0] * 5000), "it holds more than a tensor"),
        (saved([vectors("one")]), "must hold one tensor"),
        (saved(vectors("one").to_sparse()), "must be a dense tensor"),
        (save_safetensors({"a": vectors("one"), "b": vectors("two")}), "must hold one tensor"),
        (save_safetensors({"a": torch.zeros(3, 15)}), "must have the shape [tokens, 16]"),
        (save_safetensors({"a": torch.zeros(2001, 16)}), "maximum context length"),
        (save_safetensors({"a": torch.full((3, 16), torch.inf)}), "holds what is not a finite number"),
    ],
)
def test_what_is_no_tensor_of_the_models_size_is_refused(served: ServedScript, data: bytes, message: str) -> None:
    status, error = post(served, prompt_embeds=encoded(data))
    assert status == 400
    assert message in error["message"]
    assert error["param"] == "prompt_embeds"


def test_a_completion_has_one_kind_of_prompt(served: ServedScript) -> None:
    given = encoded(saved(vectors("one")))
    for body in ({}, {"prompt": "one", "prompt_embeds": given}):
        status, error = post(served, **body)
        assert status == 400
        assert "either `prompt` or `prompt_embeds`" in error["message"]
    for field in ({"echo": True}, {"prompt_logprobs": 1}):
        assert post(served, prompt_embeds=given, **field)[0] == 400
