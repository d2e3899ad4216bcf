import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from penstock.engine.config import EngineConfig
from penstock.engine.model_kind import model_kind
from penstock.engine.model_store import resolve_model
from penstock.engine.pooling_build import build_pooling_engine
from penstock.engine.pooling_engine import PoolingEngine
from penstock.engine.pooling_params import PoolingParams
from penstock.engine.tokenizer import Tokenizer

T = TypeVar("T")

TEXTS = ["Paris", "The cat sat on the mat.", "It rains in Paris, and the cat is not amused by that at all.", "The dog sat on the mat."]


@pytest.fixture(scope="module")
def minilm() -> Path:
    return resolve_model("minilm")


@pytest.fixture(scope="module")
def reference(minilm: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModel.from_pretrained(minilm).eval()
    return model


def serve(directory: Path, use: Callable[[PoolingEngine], Awaitable[T]], config: EngineConfig | None = None) -> T:
    async def run() -> T:
        engine = build_pooling_engine(directory, Tokenizer.load(directory), config or EngineConfig())
        await engine.start()
        try:
            return await use(engine)
        finally:
            await engine.stop(10)

    return asyncio.run(run())


def own_embedding(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """Mean and length 1, as the model's sentence-transformers files say."""
    with torch.no_grad():
        vector: Tensor = model(input_ids=torch.tensor([token_ids])).last_hidden_state[0].mean(0)
    return vector / vector.norm()


def test_embeddings_are_those_of_transformers(minilm: Path, reference: PreTrainedModel) -> None:
    async def embed(engine: PoolingEngine) -> list[tuple[list[int], Tensor]]:
        prompts = [engine.tokenizer.encode(text, add_special_tokens=True) for text in TEXTS]
        outputs = await asyncio.gather(*(engine.pool(prompt, PoolingParams()) for prompt in prompts))
        return [(output.prompt_token_ids, output.data) for output in outputs]

    assert model_kind(minilm) == "pooling"
    for token_ids, embedding in serve(minilm, embed):
        torch.testing.assert_close(embedding, own_embedding(reference, token_ids), atol=1e-5, rtol=0)
