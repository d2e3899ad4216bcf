import asyncio
import dataclasses
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from penstock.engine.config import EngineConfig
from penstock.engine.errors import EngineUnavailable, GenerationFailed, InvalidRequest, QueueFull
from penstock.engine.pooling.encoder import EncoderBatch, EncoderInput, Forward
from penstock.engine.pooling.engine import (
    MAX_OPEN,
    CosineScoring,
    CrossScoring,
    EncodedText,
    PoolingEngine,
    PoolingOutput,
    PoolingQueue,
    check_counts,
    encode_text,
    paired,
    pool_all,
    scoring_of,
)
from penstock.engine.pooling.files import SentenceFiles
from penstock.engine.pooling.loader import build_pooling_engine, load_pooling_model
from penstock.engine.pooling.model import PoolingModel, PoolingParams
from penstock.engine.request import BACKGROUND
from penstock.engine.text.tokenizer import Tokenizer
from tests.fakes import byte_tokenizer
from tests.tiny_encoders import save_encoder, tiny_encoder

T = TypeVar("T")

TEXTS = ["Paris", "The cat sat on the mat.", "It rains in Paris, and the cat is not amused by that at all.", "The dog sat on the mat."]
POISON = 66
EMBED = PoolingParams(task="embed")


@dataclass(slots=True)
class Gate:
    """Stands before a model: computes nothing while it is shut, fails over batches with the poison in them, and writes down each batch."""

    forward: Forward
    is_open: threading.Event = field(default_factory=threading.Event)
    is_reached: threading.Event = field(default_factory=threading.Event)
    batches: list[list[int]] = field(default_factory=list)

    def __call__(self, batch: EncoderBatch) -> Tensor:
        self.batches.append(batch.input_ids_1T[0].tolist())
        self.is_reached.set()
        assert self.is_open.wait(60)
        if POISON in self.batches[-1]:
            raise StopIteration("poison")  # which asyncio's own futures cannot carry
        return self.forward(batch)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.is_reached.wait, 60)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> PoolingModel:
    return load_pooling_model(save_encoder(tiny_encoder("bert"), tmp_path_factory.mktemp("tiny")), EngineConfig(device="cpu"))


def serve(
    model: PoolingModel,
    use: Callable[[PoolingEngine, Gate], Awaitable[T]],
    *,
    budget: int = 64,
    max_waiting: int = 100,
    is_open: bool = True,
) -> T:
    """Runs `use` beside an engine over the model behind a gate."""
    gate = Gate(model.forward)
    if is_open:
        gate.is_open.set()

    async def run() -> T:
        behind = dataclasses.replace(model, forward=gate)
        engine = PoolingEngine(behind, byte_tokenizer(), PoolingQueue(budget, max_waiting), num_threads=1)
        await engine.start()
        try:
            return await use(engine, gate)
        finally:
            gate.is_open.set()
            await engine.stop(60)

    return asyncio.run(run())


def alone(model: PoolingModel, token_ids: list[int]) -> Tensor:
    return model.compute([model.check(EncoderInput(token_ids), EMBED)])[0]


def test_what_waits_is_computed_together_within_the_budget(tiny: PoolingModel) -> None:
    prompts = [[10 + number] * 10 for number in range(9)]

    async def use(engine: PoolingEngine, gate: Gate) -> list[Tensor]:
        first = asyncio.create_task(engine.pool([5], EMBED))
        await gate.reached()
        others = [asyncio.create_task(engine.pool(prompt, EMBED)) for prompt in prompts]
        await asyncio.sleep(0)
        assert engine.stats().num_running == 1
        assert engine.stats().num_waiting == 9
        gate.is_open.set()
        await first
        answers = [(await task).data for task in others]
        assert [len(batch) for batch in gate.batches] == [1, 60, 30]
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_inputs, stats.num_prompt_tokens, stats.num_steps) == (0, 0, 10, 91, 3)
        return answers

    for answer, prompt in zip(serve(tiny, use, is_open=False), prompts, strict=True):
        torch.testing.assert_close(answer, alone(tiny, prompt), atol=1e-5, rtol=0)


