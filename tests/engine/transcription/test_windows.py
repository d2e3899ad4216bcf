"""The rules for a window's tokens and where it ends, beside those of transformers."""

import random
from typing import Any

import pytest
import torch
from transformers import WhisperForConditionalGeneration
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from penstock.engine.transcription.model import Segment, SpeechTokens, Window, choose, prompt_of
from tests import tiny_speech
from tests.tiny_speech import EOS, FIRST_TIMESTAMP, NUM_TIMESTAMPS, VOCAB_SIZE

CONFIG: Any = tiny_speech.generation_config(is_multilingual=True)
MODEL_CONFIG: Any = tiny_speech.speech_model(0, is_multilingual=True).config
TOKENS = SpeechTokens.of(MODEL_CONFIG, CONFIG)
# transformers leaves these to other processors.
SUPPRESSED = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, torch.tensor(CONFIG.suppress_tokens), True)


def window_after(token_ids: list[int], num_frames: int = 100, seek: int = 0) -> tuple[Window, list[Segment]]:
    window = Window(TOKENS, seek, num_frames, max_tokens=1000)
    segments = [segment for token in token_ids if (segment := window.append(token, -0.5)) is not None]
    return window, segments


def some_tokens(rng: random.Random) -> list[int]:
    """What a model may have written: text and timestamps that the rules allow, drawn from random logits."""
    window = Window(TOKENS, 0, 100, max_tokens=rng.randrange(1, 20))
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    while not window.has_ended:
        logits = 6 * torch.randn(VOCAB_SIZE, generator=generator)
        logits[FIRST_TIMESTAMP:] += rng.choice([0, 4])
        window.append(*choose(window.allowed(logits), 1.0, generator))
    return window.token_ids


def test_the_tokens_that_may_come_next_are_those_of_transformers() -> None:
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    processor = WhisperTimeStampLogitsProcessor(CONFIG, begin_index=1)
    num_forced = 0
    for _ in range(150):
        written = some_tokens(rng)
        written = written[: rng.randrange(len(written) + 1)]
        logits = 5 * torch.randn(VOCAB_SIZE, generator=generator)
        suppressed = logits.masked_fill(SUPPRESSED, -torch.inf)
        if not written:
            suppressed[CONFIG.begin_suppress_tokens] = -torch.inf
        expected = processor(torch.tensor([[tiny_speech.START, *written]]), suppressed[None])[0]
        window, _ = window_after(written)
        assert torch.equal(window.allowed(logits), expected)
        num_forced += bool((expected[:FIRST_TIMESTAMP] == -torch.inf).all()) and bool(written)
    assert 10 < num_forced < 140


def test_segments_and_the_next_window_are_those_of_transformers() -> None:
    rng = random.Random(2)
    num_segments, ends = 0, set()
    for _ in range(300):
        written, seek, num_frames = some_tokens(rng), rng.randrange(0, 1000), rng.randrange(2, 101)
        window, segments = window_after(written, num_frames, seek)
        last, advance = window.finish()
        theirs: Any = WhisperForConditionalGeneration
        expected, offset = theirs._retrieve_segment(
            seek_sequence=torch.tensor(written),
            seek_outputs=[None],
            time_offset=torch.tensor([seek * 0.01], dtype=torch.float64),
            timestamp_begin=FIRST_TIMESTAMP,
            seek_num_frames=torch.tensor([num_frames]),
            time_precision=0.02,
            time_precision_features=0.01,
            input_stride=2,
            prev_idx=0,
            idx=0,
            return_token_timestamps=False,
            decoder_input_ids=torch.zeros(1, 1),
        )
        assert advance == int(offset)
        found = segments + last
        times = [time for segment in found for time in (segment.start, segment.end)]
        assert times == pytest.approx([float(each[side]) for each in expected for side in ("start", "end")])
        for segment, each in zip(found, expected, strict=True):
            assert list(segment.token_ids) == each["tokens"].tolist()[: len(segment.token_ids)]
            assert len(each["tokens"]) - len(segment.token_ids) in (0, 1)
            assert (segment.seek, segment.avg_logprob) == (seek, -0.5)
        num_segments += len(found)
        ends.add((bool(segments), bool(last)))
    assert num_segments > 350
    assert ends == {(True, True), (True, False), (False, True)}


def test_a_draw_follows_the_probabilities() -> None:
    logits = torch.log(torch.tensor([0.1, 0.0, 0.6, 0.3]))
    generator = torch.Generator().manual_seed(0)
    draws = [choose(logits, 1.0, generator)[0] for _ in range(3000)]
    assert [round(draws.count(token) / len(draws), 1) for token in range(4)] == [0.1, 0.0, 0.6, 0.3]
    token, logprob = choose(logits, 0.0, None)
    assert token == 2
    assert logprob == pytest.approx(-0.5108, abs=1e-3)
    cold = [choose(logits, 0.1, generator)[0] for _ in range(100)]
    assert cold.count(2) > 95


def test_a_prompt_says_language_and_task() -> None:
    assert prompt_of(TOKENS, "de", "translate", []) == [tiny_speech.START, EOS + 3, EOS + 5]
    assert prompt_of(TOKENS, "en", "transcribe", [1, 2]) == [tiny_speech.id_of("<|startofprev|>"), 1, 2, EOS + 1, EOS + 2, EOS + 6]
    english = SpeechTokens.of(MODEL_CONFIG, tiny_speech.generation_config(is_multilingual=False))
    assert prompt_of(english, "en", "transcribe", []) == [tiny_speech.START]
    assert FIRST_TIMESTAMP + NUM_TIMESTAMPS == VOCAB_SIZE
