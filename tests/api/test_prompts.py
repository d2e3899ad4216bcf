import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.api.errors import ContextLengthExceeded
from penstock.api.prompts import check_prompt_ids, check_text_length, encode_text, longest_token
from penstock.engine.errors import InvalidRequest
from tests.api.scripted import ADDED, MAX_MODEL_LEN, RecordingCompiler, ScriptedEngine, byte_tokenizer, scripted_context


def test_a_text_that_can_never_fit_is_refused_without_being_tokenized() -> None:
    async def run() -> None:
        with ThreadPoolExecutor(1) as workers:
            context = scripted_context(ScriptedEngine(byte_tokenizer()), RecordingCompiler(), workers)
            longest = longest_token(context.tokenizer)
            assert longest == max(map(len, ADDED))
            await check_text_length(context, "x" * MAX_MODEL_LEN * longest, "prompt")
            with pytest.raises(ContextLengthExceeded, match=f"length is {MAX_MODEL_LEN} tokens.*at least 8333 tokens") as caught:
                await check_text_length(context, "x" * 100_000, "prompt[3]")
            assert caught.value.param == "prompt[3]"

    asyncio.run(run())


@pytest.mark.parametrize("length", [10, 100_000])
def test_short_and_long_texts_become_the_same_ids(length: int) -> None:
    async def run() -> None:
        with ThreadPoolExecutor(1) as workers:
            context = scripted_context(ScriptedEngine(byte_tokenizer()), RecordingCompiler(), workers)
            text = "é\n" * (length // 2)
            expected = context.tokenizer.encode(text, add_special_tokens=True)
            assert await encode_text(context, text, add_special_tokens=True) == expected

    asyncio.run(run())


@pytest.mark.parametrize("token_ids", [[], [-1], [0, 10], [2**70]])
def test_ids_outside_the_vocabulary_and_no_ids_are_refused(token_ids: list[int]) -> None:
    check_prompt_ids([0, 9], 10, "prompt")
    with pytest.raises(InvalidRequest):
        check_prompt_ids(token_ids, 10, "prompt")
