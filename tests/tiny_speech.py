"""Small, randomly initialised Whisper models, saved as `from_pretrained` reads them, and recordings that they make many tokens of.

A window is a second long. Embeddings are drawn wide, so that single tokens stand out: else timestamps, which together are more probable
than any other token, would be all that is written.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from torch import Tensor
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

LANGUAGES = ("en", "de", "fr")
EOS, START = 256, 257
NUM_TIMESTAMPS = 51
WINDOW_FRAMES = 100
MAX_LENGTH = 28
ONE_SECOND = 16000


def special_tokens() -> list[str]:
    languages = [f"<|{code}|>" for code in LANGUAGES]
    tasks = ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    return ["<|endoftext|>", "<|startoftranscript|>", *languages, *tasks]


def id_of(token: str) -> int:
    return EOS + special_tokens().index(token)


FIRST_TIMESTAMP = id_of("<|notimestamps|>") + 1
VOCAB_SIZE = FIRST_TIMESTAMP + NUM_TIMESTAMPS


def save_tokenizer(directory: Path) -> None:
    """Of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special_tokens())
    backend.add_tokens([AddedToken(f"<|{step * 0.02:.2f}|>", normalized=False) for step in range(NUM_TIMESTAMPS)])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')


def generation_config(is_multilingual: bool) -> GenerationConfig:
    settings: dict[str, Any] = {
        "is_multilingual": is_multilingual,
        "max_length": MAX_LENGTH,
        "no_timestamps_token_id": FIRST_TIMESTAMP - 1,
        "prev_sot_token_id": id_of("<|startofprev|>"),
        "max_initial_timestamp_index": 20,
        "suppress_tokens": [7, 8, START, id_of("<|nospeech|>")],
        "begin_suppress_tokens": [32, EOS],
        "decoder_start_token_id": START,
        "bos_token_id": EOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
    }
    if is_multilingual:
        settings["lang_to_id"] = {f"<|{code}|>": id_of(f"<|{code}|>") for code in LANGUAGES}
        settings["task_to_id"] = {"transcribe": id_of("<|transcribe|>"), "translate": id_of("<|translate|>")}
    return GenerationConfig(**settings)  # type: ignore[no-untyped-call]


def speech_model(seed: int, is_multilingual: bool) -> Any:
    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=VOCAB_SIZE,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=WINDOW_FRAMES // 2,
        max_target_positions=MAX_LENGTH,
        init_std=0.2,
        decoder_start_token_id=START,
        bos_token_id=EOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        architectures=["WhisperForConditionalGeneration"],
    )
    model: Any = WhisperForConditionalGeneration(config)
    model.eval()
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight.mul_(4.0)
        model.model.decoder.embed_tokens.weight[EOS].mul_(1.3)
    model.generation_config = generation_config(is_multilingual)
    return model


def feature_extractor(num_bins: int = 8) -> Any:
    return WhisperFeatureExtractor(feature_size=num_bins, chunk_length=1)  # type: ignore[no-untyped-call]


def speech_directory(directory: Path, seed: int = 0, *, is_multilingual: bool = True) -> Path:
    """A model with its tokenizer and its features' file."""
    speech_model(seed, is_multilingual).save_pretrained(directory)
    feature_extractor().save_pretrained(directory)
    save_tokenizer(directory)
    return directory


@cache
def recording(seed: int, seconds: float) -> Tensor:
    """Tones that come and go, over noise."""
    generator = torch.Generator().manual_seed(seed)
    times = torch.arange(int(seconds * ONE_SECOND)) / ONE_SECOND
    samples = torch.randn(len(times), generator=generator) * 0.02
    for _ in range(6):
        frequency, rate, phase = (100 + 3000 * torch.rand(3, generator=generator)).tolist()
        samples += 0.1 * torch.sin(frequency * 6.28 * times) * (torch.sin(rate / 300 * times + phase) > 0)
    return samples
