"""Models with latent attention keep one vector for each token, and say what they say with keys and values of every head."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.attention.cpu import paged_attention_cpu, write_kv
from penstock.engine.attention.interface import AttentionMetadata, AttentionOptions, LatentProjection, keep_latents, latent_projection
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.tensors import KVCache, LayerKV, block_bytes, check_int8_cache, kv_layout
from penstock.engine.model.adapted import adapter_places
from penstock.engine.model.loader import load_model
from penstock.engine.weights.linear import quantize_linears
from tests.engines import core_over, loaded_model, run
from tests.fakes import VOCAB_SIZE
from tests.tiny_models import tiny_config, tiny_model

FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "minicpm3")
LATENT = LayerKV(num_kv_heads=1, key_size=40, value_size=32, is_latent=True)
PROMPTS = [list(range(3, 40)), [*range(3, 30), 7, 9], [5]]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_says_what_transformers_says(name: str) -> None:
    expected = []
    plain = tiny_model(name)
    for prompt in PROMPTS:
        token_ids = torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(6):
                token_ids = torch.cat([token_ids, plain(token_ids).logits[:, -1:, :VOCAB_SIZE].argmax(-1)], dim=1)
        expected.append(token_ids[0, len(prompt) :].tolist())
    loaded = loaded_model(tiny_model(name))
    assert loaded.kv_layout == [LATENT] * 3
    core = core_over(loaded, block_size=8, max_num_batched_tokens=16)
    for _ in range(2):  # in chunks, then from the prefix cache
        assert [result.token_ids for result in run(core, PROMPTS, max_tokens=6)] == expected
    core.runner.shutdown()


def test_a_token_takes_the_memory_of_its_latents_alone() -> None:
    layout = kv_layout(tiny_config("deepseek_v3"))
    assert layout == [LATENT] * 3
    assert block_bytes(layout, 16, torch.bfloat16) == 3 * 16 * 40 * 2
    cache = KVCache(layout, 5, 16, torch.bfloat16, torch.device("cpu"))
    assert cache.num_bytes == 5 * block_bytes(layout, 16, torch.bfloat16)
    assert cache.payload_bytes(0) == block_bytes(layout, 16, torch.bfloat16)


def test_blocks_are_copied_and_read_whole() -> None:
    cache = KVCache([LATENT], 3, 4, torch.float32, torch.device("cpu"))
    cache.keys[0][0] = torch.rand(4, 1, 40)
    cache.copy_blocks([(0, 2)])
    assert torch.equal(cache.keys[0][2], cache.keys[0][0])
    assert torch.equal(cache.values[0][2], cache.keys[0][0, ..., :32])
    cache.write_blocks(0, [1], cache.read_blocks(0, [2]))
    assert torch.equal(cache.keys[0][1], cache.keys[0][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_take_latents_of_the_size_of_deepseeks(dtype: torch.dtype) -> None:
    """Decodes over several blocks, and the last three tokens of a prompt, as attention over vectors that are keys and values at once."""
    generator = torch.Generator().manual_seed(0)
    rows_SD = torch.randn(70, 1, 576, generator=generator).to(dtype)
    cache = torch.empty(6, 16, 1, 576, dtype=dtype)
    tables_PN = torch.tensor([[4, 1, 3, 0, 5]], dtype=torch.int32)
    slots = [int(tables_PN[0, place // 16]) * 16 + place % 16 for place in range(70)]
    write_kv(cache, rows_SD, torch.tensor(slots))
    query_THD = (torch.randn(4, 20, 576, generator=generator) / 5).to(dtype)
    options = AttentionOptions(scaling=0.1)
    metadata = AttentionMetadata.pack(slots[:4], [0, 1, 4], [50, 70], [0, 0], tables_PN, num_decodes=1)
    got_THV = paged_attention_cpu(query_THD, cache, cache[..., :512], metadata, options)
    for row, num_keys in enumerate((50, 68, 69, 70)):
        keys_SD = rows_SD[:num_keys, 0].float()
        weights_HS = ((query_THD[row].float() * options.scaling) @ keys_SD.T).softmax(-1)
        torch.testing.assert_close(
            got_THV[row].float(), weights_HS @ keys_SD[:, :512], rtol=0, atol=1e-5 if dtype == torch.float32 else 0.03
        )


def test_quantized_projections_are_absorbed_as_what_their_codes_stand_for() -> None:
    models = [tiny_model("deepseek_v3").requires_grad_(False) for _ in range(2)]
    for model in models:
        quantize_linears(model.get_submodule("model.layers.0.self_attn"), 4)
    quantized: Any = models[1].get_submodule("model.layers.0.self_attn.kv_b_proj")
    (part,) = quantized.packed
    assert keep_latents(models[1]) == 3
    projection = latent_projection(models[1].get_submodule("model.layers.0.self_attn"))
    assert projection is not None
    weight_HOL = part.unpacked().dequantized().unflatten(0, (4, -1))
    assert torch.equal(projection.key_HKL, weight_HOL[:, :16])
    assert torch.equal(projection.value_HLV, weight_HOL[:, 16:].transpose(1, 2))


def test_what_does_not_go_with_latents_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"--kv-cache-dtype int8: .* latents"):
        check_int8_cache([LATENT], 16, 4)
    loaded = loaded_model(tiny_model("deepseek_v3"))
    places, unsuitable = adapter_places(loaded.model, 3)
    assert "latent" in unsuitable["model.layers.1.self_attn.kv_b_proj"]
    assert {"model.layers.1.self_attn.q_a_proj", "model.layers.1.self_attn.kv_a_proj_with_mqa"} <= {place.path for place in places}


def test_attention_that_expands_latents_in_another_way_keeps_its_heads() -> None:
    model = tiny_model("deepseek_v3")

    class Scaled(type(model.get_submodule("model.layers.0.self_attn"))):  # type: ignore[misc]
        def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = super().expand_kv(kv_nope, k_rot)
            return keys, 2 * values

    model.get_submodule("model.layers.1.self_attn").__class__ = Scaled
    assert keep_latents(model) == 2
    assert latent_projection(model.get_submodule("model.layers.1.self_attn")) is None


def test_a_directory_is_loaded_with_latents_and_in_few_bits(tmp_path: Path) -> None:
    tiny_model("deepseek_v3").save_pretrained(tmp_path)
    loaded = load_model(tmp_path, "float32", "cpu", quantization="int8")
    assert loaded.kv_layout == [LATENT] * 3
    assert isinstance(loaded.model.get_submodule("model.layers.2.self_attn.kv_b_proj"), LatentProjection)
    core = core_over(loaded)
    (result,) = run(core, PROMPTS[:1], max_tokens=4)
    core.runner.shutdown()
    assert len(result.token_ids) == 4