def test_lower_priorities_go_first_and_then_the_earlier(tiny: PoolingModel) -> None:
    async def use(engine: PoolingEngine, gate: Gate) -> list[list[int]]:
        tasks = [asyncio.create_task(engine.pool([5], EMBED))]
        await gate.reached()
        tasks += [asyncio.create_task(engine.pool([10 + n] * 4, EMBED, priority=p)) for n, p in enumerate((1, 0, 1, -1))]
        await asyncio.sleep(0)
        gate.is_open.set()
        await asyncio.gather(*tasks)
        return gate.batches[1:]

    assert serve(tiny, use, budget=4, is_open=False) == [[13] * 4, [11] * 4, [10] * 4, [12] * 4]


def test_texts_in_the_background_are_computed_while_no_others_wait(tiny: PoolingModel) -> None:
    async def use(engine: PoolingEngine, gate: Gate) -> list[list[int]]:
        tasks = [asyncio.create_task(engine.pool([5], EMBED, priority=BACKGROUND))]
        await gate.reached()
        tasks += [asyncio.create_task(engine.pool([10 + n], EMBED, priority=BACKGROUND)) for n in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await engine.pool([12], EMBED, priority=BACKGROUND)
        engine.check_admission()  # of the others
        tasks += [asyncio.create_task(engine.pool([20 + n], EMBED)) for n in range(2)]
        await asyncio.sleep(0)
        gate.is_open.set()
        await asyncio.gather(*tasks)
        return gate.batches[1:]

    assert serve(tiny, use, budget=8, max_waiting=2, is_open=False) == [[20, 21], [10, 11]]


def test_a_text_longer_than_the_budget_runs_alone(tiny: PoolingModel) -> None:
    async def use(engine: PoolingEngine, gate: Gate) -> list[int]:
        await asyncio.gather(*(engine.pool([9] * length, EMBED) for length in (3, 30, 3)))
        return [len(batch) for batch in gate.batches]

    assert serve(tiny, use, budget=8) == [3, 30, 3]


def test_a_call_that_is_cancelled_is_never_computed(tiny: PoolingModel) -> None:
    async def use(engine: PoolingEngine, gate: Gate) -> None:
        running = asyncio.create_task(engine.pool([5], EMBED))
        await gate.reached()
        waiting = asyncio.create_task(engine.pool([7], EMBED))
        other = asyncio.create_task(engine.pool([8], EMBED))
        await asyncio.sleep(0)
        for task in (running, waiting):
            task.cancel()
        gate.is_open.set()
        await other
        assert gate.batches == [[5], [8]]
        assert engine.stats().num_waiting == 0
        assert engine.is_healthy

    serve(tiny, use, is_open=False)


def test_one_bad_text_harms_no_other(tiny: PoolingModel, caplog: pytest.LogCaptureFixture) -> None:
    prompts = [[10], [POISON], [11, 12], [13]]

    async def use(engine: PoolingEngine, _: Gate) -> list[object]:
        answers = await asyncio.gather(*(engine.pool(prompt, EMBED) for prompt in prompts), return_exceptions=True)
        assert engine.is_healthy
        return list(answers)

    good, bad, *others = serve(tiny, use)
    assert isinstance(bad, GenerationFailed)
    assert not any(isinstance(answer, BaseException) for answer in (good, *others))
    assert "StopIteration" in caplog.text


def test_an_engine_that_fails_again_and_again_is_not_healthy(tiny: PoolingModel) -> None:
    async def use(engine: PoolingEngine, _: Gate) -> list[bool]:
        health = []
        for prompts in ([[POISON]] * 4, [[POISON]], [[POISON]], [[POISON], [5]]):
            await asyncio.gather(*(engine.pool(prompt, EMBED) for prompt in prompts), return_exceptions=True)
            health.append(engine.is_healthy)
        return health

    assert serve(tiny, use) == [True, True, False, True]


def test_the_queue_is_bounded_and_cancelled_texts_do_not_count(tiny: PoolingModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.pooling.engine.CLEAR_SECONDS", 0.0)

    async def use(engine: PoolingEngine, gate: Gate) -> None:
        tasks = [asyncio.create_task(engine.pool([5], EMBED))]
        await gate.reached()
        tasks += [asyncio.create_task(engine.pool([6], EMBED)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await engine.pool([7], EMBED)
        tasks.pop().cancel()
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(engine.pool([8], EMBED)))
        await asyncio.sleep(0)
        gate.is_open.set()
        await asyncio.gather(*tasks)

    serve(tiny, use, max_waiting=3, is_open=False)


def test_what_cannot_be_computed_is_refused_at_once(tiny: PoolingModel) -> None:
    async def use(engine: PoolingEngine, gate: Gate) -> None:
        with pytest.raises(InvalidRequest, match="is empty"):
            await engine.pool([], EMBED)
        assert gate.batches == []

    serve(tiny, use)


def test_stopping_lets_texts_finish_within_the_time_and_refuses_the_others(tiny: PoolingModel) -> None:
    async def use(engine: PoolingEngine, gate: Gate) -> None:
        running = asyncio.create_task(engine.pool([5], EMBED))
        await gate.reached()
        waiting = asyncio.create_task(engine.pool([6], EMBED))
        await asyncio.sleep(0)
        threading.Timer(0.05, gate.is_open.set).start()
        await engine.stop(60)
        assert len((await running).data) == len((await waiting).data) == 32
        assert not engine.is_accepting
        assert not engine.is_healthy
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await engine.pool([7], EMBED)

    serve(tiny, use, is_open=False)


def test_stopping_at_once_leaves_no_caller_waiting(tiny: PoolingModel) -> None:
    async def use(engine: PoolingEngine, gate: Gate) -> None:
        tasks = [asyncio.create_task(engine.pool([5], EMBED))]
        await gate.reached()
        tasks.append(asyncio.create_task(engine.pool([6], EMBED)))
        await asyncio.sleep(0)
        threading.Timer(0.05, gate.is_open.set).start()
        await engine.stop(0)
        assert all(isinstance(answer, EngineUnavailable) for answer in await asyncio.gather(*tasks, return_exceptions=True))

    serve(tiny, use, is_open=False)


def test_an_engine_that_was_not_started_says_so(tiny: PoolingModel) -> None:
    async def run() -> None:
        engine = PoolingEngine(tiny, byte_tokenizer(), PoolingQueue(8, 8), num_threads=1)
        with pytest.raises(EngineUnavailable, match="not running"):
            await engine.pool([5], EMBED)
        await engine.stop()

    asyncio.run(run())


def test_the_packaged_model_embeds_as_in_transformers(minilm_dir: Path) -> None:
    reference: PreTrainedModel = AutoModel.from_pretrained(minilm_dir).eval()

    async def run() -> list[tuple[list[int], Tensor]]:
        engine = build_pooling_engine(minilm_dir, Tokenizer.load(minilm_dir), EngineConfig(device="cpu"))
        await engine.start()
        try:
            prompts = [engine.encode(text).tokens.token_ids for text in TEXTS]
            return [(o.prompt_token_ids, o.data) for o in await asyncio.gather(*(engine.pool(prompt, EMBED) for prompt in prompts))]
        finally:
            await engine.stop(10)

    for token_ids, embedding in asyncio.run(run()):
        with torch.no_grad():
            mean: Tensor = reference(input_ids=torch.tensor([token_ids])).last_hidden_state[0].mean(0)
        torch.testing.assert_close(embedding, mean / mean.norm(), atol=1e-5, rtol=0)


@dataclass
class Places:
    """An engine with so many places, that answers an input with its own token ids after a moment. `num_taken` are another client's."""

    num_places: int = 10**6
    num_taken: int = 0
    failing: int | None = None
    num_open: int = 0
    most_open: int = 0
    num_cancelled: int = 0
    params: list[PoolingParams] = field(default_factory=list)

    async def pool(self, prompt_token_ids: list[int], params: PoolingParams, **options: Any) -> PoolingOutput:
        if self.num_open + self.num_taken >= self.num_places:
            raise QueueFull("full")
        self.params.append(params)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            for _ in range(1 + prompt_token_ids[0] % 3):
                await asyncio.sleep(0)
            if prompt_token_ids[0] == self.failing:
                raise GenerationFailed("failed")
            if self.failing is not None:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_open -= 1
        return PoolingOutput(torch.tensor(prompt_token_ids), prompt_token_ids)


def inputs(count: int) -> list[EncodedText]:
    return [EncodedText(EncoderInput([number])) for number in range(count)]


def pooled(engine: Places, texts: list[EncodedText], params: Any = None) -> list[int]:
    outputs = asyncio.run(pool_all(cast(PoolingEngine, engine), texts, params or PoolingParams()))
    return [output.prompt_token_ids[0] for output in outputs]


@pytest.mark.parametrize("count", [0, 1, 7, 3 * MAX_OPEN])
def test_outputs_are_in_the_order_of_the_inputs(count: int) -> None:
    engine = Places()
    assert pooled(engine, inputs(count)) == list(range(count))
    assert engine.most_open == min(count, MAX_OPEN)


@pytest.mark.parametrize("num_places", [1, 2, 5])
def test_a_batch_goes_through_as_few_places_as_there_are(num_places: int) -> None:
    engine = Places(num_places)
    assert pooled(engine, inputs(50)) == list(range(50))
    assert engine.most_open == num_places


def test_a_queue_that_is_full_of_others_is_refused() -> None:
    with pytest.raises(QueueFull):
        pooled(Places(num_places=4, num_taken=4), inputs(3))


def test_the_first_failure_ends_the_others() -> None:
    engine = Places(failing=5)
    with pytest.raises(GenerationFailed):
        pooled(engine, inputs(20))
    assert engine.num_cancelled == 19
    assert engine.num_open == 0


def test_cancelling_ends_all_of_them() -> None:
    engine = Places(failing=-1)

    async def run() -> None:
        task = asyncio.create_task(pool_all(cast(PoolingEngine, engine), inputs(9), PoolingParams()))
        while engine.num_open < 9:  # noqa: ASYNC110 - the engine knows no events
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert engine.num_cancelled == 9


def test_each_input_has_its_own_parameters_and_instruction() -> None:
    engine = Places()
    texts = [EncodedText(EncoderInput([0]), num_instruction_tokens=3), EncodedText(EncoderInput([1]))]
    pooled(engine, texts, [PoolingParams(dimensions=1), PoolingParams(dimensions=2)])
    assert engine.params == [PoolingParams(dimensions=1, num_instruction_tokens=3), PoolingParams(dimensions=2)]


def test_texts_are_paired_one_with_all_or_each_with_its_own() -> None:
    assert paired("a", "xyz") == [("a", "x"), ("a", "y"), ("a", "z")]
    assert paired("abc", "xyz") == [("a", "x"), ("b", "y"), ("c", "z")]


@pytest.mark.parametrize(("first", "second", "param"), [(0, 1, "one"), (1, 0, "two"), (2, 1, "one"), (2, 3, "one")])
def test_counts_that_make_no_pairs_are_refused(first: int, second: int, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_counts(first, second, "one", "two")
    assert caught.value.param == param


@pytest.mark.parametrize(("first", "second"), [(1, 1), (1, 5), (5, 5)])
def test_counts_that_make_pairs_are_fine(first: int, second: int) -> None:
    check_counts(first, second, "one", "two")


def test_a_model_that_scores_pairs_is_asked_for_them() -> None:
    assert isinstance(scoring_of({"score", "classify"}), CrossScoring)
    assert isinstance(scoring_of({"embed", "token_embed"}), CosineScoring)


@pytest.mark.parametrize("num_first", [1, 3])
def test_cosines_are_those_of_torch(num_first: int) -> None:
    vectors = torch.nn.functional.normalize(torch.randn(num_first + 3, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
    outputs = [PoolingOutput(vector, [place]) for place, vector in enumerate(vectors)]
    scores = CosineScoring().scores(outputs, num_first)
    expected = torch.cosine_similarity(vectors[:num_first], vectors[num_first:])
    torch.testing.assert_close(torch.tensor([score.value for score in scores]), expected)
    assert [score.prompt_token_ids for score in scores] == [[index % num_first, num_first + index] for index in range(3)]


LONG = "the cat sat on the mat and it was very, very pleased with itself"
SHORT = "Paris is a city"
PROMPTS = SentenceFiles(prompts={"query": "query: ", "document": ""}, default_prompt_name="query", include_prompt=False)


@pytest.fixture(scope="module")
def tokenizer(minilm_dir: Path) -> Tokenizer:
    return Tokenizer.load(minilm_dir)


@pytest.mark.parametrize("pair", [(LONG, SHORT), (SHORT, LONG), (LONG, LONG), (SHORT, "x"), (LONG, None)])
def test_texts_and_pairs_are_encoded_and_cut_as_in_transformers(
    pair: tuple[str, str | None], tokenizer: Tokenizer, minilm_dir: Path
) -> None:
    reference = AutoTokenizer.from_pretrained(minilm_dir)
    for max_tokens in (None, 5, 6, 7, 8, 9, 11, 15, 16, 19, 30):
        expected = reference(*pair, truncation=max_tokens is not None and "longest_first", max_length=max_tokens)
        found = encode_text(tokenizer, SentenceFiles(), *pair, max_tokens=max_tokens).tokens
        assert found.token_ids == expected["input_ids"]
        assert found.token_type_ids == (None if pair[1] is None else expected["token_type_ids"])


def test_a_limit_that_holds_special_tokens_only_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="2 tokens hold nothing of the text"):
        encode_text(tokenizer, SentenceFiles(), LONG, max_tokens=2)


def test_a_text_is_put_behind_the_instruction_that_is_named_or_the_default_one(tokenizer: Tokenizer) -> None:
    plain = encode_text(tokenizer, SentenceFiles(), f"query: {SHORT}")
    for name in (None, "query"):
        encoded = encode_text(tokenizer, PROMPTS, SHORT, prompt_name=name)
        assert encoded.tokens == plain.tokens
        assert encoded.num_instruction_tokens == 3  # [CLS] query :
    assert encode_text(tokenizer, PROMPTS, SHORT, prompt_name="document") == encode_text(tokenizer, SentenceFiles(), SHORT)


def test_an_unknown_instruction_is_refused_with_those_that_there_are(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="no prompt named 'title'; it has document, query"):
        encode_text(tokenizer, PROMPTS, SHORT, prompt_name="title")


def test_pairs_have_no_instruction(tokenizer: Tokenizer) -> None:
    assert encode_text(tokenizer, PROMPTS, SHORT, LONG) == encode_text(tokenizer, SentenceFiles(), SHORT, LONG)


def test_text_is_put_in_lower_case_where_the_files_say_so(default_model_dir: Path) -> None:
    tokenizer = Tokenizer.load(default_model_dir)  # which tells the cases apart
    lower = encode_text(tokenizer, SentenceFiles(do_lower_case=True), SHORT.upper())
    assert lower == encode_text(tokenizer, SentenceFiles(), SHORT.lower())


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        encode_text(tokenizer, SentenceFiles(), "\ud800")
