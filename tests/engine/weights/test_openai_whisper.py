"""A checkpoint in OpenAI's form, small and random, and what transformers makes of its conversion."""

import base64
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import WhisperForConditionalGeneration, WhisperTokenizer

from penstock.engine.errors import ConfigurationError
from penstock.engine.text.tokenizer import Tokenizer
from penstock.engine.weights.openai_whisper import NUM_LANGUAGES, NUM_TIMESTAMPS, convert_whisper

# Byte-pair encoding makes these one after the other: "hello" of "hell" and "o", not of "he" and "llo".
MERGED = [b"he", b"ll", b"hell", b"hello", b" w", "é".encode(), b"or", b" wor"]
EOS = 256 + len(MERGED)
NUM_TOKENS = EOS + NUM_LANGUAGES + 8 + NUM_TIMESTAMPS
STATE, LAYERS = 8, 2
DIMS = {
    "n_mels": 80,
    "n_vocab": NUM_TOKENS,
    "n_audio_ctx": 6,
    "n_audio_state": STATE,
    "n_audio_head": 2,
    "n_audio_layer": LAYERS,
    "n_text_ctx": 12,
    "n_text_state": STATE,
    "n_text_head": 2,
    "n_text_layer": LAYERS,
}


def write_vocabulary(path: Path) -> Path:
    tokens = [bytes([byte]) for byte in range(256)] + MERGED
    path.write_bytes(b"".join(b"%b %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)))
    return path


def attention(name: str) -> dict[str, tuple[int, ...]]:
    weights: dict[str, tuple[int, ...]] = {f"{name}.{part}.weight": (STATE, STATE) for part in ("query", "key", "value", "out")}
    return weights | {f"{name}.{part}.bias": (STATE,) for part in ("query", "value", "out")}


def norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (STATE,), f"{name}.bias": (STATE,)}


def block(name: str, *, is_decoder: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = attention(f"{name}.attn") | norm(f"{name}.attn_ln") | norm(f"{name}.mlp_ln")
    if is_decoder:
        shapes |= attention(f"{name}.cross_attn") | norm(f"{name}.cross_attn_ln")
    shapes |= {f"{name}.mlp.0.weight": (4 * STATE, STATE), f"{name}.mlp.0.bias": (4 * STATE,)}
    return shapes | {f"{name}.mlp.2.weight": (STATE, 4 * STATE), f"{name}.mlp.2.bias": (STATE,)}


def weights() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "encoder.conv1.weight": (STATE, 80, 3),
        "encoder.conv1.bias": (STATE,),
        "encoder.conv2.weight": (STATE, STATE, 3),
        "encoder.conv2.bias": (STATE,),
        "encoder.positional_embedding": (DIMS["n_audio_ctx"], STATE),
        "decoder.token_embedding.weight": (NUM_TOKENS, STATE),
        "decoder.positional_embedding": (DIMS["n_text_ctx"], STATE),
    }
    shapes |= norm("encoder.ln_post") | norm("decoder.ln")
    for side in ("encoder", "decoder"):
        for layer in range(LAYERS):
            shapes |= block(f"{side}.blocks.{layer}", is_decoder=side == "decoder")
    torch.manual_seed(0)
    return {name: torch.randn(shape).half() for name, shape in shapes.items()}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.save({"dims": DIMS, "model_state_dict": weights()}, tmp_path / "tiny.en.pt")
    return tmp_path / "tiny.en.pt"


def test_transformers_reads_all_of_it(checkpoint: Path, tmp_path: Path) -> None:
    directory = tmp_path / "converted"
    directory.mkdir()
    convert_whisper(checkpoint, write_vocabulary(tmp_path / "gpt2.tiktoken"), directory)
    factory: Any = WhisperForConditionalGeneration
    model, report = factory.from_pretrained(directory, output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    given = weights()
    decoder = model.model.decoder
    assert torch.equal(decoder.layers[1].encoder_attn.q_proj.weight, given["decoder.blocks.1.cross_attn.query.weight"])
    assert torch.equal(decoder.layers[0].self_attn.out_proj.bias, given["decoder.blocks.0.attn.out.bias"])
    assert torch.equal(model.model.encoder.layers[1].fc2.weight, given["encoder.blocks.1.mlp.2.weight"])
    assert torch.equal(model.proj_out.weight, given["decoder.token_embedding.weight"])
    assert model.generation_config.no_timestamps_token_id == EOS + NUM_LANGUAGES + 7
    assert model.config.decoder_start_token_id == EOS + 1


def test_the_tokenizer_merges_as_the_ranks_say(checkpoint: Path, tmp_path: Path) -> None:
    directory = tmp_path / "converted"
    directory.mkdir()
    convert_whisper(checkpoint, write_vocabulary(tmp_path / "gpt2.tiktoken"), directory)
    tokenizer, theirs = Tokenizer.load(directory), WhisperTokenizer.from_pretrained(directory)
    assert tokenizer.encode("hello", add_special_tokens=False) == [256 + 3]
    assert tokenizer.encode(" worhé", add_special_tokens=False) == [256 + 7, ord("h"), 256 + 5]
    for text in ("hello world", "Héllo, wörld!", "ll he"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.vocab_size == len(theirs) == NUM_TOKENS
    assert tokenizer.token_id("<|endoftext|>") == EOS
    assert tokenizer.token_id("<|notimestamps|>") == EOS + NUM_LANGUAGES + 7
    assert tokenizer.token_id("<|30.00|>") == NUM_TOKENS - 1
    assert theirs.decode([EOS + NUM_LANGUAGES + 8 + 50], decode_with_timestamps=True) == "<|1.00|>"


def test_what_is_no_such_checkpoint_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    vocabulary, directory = write_vocabulary(tmp_path / "gpt2.tiktoken"), tmp_path / "converted"
    directory.mkdir()
    broken = tmp_path / "broken.pt"
    for content in (b"", b"abc", checkpoint.read_bytes()[:1000]):
        broken.write_bytes(content)
        with pytest.raises(ConfigurationError, match=r"broken\.pt and gpt2\.tiktoken cannot be read as Whisper"):
            convert_whisper(broken, vocabulary, directory)
    torch.save({"dims": DIMS | {"n_vocab": NUM_TOKENS + 1}, "model_state_dict": weights()}, broken)
    with pytest.raises(ConfigurationError, match=f"has {NUM_TOKENS + 1} tokens"):
        convert_whisper(broken, vocabulary, directory)
    torch.save({"dims": Path("code"), "model_state_dict": {}}, broken)  # an object that only running code can make
    with pytest.raises(ConfigurationError, match="cannot be read as Whisper"):
        convert_whisper(broken, vocabulary, directory)
