"""Whisper as OpenAI publishes it, a `.pt` file and a vocabulary of tiktoken's, converted to a directory that transformers reads."""

import base64
import itertools
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.errors import ConfigurationError
from penstock.engine.text.tokenizer import byte_of_character

# Parts of weights' names, in transformers' words. The longer ones come before those that they hold.
_RENAMED = (
    (".cross_attn_ln.", ".encoder_attn_layer_norm."),
    (".cross_attn.", ".encoder_attn."),
    (".attn_ln.", ".self_attn_layer_norm."),
    (".attn.", ".self_attn."),
    (".mlp_ln.", ".final_layer_norm."),
    (".mlp.0.", ".fc1."),
    (".mlp.2.", ".fc2."),
    (".query.", ".q_proj."),
    (".key.", ".k_proj."),
    (".value.", ".v_proj."),
    (".out.", ".out_proj."),
    (".blocks.", ".layers."),
    ("encoder.ln_post.", "encoder.layer_norm."),
    ("decoder.ln.", "decoder.layer_norm."),
    (".token_embedding.", ".embed_tokens."),
    (".positional_embedding", ".embed_positions.weight"),
)
ENGLISH_VOCABULARY = 51864  # tokens of the English-only models
NUM_LANGUAGES = 99
NUM_TIMESTAMPS = 1501  # from 0 to 30 seconds in steps of 20 ms
MAX_INITIAL_TIMESTAMP = 50  # steps: the first timestamp of a window is at most one second, in OpenAI's `DecodingOptions`
# The tokens of brackets, notes and the like, which are written for sounds rather than words: `suppress_tokens` of the generation config
# published for the English-only models, without special tokens.
_NON_SPEECH = (
    *(1, 2, 7, 8, 9, 10, 14, 25, 26, 27, 28, 29, 31, 58, 59, 60, 61, 62, 63, 90, 91, 92, 93, 357, 366, 438, 532, 685, 705, 796, 930, 1058),
    *(1220, 1267, 1279, 1303, 1343, 1377, 1391, 1635, 1782, 1875, 2162, 2361, 2488, 3467, 4008, 4211, 4600, 4808, 5299, 5855, 6329, 7203),
    *(9609, 9959, 10563, 10786, 11420, 11709, 11907, 13163, 13697, 13700, 14808, 15306, 16410, 16791, 17992, 19203, 19510, 20724, 22305),
    *(22935, 27007, 30109, 30420, 33409, 34949, 40283, 40493, 40549, 47282, 49146),
)
_BLANK = 220  # the token of a space


def convert_whisper(checkpoint: Path, vocabulary: Path, directory: Path) -> None:
    """Writes weights, configs and tokenizer into `directory`. Nothing in the checkpoint is run.

    Raises `ConfigurationError` for what is no checkpoint of an English-only model: others have a vocabulary of their own.
    """
    from safetensors.torch import save_file
    from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor

    try:
        content = torch.load(checkpoint, map_location="cpu", weights_only=True)
        dims: dict[str, int] = content["dims"]
        weights: dict[str, Tensor] = content["model_state_dict"]
        eos = _write_tokenizer(vocabulary, directory)
    except (OSError, EOFError, RuntimeError, LookupError, TypeError, ValueError, pickle.UnpicklingError) as error:
        raise ConfigurationError(f"{checkpoint.name} and {vocabulary.name} cannot be read as Whisper: {error}") from error
    no_timestamps = eos + NUM_LANGUAGES + 7
    if dims["n_vocab"] != no_timestamps + 1 + NUM_TIMESTAMPS or dims["n_vocab"] > ENGLISH_VOCABULARY:
        raise ConfigurationError(f"{checkpoint.name} has {dims['n_vocab']} tokens, which is not an English-only model of {vocabulary.name}")
    save_file({_renamed(name): weight.contiguous() for name, weight in weights.items()}, directory / "model.safetensors", {"format": "pt"})
    tokens: dict[str, Any] = {"bos_token_id": eos, "eos_token_id": eos, "pad_token_id": eos, "decoder_start_token_id": eos + 1}
    WhisperConfig(
        vocab_size=dims["n_vocab"],
        num_mel_bins=dims["n_mels"],
        encoder_layers=dims["n_audio_layer"],
        encoder_attention_heads=dims["n_audio_head"],
        encoder_ffn_dim=4 * dims["n_audio_state"],
        decoder_layers=dims["n_text_layer"],
        decoder_attention_heads=dims["n_text_head"],
        decoder_ffn_dim=4 * dims["n_text_state"],
        d_model=dims["n_text_state"],
        max_source_positions=dims["n_audio_ctx"],
        max_target_positions=dims["n_text_ctx"],
        architectures=["WhisperForConditionalGeneration"],
        dtype=weights["decoder.token_embedding.weight"].dtype,
        **tokens,
    ).save_pretrained(directory)
    GenerationConfig(  # type: ignore[no-untyped-call]
        is_multilingual=False,
        max_length=dims["n_text_ctx"],
        max_initial_timestamp_index=MAX_INITIAL_TIMESTAMP,
        no_timestamps_token_id=no_timestamps,
        prev_sot_token_id=no_timestamps - 2,
        return_timestamps=False,
        begin_suppress_tokens=[_BLANK, eos],
        suppress_tokens=[*_NON_SPEECH, eos + 1, *range(no_timestamps - 5, no_timestamps)],
        **tokens,
    ).save_pretrained(directory)
    extractor: Any = WhisperFeatureExtractor(feature_size=dims["n_mels"])  # type: ignore[no-untyped-call]
    extractor.save_pretrained(directory)


def _renamed(name: str) -> str:
    for theirs, ours in _RENAMED:
        name = name.replace(theirs, ours)
    return f"model.{name}"


def _write_tokenizer(vocabulary: Path, directory: Path) -> int:
    """A tokenizer.json of GPT-2's byte-level BPE and Whisper's special tokens. Returns the id of the first of these."""
    from transformers import AddedToken, WhisperTokenizer
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    lines = vocabulary.read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    characters = {byte: character for character, byte in byte_of_character().items()}

    def text(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    merges = [(text(first), text(second)) for token in ranks if len(token) > 1 for first, second in [_merged_from(token, ranks)]]
    special = [
        *("<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in list(LANGUAGES)[:NUM_LANGUAGES])),
        *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
    ]
    tokenizer: Any = WhisperTokenizer(vocab={text(token): rank for token, rank in ranks.items()}, merges=merges)
    tokenizer.add_special_tokens({"extra_special_tokens": [AddedToken(token, normalized=False, special=True) for token in special]})
    timestamps = [f"<|{step * 0.02:.2f}|>" for step in range(NUM_TIMESTAMPS)]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in timestamps])
    eos = len(ranks)
    if tokenizer.convert_tokens_to_ids(special) != list(range(eos, eos + len(special))):
        raise ValueError(f"{vocabulary.name} holds special tokens already")
    tokenizer.save_pretrained(directory)
    return eos


def _merged_from(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that byte-pair encoding merges last on its way to this one: it merges those of lower rank first."""
    parts = [token[place : place + 1] for place in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(first + second, len(ranks)) for first, second in itertools.pairwise(parts)]
        place = pairs.index(min(pairs))
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts[0], parts[1]
