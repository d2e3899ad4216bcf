"""Whisper on its device: from samples to features, from windows of features to logits, with a cache of so many windows at a time.

Which tokens may come next in a window, where its segments end and where the next window begins follows the rules of OpenAI's Whisper
(`decoding.py` and `transcribe.py`; section 4.5 of arXiv:2212.04356), as transformers' `generate` has them for recordings longer than a
window: windows follow each other by the timestamps that the model writes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    EncoderDecoderCache,
    PreTrainedModel,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigurationError
from penstock.engine.model.config import read_config, read_generation_config, refusal
from penstock.engine.model.loader import DTYPES, load_pretrained, resolve_device, settle_memory
from penstock.engine.system.memory import index_on, to_device

SAMPLING_RATE = 16000  # samples a second, of all Whisper models
MAX_NUM_WINDOWS = 8  # decoded at the same time, unless --max-num-seqs says otherwise
FRAMES_AT_ONCE = 6000  # of features: 60 seconds of audio, whose spectrum takes 10 MB
TIMESTAMP_SECONDS = 0.02  # a step of the timestamps, which is a position of the encoder
FRAMES_PER_TIMESTAMP = 2


@dataclass(frozen=True, slots=True)
class SpeechTokens:
    """The ids that have a meaning, by generation_config.json. Text has those below `eos`, timestamps those from `first_timestamp` on.

    `languages` are the tokens by their codes, such as `en`; an English-only model has neither these nor tokens of a task.
    `suppressed` are never written, `suppressed_first` not as a window's first token.
    """

    eos: int
    start: int
    first_timestamp: int
    previous: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]
    max_initial_timestamp: int | None

    @property
    def no_timestamps(self) -> int:
        return self.first_timestamp - 1

    @property
    def no_speech(self) -> int:
        return self.first_timestamp - 2

    @property
    def is_multilingual(self) -> bool:
        return bool(self.languages)

    @classmethod
    def of(cls, config: WhisperConfig, generation: Any) -> "SpeechTokens":
        """`generation` is a `GenerationConfig`. Raises `ConfigurationError` where it lacks what timestamps need, and so long audio."""
        if getattr(generation, "no_timestamps_token_id", None) is None:
            raise refusal(config, "its generation_config.json has no `no_timestamps_token_id`, without which no timestamps can be written")
        is_multilingual = bool(getattr(generation, "is_multilingual", False))
        languages = getattr(generation, "lang_to_id", None) or {}
        if is_multilingual and not (languages and getattr(generation, "task_to_id", None)):
            raise refusal(config, "it is multilingual, and its generation_config.json has no `lang_to_id` or `task_to_id`")
        no_timestamps = int(generation.no_timestamps_token_id)
        eos = generation.eos_token_id
        return cls(
            eos=int(eos[0] if isinstance(eos, list) else eos),
            start=int(config.decoder_start_token_id),
            first_timestamp=no_timestamps + 1,
            previous=int(getattr(generation, "prev_sot_token_id", None) or no_timestamps - 2),
            languages={name.strip("<|>"): int(token) for name, token in languages.items()} if is_multilingual else {},
            tasks=dict(generation.task_to_id) if is_multilingual else {},
            suppressed=tuple(generation.suppress_tokens or ()),
            suppressed_first=tuple(generation.begin_suppress_tokens or ()),
            max_initial_timestamp=getattr(generation, "max_initial_timestamp_index", None),
        )


class WindowCache:
    """Keys and values of `num_windows` windows in the decoder's layers: of their own tokens, and of what the encoder made of their audio.

    Windows that run have the slots from 0 on, without a gap, so that a step reads a part of each tensor and copies nothing.
    """

    def __init__(self, config: WhisperConfig, num_windows: int, dtype: torch.dtype, device: torch.device) -> None:
        heads = config.decoder_attention_heads
        shape = (config.decoder_layers, 2, num_windows, heads)
        size = config.d_model // heads
        # Of zeros: what a mask hides is multiplied by 0, which must not be NaN. On a CPU, a slot's memory is taken when that is first used.
        self.own = torch.zeros(*shape, config.max_target_positions, size, dtype=dtype, device=device)  # [L, 2, S, H, P, D]
        self.cross = torch.zeros(*shape, config.max_source_positions, size, dtype=dtype, device=device)  # [L, 2, S, H, A, D]

    def move(self, source: int, target: int) -> None:
        self.own[:, :, target] = self.own[:, :, source]
        self.cross[:, :, target] = self.cross[:, :, source]

    @staticmethod
    def slot_bytes(config: WhisperConfig, dtype: torch.dtype) -> int:
        """What one window takes."""
        num_positions = config.max_target_positions + config.max_source_positions
        return 2 * int(config.decoder_layers) * int(config.d_model) * num_positions * dtype.itemsize


@dataclass(slots=True)
class _CrossLayer:
    keys: Tensor
    values: Tensor


class _StepCache(EncoderDecoderCache):
    """What one call of the decoder sees of the cache. transformers' attention writes and reads through it.

    `slots` are those of prompts; None for a step of one token for each window from slot 0 on, at `positions_B`. `longest` is the number of
    keys that any of the windows has.
    """

    def __init__(self, cache: WindowCache, slots: Tensor | None, positions_B: Tensor, longest: int) -> None:
        self._cache, self._slots, self._positions_B, self._longest = cache, slots, positions_B, longest
        self._rows = torch.arange(len(positions_B), device=positions_B.device)
        own: Any = self
        self.self_attention_cache = own
        self.cross_attention_cache = own
        self.is_updated = dict.fromkeys(range(len(cache.own)), True)  # the encoder's keys and values are there before any token is
        layers: Any = [self._cross_layer(layer) for layer in cache.cross]
        self.layers = layers

    def __len__(self) -> int:
        return len(self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._longest

    # What transformers asks of a cache to choose a mask, which is given here.
    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self)

    @property
    def is_linear(self) -> list[bool]:
        return [False] * len(self)

    @property
    def is_dummy(self) -> list[bool]:
        return [False] * len(self)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """[B, H, Q, D] of each. What comes back has all keys and values that the mask tells apart."""
        layer = self._cache.own[layer_idx]
        if self._slots is not None:  # prompts, which have nothing before them
            length = key_states.shape[2]
            layer[0, self._slots, :, :length] = key_states
            layer[1, self._slots, :, :length] = value_states
            return key_states, value_states
        layer[0, self._rows, :, self._positions_B] = key_states[:, :, 0]
        layer[1, self._rows, :, self._positions_B] = value_states[:, :, 0]
        count = len(self._rows)
        return layer[0, :count, :, : self._longest], layer[1, :count, :, : self._longest]

    def _cross_layer(self, layer: Tensor) -> _CrossLayer:
        if self._slots is None:
            count = len(self._rows)
            return _CrossLayer(layer[0, :count], layer[1, :count])
        return _CrossLayer(layer[0, self._slots], layer[1, self._slots])


class SpeechModel:
    """A Whisper model with its cache. `window_frames` are the frames of features, 10 ms each, that the encoder takes at a time."""

    def __init__(self, directory: Path, config: EngineConfig) -> None:
        """Loads the model. Raises `ConfigurationError` naming what cannot be served."""
        model_config = read_config(directory, config.trust_remote_code)
        assert isinstance(model_config, WhisperConfig)
        if config.quantization not in ("auto", "none"):
            raise ConfigurationError(f"--quantization {config.quantization} is for models that generate; this one takes auto or none")
        self.config = model_config
        self.tokens = SpeechTokens.of(model_config, read_generation_config(directory, model_config))
        self.device = resolve_device(config.device)
        stored = model_config.dtype if isinstance(model_config.dtype, torch.dtype) else torch.float32
        auto = stored if self.device.type == "cuda" else torch.float32
        self.dtype = auto if config.dtype == "auto" else DTYPES[config.dtype]
        self._extractor = _feature_extractor(directory, model_config)
        self._filters_FM = torch.from_numpy(np.asarray(self._extractor.mel_filters)).float()
        self._window = torch.hann_window(self._extractor.n_fft)
        self.num_windows = self._num_windows(config)
        model: PreTrainedModel = load_pretrained(
            WhisperForConditionalGeneration,
            directory,
            model_config,
            self.dtype,
            self.device,
            trust_remote_code=False,
            is_needed=lambda name: name != "proj_out.weight",  # which is the embedding's
            attn_implementation="sdpa",
        )
        torch.nn.Module.to(model, self.device)
        self.model: Any = model.train(False).requires_grad_(False)
        if self.device.type == "cpu":
            settle_memory(model)
        self.cache = WindowCache(model_config, self.num_windows, self.dtype, self.device)

    @property
    def window_frames(self) -> int:
        return FRAMES_PER_TIMESTAMP * int(self.config.max_source_positions)

    @property
    def max_length(self) -> int:
        """The most tokens of a window, with those of its prompt."""
        return int(self.config.max_target_positions)

    def _num_windows(self, config: EngineConfig) -> int:
        """As many as were asked for, and as the memory asked for holds. Raises `ConfigurationError` where that holds none."""
        number, memory = config.max_num_seqs or MAX_NUM_WINDOWS, config.kv_cache_memory
        if memory is None:
            return number
        slot_bytes = WindowCache.slot_bytes(self.config, self.dtype)
        if memory < slot_bytes:
            raise ConfigurationError(f"--kv-cache-memory {memory}: this model needs {slot_bytes} bytes for a window of audio")
        return min(number, memory // slot_bytes)

    def features(self, samples_N: Tensor) -> Tensor:
        """Log-mel features, float32 [M, T] with a frame for each 10 ms, of float32 samples between -1 and 1, whatever their length.

        As transformers' `WhisperFeatureExtractor` computes them of a whole recording, a part at a time. May be called from any thread.
        """
        torch.set_num_threads(1)  # of this thread: others would be in the way of the model's
        extractor, num_frames = self._extractor, len(samples_N) // self._extractor.hop_length
        half = extractor.n_fft // 2
        if num_frames == 0:
            return torch.zeros(self._filters_FM.shape[1], 0)
        padded_N = torch.cat([samples_N, samples_N.new_zeros(max(0, half + 1 - len(samples_N)))])
        padded_N = functional.pad(padded_N[None], (half, half), mode="reflect")[0]
        parts = []
        for first in range(0, num_frames, FRAMES_AT_ONCE):
            last = min(first + FRAMES_AT_ONCE, num_frames)
            part_N = padded_N[first * extractor.hop_length : (last - 1) * extractor.hop_length + extractor.n_fft]
            spectrum_FT = torch.stft(part_N, extractor.n_fft, extractor.hop_length, window=self._window, center=False, return_complex=True)
            parts.append((self._filters_FM.T @ spectrum_FT.abs().square()).clamp(min=1e-10).log10())
        log_MT = torch.cat(parts, dim=1)
        return (torch.maximum(log_MT, log_MT.max() - 8.0) + 4.0) / 4.0

    @torch.inference_mode()
    def encode(self, windows: Sequence[Tensor], slots: Sequence[int]) -> None:
        """Puts what the decoder reads of these windows' features, [M, T] each, into the slots. What is short is padded with zeros."""
        features_BMT = torch.stack([functional.pad(window, (0, self.window_frames - window.shape[1])) for window in windows])
        states_BAE = self.model.model.encoder(to_device(features_BMT.to(self.dtype), self.device)).last_hidden_state
        index_B = index_on(self.device, slots)
        for number, layer in enumerate(self.model.model.decoder.layers):
            attention = layer.encoder_attn
            for place, projection in enumerate((attention.k_proj, attention.v_proj)):
                heads_BAHD = projection(states_BAE).unflatten(-1, (attention.num_heads, attention.head_dim))
                self.cache.cross[number, place, index_B] = heads_BAHD.transpose(1, 2)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The logits after each prompt, and after its `start` token, float32 [B, V] on the CPU. What was in the slots' own cache goes."""
        longest = max(map(len, prompts))
        rows = [[*prompt, *[self.tokens.eos] * (longest - len(prompt))] for prompt in prompts]
        ids_BQ = to_device(torch.tensor(rows), self.device)
        positions_Q = torch.arange(longest, device=self.device)
        mask_QK = positions_Q[None, :] <= positions_Q[:, None]  # which hides what comes after a shorter prompt as well
        cache = _StepCache(self.cache, index_on(self.device, slots), positions_Q.new_zeros(len(prompts)), longest)
        states_BQE = self._decode(ids_BQ, positions_Q.expand(len(prompts), -1), mask_QK.expand(len(prompts), 1, -1, -1), cache)
        starts = [max(place for place, token in enumerate(prompt) if token == self.tokens.start) for prompt in prompts]
        index_B = torch.arange(len(prompts), device=self.device)
        ends_BE = states_BQE[index_B, index_on(self.device, [len(prompt) - 1 for prompt in prompts])]
        starts_BE = states_BQE[index_B, index_on(self.device, starts)]
        return self._logits(ends_BE), self._logits(starts_BE)

    @torch.inference_mode()
    def step(self, token_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """The logits after one more token of each window from slot 0 on, float32 [B, V] on the CPU. `positions` are the tokens'."""
        positions_B, longest = index_on(self.device, positions), max(positions) + 1
        mask_BK = torch.arange(longest, device=self.device)[None, :] <= positions_B[:, None]
        cache = _StepCache(self.cache, None, positions_B, longest)
        return self._logits(
            self._decode(index_on(self.device, token_ids)[:, None], positions_B[:, None], mask_BK[:, None, None], cache)[:, 0]
        )

    def _decode(self, ids_BQ: Tensor, positions_BQ: Tensor, mask_B1QK: Tensor, cache: _StepCache) -> Tensor:
        decoder = self.model.model.decoder
        unread = torch.empty(len(ids_BQ), 0, int(self.config.d_model), dtype=self.dtype, device=self.device)
        states_BQE: Tensor = decoder(
            input_ids=ids_BQ,
            attention_mask=mask_B1QK,
            encoder_hidden_states=unread,  # its keys and values are in the cache
            past_key_values=cache,
            position_ids=positions_BQ,
            use_cache=True,
        ).last_hidden_state
        return states_BQE

    def _logits(self, states_BE: Tensor) -> Tensor:
        logits_BV: Tensor = self.model.proj_out(states_BE)
        return logits_BV.float().cpu()


def _feature_extractor(directory: Path, config: WhisperConfig) -> Any:
    """By the model's own file, if there is one. Raises `ConfigurationError` for one that makes other features."""
    try:
        extractor: Any = WhisperFeatureExtractor.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        if (directory / "preprocessor_config.json").is_file():
            raise ConfigurationError(f"{directory / 'preprocessor_config.json'} cannot be read: {error}") from error
        extractor = WhisperFeatureExtractor(feature_size=config.num_mel_bins)  # type: ignore[no-untyped-call]
    expected = (config.num_mel_bins, SAMPLING_RATE, SAMPLING_RATE // 100, 0.0)
    found = (extractor.feature_size, extractor.sampling_rate, extractor.hop_length, extractor.dither)
    if found != expected:
        raise refusal(config, f"its features (bins, sampling rate, hop, dither) are {found}, and {expected} are served")
    return extractor


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of text between two timestamps, which are seconds of the recording. `token_ids` include the timestamps.

    `seek` is the frame that its window begins at. `avg_logprob` is the mean log probability of its tokens, `no_speech_prob` the
    probability that there is no speech in its window.
    """

    start: float
    end: float
    token_ids: tuple[int, ...]
    seek: int
    avg_logprob: float
    no_speech_prob: float


@dataclass(slots=True, eq=False)
class Window:
    """Tokens of `num_frames` frames of a recording from `seek` on. `max_tokens` bounds them."""

    tokens: SpeechTokens
    seek: int
    num_frames: int
    max_tokens: int
    no_speech_prob: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    has_ended: bool = False
    _num_emitted: int = 0  # tokens that are in segments

    def allowed(self, logits_V: Tensor) -> Tensor:
        """The logits with those of tokens that must not come next at -inf.

        Timestamps come in pairs, but for the first one, and do not decrease. The first token is one. Where all timestamps together are
        more probable than any other token, one of them comes.
        """
        tokens, first, written = self.tokens, self.tokens.first_timestamp, self.token_ids
        allowed_V = logits_V.clone()
        allowed_V[[*tokens.suppressed, tokens.no_timestamps]] = -math.inf
        if not written:
            allowed_V[list(tokens.suppressed_first)] = -math.inf
            allowed_V[:first] = -math.inf
            if tokens.max_initial_timestamp is not None:
                allowed_V[first + tokens.max_initial_timestamp + 1 :] = -math.inf
        else:
            is_after_timestamp = written[-1] >= first
            is_after_text = len(written) > 1 and written[-2] < first
            if is_after_timestamp and is_after_text:  # a segment has ended: the next one begins, or the window ends
                allowed_V[: tokens.eos] = -math.inf
            elif is_after_timestamp:
                allowed_V[first:] = -math.inf
            last = next(token for token in reversed(written) if token >= first)
            allowed_V[first : last + (not (is_after_timestamp and is_after_text))] = -math.inf
        logprobs_V = torch.log_softmax(allowed_V, dim=-1)
        if logprobs_V[first:].logsumexp(dim=-1) > logprobs_V[:first].max():
            allowed_V[:first] = -math.inf
        return allowed_V

    def append(self, token_id: int, logprob: float) -> Segment | None:
        """Takes the next token; returns the segment that has ended before it, if it shows that one has."""
        if token_id == self.tokens.eos:
            self.has_ended = True
            return None
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.has_ended = len(self.token_ids) >= self.max_tokens
        first = self.tokens.first_timestamp
        if len(self.token_ids) > 1 and self.token_ids[-2] >= first and token_id >= first:
            return self._segment(self._step_at(self._num_emitted), self._step_at(-2), len(self.token_ids) - 1)
        return None

    def finish(self) -> tuple[list[Segment], int]:
        """The segments that are left of a window that has ended, and how many frames after its beginning the next one begins.

        What follows the last pair of timestamps is decoded again with the audio after it, unless it ends with a timestamp of its own.
        """
        first, written = self.tokens.first_timestamp, self.token_ids
        if self._num_emitted:
            if not (written[-1] >= first and written[-2] < first):
                return [], max(1, self._step_at(self._num_emitted - 1)) * FRAMES_PER_TIMESTAMP
            return [self._segment(self._step_at(self._num_emitted), self._step_at(-1), len(written))], self.num_frames
        timestamps = [token for token in written if token >= first]
        end = self.num_frames // FRAMES_PER_TIMESTAMP
        if timestamps and timestamps[-1] != first:
            end = timestamps[-1] - first
        return [self._segment(0, end, len(written))], self.num_frames

    def _step_at(self, place: int) -> int:
        return self.token_ids[place] - self.tokens.first_timestamp

    def _segment(self, first_step: int, last_step: int, end: int) -> Segment:
        part = slice(self._num_emitted, end)
        logprobs = self.logprobs[part]
        offset = self.seek * TIMESTAMP_SECONDS / FRAMES_PER_TIMESTAMP
        segment = Segment(
            start=round(offset + first_step * TIMESTAMP_SECONDS, 2),
            end=round(offset + last_step * TIMESTAMP_SECONDS, 2),
            token_ids=tuple(self.token_ids[part]),
            seek=self.seek,
            avg_logprob=sum(logprobs) / len(logprobs) if logprobs else 0.0,
            no_speech_prob=self.no_speech_prob,
        )
        self._num_emitted = end
        return segment


def choose(allowed_V: Tensor, temperature: float, generator: torch.Generator | None) -> tuple[int, float]:
    """The next token and its log probability at temperature 1: the most probable one, or one drawn at a temperature above 0."""
    logprobs_V = torch.log_softmax(allowed_V, dim=-1)
    if temperature == 0.0:
        token = int(allowed_V.argmax())
    else:
        cumulative_V = torch.softmax(allowed_V.double() / temperature, dim=-1).cumsum(dim=-1)
        drawn = torch.rand((), dtype=torch.float64, generator=generator) * cumulative_V[-1]
        token = min(int(torch.searchsorted(cumulative_V, drawn, right=True)), len(allowed_V) - 1)
    return token, float(logprobs_V[token])


def prompt_of(tokens: SpeechTokens, language: str | None, task: str, previous: Sequence[int]) -> list[int]:
    """What the decoder reads before a window's own tokens: text that precedes it, if any, and what to do."""
    prompt = [tokens.previous, *previous] if previous else []
    if not tokens.is_multilingual:
        return [*prompt, tokens.start]
    assert language is not None
    return [*prompt, tokens.start, tokens.languages[language], tokens.tasks[task]]
