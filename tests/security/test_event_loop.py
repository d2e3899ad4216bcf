"""What takes long to compute for one request is computed in other threads than the event loop's, and is bounded."""

import threading
from typing import Any

import pytest

from penstock.engine.sampling.rows import TokenCounts, TokenRules
from penstock.engine.text.tokenizer import Tokenizer
from penstock.serving import context, preparing
from tests.api.running_server import CHAT, Running, serve
from tests.api.scripted import MODEL
from tests.fakes import make_core, make_request

LONG_TEXT = "0123456789" * 30
CHAT_LOGPROBS = CHAT | {"messages": [{"role": "user", "content": LONG_TEXT}], "prompt_logprobs": 3}
COMPLETION = {"model": MODEL, "prompt": LONG_TEXT, "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT_LOGPROBS),
        ("/v1/completions", COMPLETION | {"prompt_logprobs": 3}),
        ("/v1/completions", COMPLETION | {"echo": True, "logprobs": 3}),
        ("/v1/completions", COMPLETION | {"echo": True, "logprobs": 3, "n": 2}),
        ("/v1/completions", COMPLETION | {"echo": True, "logprobs": 3, "stream": True}),
    ],
)
def test_log_probabilities_of_a_prompt_are_written_by_a_worker(path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    num_named = {True: 0, False: 0}  # tokens, on the event loop's thread or on another

    def token_text(self: Tokenizer, token_id: int) -> str:
        num_named[threading.current_thread() is threading.main_thread()] += 1
        return "t"

    async def scenario(server: Running) -> None:
        async with server.http.post(path, json=body) as response:
            assert response.status == 200
            await response.read()

    monkeypatch.setattr(context, "SMALL", 64)
    monkeypatch.setattr(Tokenizer, "token_text", token_text)
    serve(scenario)
    assert num_named[False] >= len(LONG_TEXT)
    assert num_named[True] < 64


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 3}, {"echo": True, "logprobs": 3}])
@pytest.mark.parametrize(("prompts", "n", "status"), [(["abcde"] * 2, 2, 200), (["abcde"] * 3, 2, 400), (["abcde"] * 2, 3, 400)])
def test_log_probabilities_of_prompts_are_bounded(
    fields: dict[str, Any], prompts: list[str], n: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(server: Running) -> None:
        got, answer = await server.post("/v1/completions", {"model": MODEL, "prompt": prompts, "n": n, "max_tokens": 1} | fields)
        assert got == status
        if status == 400:
            assert "log probabilities of prompts" in answer["error"]["message"]
            assert answer["error"]["param"] == ("prompt_logprobs" if "prompt_logprobs" in fields else "logprobs")

    monkeypatch.setattr(preparing, "MAX_PROMPT_LOGPROBS", 5 * 2 * 2 * 4)
    serve(scenario)


@pytest.mark.parametrize(
    ("path", "body", "logprobs"),
    [("/v1/chat/completions", CHAT, {"logprobs": True, "top_logprobs": 3}), ("/v1/completions", COMPLETION, {"logprobs": 3})],
)
@pytest.mark.parametrize(("changed", "status"), [({}, 200), ({"n": 3}, 400), ({"max_tokens": 3}, 400), ({"n": 3, "stream": True}, 200)])
def test_log_probabilities_that_a_whole_answer_holds_are_bounded(
    path: str, body: dict[str, Any], logprobs: dict[str, Any], changed: dict[str, Any], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(server: Running) -> None:
        for wanted, expected in ((logprobs, status), ({}, 200)):
            async with server.http.post(path, json=body | {"max_tokens": 2, "n": 2} | changed | wanted) as response:
                answer = await response.text()
            assert response.status == expected
            assert expected == 200 or ("max_tokens" in answer and "log probabilities" in answer)

    monkeypatch.setattr(preparing, "MAX_LOGPROBS_HELD", 2 * 2 * 4)
    serve(scenario)


RULES: list[dict[str, Any]] = [{"logit_bias": {"5": 1}}, {"allowed_token_ids": [5, 6]}, {"bad_words": ["ab"]}, {"repetition_penalty": 1.5}]


@pytest.mark.parametrize("rules", RULES[:3])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION | {"prompt": ["a", "b"], "n": 2})]
)
def test_rules_on_tokens_are_prepared_once_by_a_worker(
    path: str, body: dict[str, Any], rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def of(*arguments: Any) -> TokenRules:
        threads.append(threading.current_thread())
        return make_rules(*arguments)

    async def scenario(server: Running) -> None:
        assert (await server.post(path, body | rules))[0] == 200
        assert len(threads) == 1
        assert threads[0] is not threading.main_thread()
        core = make_core(tokenizer=server.context.tokenizer, stop_token_ids=frozenset(), num_blocks=128, max_model_len=400)
        for request in server.engine.requests:
            core.add(request)
        assert len(threads) == 1

    make_rules = TokenRules.of
    monkeypatch.setattr(context, "SMALL", 1)
    monkeypatch.setattr(TokenRules, "of", of)
    serve(scenario)


@pytest.mark.parametrize("rules", RULES)
def test_sequences_of_a_request_share_what_is_prepared_for_one(rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    num_made = 0

    def counted(self: TokenCounts, *arguments: Any) -> None:
        nonlocal num_made
        num_made += 1
        make_counts(self, *arguments)

    make_counts = TokenCounts.__init__
    monkeypatch.setattr(TokenCounts, "__init__", counted)
    core = make_core()
    params: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in rules.items()}
    if "logit_bias" in rules:
        params["logit_bias"] = {5: 1.0}  # as it is decoded
    core.add(make_request(n=4, max_tokens=1, **params))
    [first] = core.scheduler.waiting.first(1)
    forks = first.forks
    assert len(forks) == 3
    for fork in forks:
        assert fork.sampling.allowed_ids is first.sampling.allowed_ids
        assert fork.sampling.biases is first.sampling.biases
        assert fork.sampling.counts is None or fork.sampling.counts is not first.sampling.counts
    assert num_made == ("repetition_penalty" in rules)
