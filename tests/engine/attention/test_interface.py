import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface

from penstock.engine.attention import interface
from penstock.engine.attention.cpu import paged_attention_cpu
from penstock.engine.attention.interface import AttentionMetadata, AttentionOptions, paged_attention
from penstock.engine.kv_cache.tensors import KVCache, LayerKV
from tests.fakes import block_tables

KEY_SIZE, VALUE_SIZE, NUM_HEADS, NUM_KV_HEADS = 8, 6, 4, 2


class Layer(nn.Module):
    """As much of an attention layer as the attention function sees, with a cache of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_idx = 0
        self.cache = KVCache([LayerKV(NUM_KV_HEADS, KEY_SIZE, VALUE_SIZE)], 8, 4, torch.float32, torch.device("cpu"))
        self.cache.attach(self)

    def forward(self, states: tuple[Tensor, Tensor, Tensor], metadata: AttentionMetadata, **options: object) -> Tensor:
        out, weights = paged_attention(self, *states, None, attention_metadata=metadata, **options)  # type: ignore[arg-type]
        assert weights is None
        return out


def states(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    sizes = ((NUM_HEADS, KEY_SIZE), (NUM_KV_HEADS, KEY_SIZE), (NUM_KV_HEADS, VALUE_SIZE))
    query, key, value = (torch.randn(1, heads, num_tokens, size, generator=generator) for heads, size in sizes)
    return query, key, value


def prompt(num_tokens: int) -> AttentionMetadata:
    """A prompt of its own, in the blocks from 1 on."""
    blocks = list(range(1, 1 + -(-num_tokens // 4)))
    return AttentionMetadata.pack(
        list(range(4, 4 + num_tokens)),
        [0, num_tokens],
        [num_tokens],
        [0],
        block_tables([blocks]),
        num_decodes=int(num_tokens == 1),
    )


@pytest.mark.parametrize("options", [{}, {"scaling": 0.7, "sliding_window": 3, "softcap": 2.0, "s_aux": torch.linspace(-1, 2, NUM_HEADS)}])
def test_what_the_model_passes_reaches_the_kernel(options: dict[str, object]) -> None:
    layer, metadata, (query, key, value) = Layer(), prompt(9), states(9)
    out = layer((query, key, value), metadata, **options)
    assert out.shape == (1, 9, NUM_HEADS, VALUE_SIZE)
    torch.testing.assert_close(layer.cache.keys[0].flatten(0, 1)[4:13], key[0].transpose(0, 1))
    chosen = AttentionOptions(KEY_SIZE**-0.5) if not options else AttentionOptions(0.7, 3, 2.0, torch.linspace(-1, 2, NUM_HEADS))
    expected = paged_attention_cpu(query[0].transpose(0, 1), layer.cache.keys[0], layer.cache.values[0], metadata, chosen)
    torch.testing.assert_close(out[0], expected)


def test_steps_that_take_turns_each_get_their_own_metadata() -> None:
    layer = Layer()
    batches = [(states(length), prompt(length)) for length in (5, 9)]
    alone = [Layer()(*batch) for batch in batches]
    for _ in range(2):
        for batch, expected in zip(batches, alone, strict=True):
            torch.testing.assert_close(layer(*batch), expected)


@pytest.fixture
def _frequent_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_frequent_switches")
def test_engines_in_two_threads_each_get_their_own_metadata() -> None:
    def attend(length: int) -> list[Tensor]:
        layer, batch = Layer(), (states(length), prompt(length))
        return [layer(*batch) for _ in range(200)]

    with ThreadPoolExecutor(2) as pool:
        for length, outputs in zip((5, 9), pool.map(attend, (5, 9)), strict=True):
            assert all(torch.equal(out, outputs[0]) and out.shape[1] == length for out in outputs)


def test_the_compiler_is_told_the_right_shape() -> None:
    layer = Layer()  # its cache is memory, as it is when the compiler traces a model
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        query, key, value = (mode.from_tensor(tensor) for tensor in states(9))
        assert layer((query, key, value), prompt(9)).shape == (1, 9, NUM_HEADS, VALUE_SIZE)


def test_the_model_must_be_called_by_the_engine() -> None:
    with pytest.raises(AssertionError, match="without attention_metadata"):
        paged_attention(Layer(), *states(2), None)


def test_transformers_finds_it_by_name() -> None:
    interface.register()
    known: Any = AttentionInterface
    assert known()[interface.IMPLEMENTATION] is paged_attention
