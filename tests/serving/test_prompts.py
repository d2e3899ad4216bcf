import asyncio
import functools
import threading

import pytest

from penstock.engine.errors import ContextLengthExceeded, InvalidRequest
from penstock.engine.text.tokenizer import Tokenizer
from penstock.serving.context import HUGE, LONG, SMALL, JobQueue, Workers, queue_for, rendering_queue
from penstock.serving.prompts import check_prompt_ids, check_text_length
from tests.api.scripted import MAX_MODEL_LEN, RecordingCompiler, ScriptedEngine, byte_tokenizer, scripted_context


def test_a_text_that_can_never_fit_is_refused_after_tokenizing_little_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    with Workers() as workers:
        context = scripted_context(ScriptedEngine(byte_tokenizer()), RecordingCompiler(), workers)
        check_text_length(context, "x" * 5_000, "prompt")
        with pytest.raises(ContextLengthExceeded, match=f"length is {MAX_MODEL_LEN} tokens.*of your prompt's 10000000 char") as caught:
            check_text_length(context, "x" * 10_000_000, "prompt[3]")
        assert caught.value.param == "prompt[3]"
    assert max(lengths) < 32 * MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("size", "queue"),
    [
        (0, None),
        (SMALL - 1, None),
        (SMALL, JobQueue.SHORT),
        (LONG - 1, JobQueue.SHORT),
        (LONG, JobQueue.LONG),
        (HUGE - 1, JobQueue.LONG),
        (HUGE, JobQueue.HUGE),
    ],
)
def test_the_size_of_a_request_decides_where_it_is_prepared(size: int, queue: JobQueue | None) -> None:
    assert queue_for(size) is queue
    assert rendering_queue(size, None) is (queue or JobQueue.SHORT)
    assert rendering_queue(size, "{{ messages }}") is (JobQueue.HUGE if queue is JobQueue.HUGE else JobQueue.SANDBOXED)


def test_huge_texts_are_tokenized_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[int] = []
    running, lock, entered = set[int](), threading.Lock(), threading.Event()
    encode = Tokenizer.encode

    def watched(self: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        with lock:
            running.add(threading.get_ident())
            at_once.append(len(running))
        entered.wait(0.01)
        ids = encode(self, text[:10], add_special_tokens=add_special_tokens)
        with lock:
            running.discard(threading.get_ident())
        return ids

    async def run() -> None:
        with Workers() as workers:
            tokenizer = byte_tokenizer()
            call = functools.partial(tokenizer.encode, "x" * HUGE, add_special_tokens=True)
            await asyncio.gather(*(workers.run(queue_for(HUGE), call) for _ in range(4)))

    monkeypatch.setattr(Tokenizer, "encode", watched)
    asyncio.run(run())
    assert at_once == [1] * 4


@pytest.mark.parametrize("token_ids", [[], [-1], [0, 10], [2**70]])
def test_ids_outside_the_vocabulary_and_no_ids_are_refused(token_ids: list[int]) -> None:
    check_prompt_ids([0, 9], 10, "prompt")
    with pytest.raises(InvalidRequest):
        check_prompt_ids(token_ids, 10, "prompt")
