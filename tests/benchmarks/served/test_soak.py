import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks import soak
from benchmarks.attacker import CHAT, COMPLETIONS
from benchmarks.soak import Sample, Soaked, slope
from benchmarks.soak_probes import EMBEDDINGS, NUM_TOKENS, TOKENIZE, Probe, Probes, SaidToken, SaidTokens, read_answer
from benchmarks.soak_traffic import GENERATION, POOLING, Client, Kind
from tests.api.scripted_model.served import served_script, write_script


def sample(seconds: float, memory: int, **more: Any) -> Sample:
    others: dict[str, Any] = dict.fromkeys(("num_requests_left", "num_descriptors", "num_threads", "num_tasks", "num_preemptions"), 0)
    return Sample(**{"num_requests": 0, "grammar_cache": 0, "seconds": seconds, "memory": memory, "kv_cache_usage": 0.0} | others | more)


def soaked(*samples: Sample) -> Soaked:
    return Soaked("model", cast(Any, None), [], Probes([]), list(samples))


def test_the_slope_is_that_of_the_second_half() -> None:
    filling = [sample(0, 0), sample(100, 9_000), sample(200, 10_000), sample(300, 10_500), sample(400, 11_000)]
    assert slope(filling) == pytest.approx(5)
    assert slope(filling[:1]) == 0


@pytest.mark.parametrize(
    ("last", "fault"),
    [
        ({}, None),
        ({"memory": 1_020_000}, None),
        ({"memory": 1_200_000, "grammar_cache": 190_000}, None),
        ({"memory": 1_200_000}, "memory grows by 0.2 MB in the second half"),
        ({"num_tasks": 4}, None),
        ({"num_tasks": 5}, "tasks: 5 more than after the first half"),
        ({"num_descriptors": 9}, "descriptors: 9 more than after the first half"),
        ({"num_threads": 6}, "threads: 6 more than after the first half"),
        ({"kv_cache_usage": 0.5, "num_requests_left": 1}, "1 requests and 50.00% of the KV cache are held"),
    ],
)
def test_what_stays_behind_is_a_fault(last: dict[str, Any], fault: str | None) -> None:
    samples = [sample(0, 10), sample(100, 1_000_000), sample(200, **{"memory": 1_000_000} | last)]
    assert soaked(*samples).faults() == ([] if fault is None else [fault])


def test_a_status_that_a_kind_may_not_get_is_counted_and_one_that_asks_to_wait_is_not() -> None:
    statuses = iter(["200", "429", "500"])

    async def send(client: Client) -> str:
        if (status := next(statuses, None)) is None:
            raise TimeoutError
        return status

    each = soaked()
    for _ in range(4):
        asyncio.run(each.send(Kind("chat", 1, send), cast(Any, None)))
    assert each.unexpected == {"chat: 500": 1, "chat: TimeoutError": 1}
    assert each.sent == {"chat": 4}
    assert each.faults() == ["chat: 500, 1 times", "chat: TimeoutError, 1 times"]


def entry(token_id: int, logprob: float, best: float | None = None) -> dict[str, Any]:
    """Of a token's log probability in an answer. Without a `best` one it was not sampled."""
    return {"token": f"token_id:{token_id}", "logprob": logprob, "top_logprobs": [] if best is None else [{"logprob": best}]}


def chat_answer(*token_ids: int, logprob: float = -0.5) -> dict[str, Any]:
    """One that reasons with its first four tokens, of which the last was not sampled; its content does not begin with the likeliest."""
    entries = [entry(token_id, logprob, logprob) for token_id in token_ids]
    entries[3], entries[4] = entry(token_ids[3], 0.0), entry(token_ids[4], logprob - 0.5, logprob)
    return {"choices": [{"logprobs": {"reasoning_content": entries[:4], "content": entries[4:]}}]}


USUAL, OTHER = tuple(range(1, NUM_TOKENS + 1)), (21, *range(2, NUM_TOKENS), 22)
QUESTION = json.dumps({"model": "m", "messages": [{"role": "user", "content": "?"}]}).encode()


def test_an_answer_is_all_of_its_tokens_the_reasoning_first() -> None:
    answer = read_answer(json.dumps(chat_answer(*USUAL)).encode())
    assert isinstance(answer, SaidTokens)
    assert answer.ids == USUAL
    assert answer.num_reasoning == 4
    assert answer.tokens[3] == SaidToken(4, None, None)
    assert answer.tokens[4] == SaidToken(5, -1.0, 0.5)
    assert read_answer({"data": [{"embedding": [0.6, 0.8]}]}) == (0.6, 0.8)


@pytest.mark.parametrize(
    ("said", "logprob", "scored", "faults", "num_scored"),
    [
        (USUAL, -0.5, {}, 0, 0),
        (USUAL, -1.2, {}, 0, 0),
        (USUAL, -1.7, {}, 1, 0),
        (USUAL[:-1], -0.5, {}, 1, 0),
        (OTHER, -0.5, {}, 0, 1),
        (OTHER, -1.7, {}, 1, 0),
        (OTHER, -0.5, {11: (-2.0, -2.0)}, 1, 0),  # as likely as any, and yet not as likely as it was said to be
        (OTHER, -0.5, {0: (-0.5, -0.1)}, 0, 1),
        (OTHER, -3.0, {0: (-3.0, -0.1)}, 1, 0),  # an idle server says something else
        (OTHER, -0.5, {4: (-1.5, -0.1)}, 0, 1),  # where a stop token is not allowed
    ],
)
def test_tokens_that_an_idle_server_scores_otherwise_are_a_mismatch(
    said: tuple[int, ...], logprob: float, scored: dict[int, tuple[float, float]], faults: int, num_scored: int
) -> None:
    """`scored` has places at which the server scores a token otherwise than as -0.5, which is the best: that score and the best one."""
    asked: list[Any] = []

    async def request(method: str, path: str, body: bytes) -> tuple[str, bytes]:
        fields = json.loads(body)
        if path == TOKENIZE:
            return "200", json.dumps({"tokens": [7, 8]}).encode()
        if path == CHAT:
            return "200", json.dumps(chat_answer(*USUAL)).encode()
        assert path == COMPLETIONS
        asked.append(fields["prompt"])
        scores = [scored.get(place, (-0.5, -0.5)) for place in range(NUM_TOKENS)]
        entries = [{str(i): {"logprob": own}, "0": {"logprob": best}} for i, (own, best) in zip(fields["prompt"][2:], scores, strict=True)]
        return "200", json.dumps({"choices": [{"prompt_logprobs": [None, {}, *entries]}]}).encode()

    async def compared() -> None:
        await probes.ask(request)
        for _ in range(2):
            probes.compare("probe", probes.all[0], chat_answer(*said, logprob=logprob))
            await probes.score(request)

    probes = Probes([Probe(CHAT, QUESTION)])
    asyncio.run(compared())
    assert len(probes.mismatches) == 2 * faults
    assert (probes.num_compared, probes.num_scored) == (2, num_scored)
    assert asked[:1] == ([[7, 8, *OTHER]] if said == OTHER else [])
    assert all(mismatch.startswith("probe: m, [{'role': 'user', 'content': '?'}]: ") for mismatch in probes.mismatches)


def test_vectors_differ_by_more_than_rounding() -> None:
    probe = Probe(EMBEDDINGS, json.dumps({"model": "m", "input": "?"}).encode(), [(0.6, 0.8)])
    assert probe.mismatch("probe", (0.6000001, 0.7999999)) is None
    assert probe.mismatch("probe", (0.8, 0.6)) == "probe: m, ?: another vector"


def test_names_of_kinds_are_unique_and_need_what_a_server_may_lack() -> None:
    for kinds in (GENERATION, POOLING):
        assert len({kind.name for kind in kinds}) == len(kinds)
        assert kinds[0].name == "probe"
    assert {kind.needs for kind in GENERATION if kind.needs} == {"/v1/files", "/v1/responses", "/v1/messages", "thinking"}


@pytest.mark.thorough  # seconds of traffic
def test_a_server_is_soaked_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scripted model says the same whatever runs beside it; another memory than the tests' own process is not looked at."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(soak, "SETTLE_SECONDS", 0.1)
    lines: list[dict[str, Any]] = [{"model": {"name": "scripted", "context_length": 8192}}, {"content": '{"p1": 5} and more words ' * 20}]
    with served_script(write_script(tmp_path / "answers.jsonl", lines), "--files-dir", str(tmp_path / "files")) as served:
        url = served.url.removesuffix("/v1")
        flags = ["--url", url, "--minutes", "0.1", "--rounds", "2", "--concurrency", "4", "--json", str(tmp_path / "soak.json")]
        assert soak.main(flags) == 0
    (server,) = json.loads((tmp_path / "soak.json").read_text())["servers"]
    assert (server["unexpected"], server["mismatches"], server["faults"]) == ({}, [], [])
    assert len(server["samples"]) == 3
    assert server["sent"]["probe"] > 5
