"""The scripted model: its KV cache holds the token ids, from which it reads each sequence and finds what to say next.

The next token depends on the sequence's tokens alone: not on the step, the batch, or what else has been asked.
"""

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock.engine.attention.interface import AttentionMetadata
from penstock.engine.scripted.file import MARKER_IDS, MARKERS, Line, ModelSettings, TextTest, When

MODEL_TYPE = "penstock_scripted"
NUM_BITS = 16  # of a token id: one element of its key each, which every type holds exactly
GAP = 1e4  # between one preferred token and the next: no temperature or penalty makes up for it

History = npt.NDArray[np.uint16]  # the tokens of a sequence so far

START, END = MARKER_IDS["<|im_start|>"], MARKER_IDS["<|im_end|>"]
NEWLINE = ord("\n")
ASSISTANT = list(b"assistant\n")
THINK_START, THINK_END = MARKER_IDS["<think>"], MARKER_IDS["</think>"]
NO_REASONING = [THINK_START, THINK_END]  # as the chat template begins an answer without reasoning
# Where a mask allows nothing of the script: what ends the answer, then what closes JSON, strings first, then its shortest values.
ENDINGS = [END, *b'"}],:0-']


class ScriptedConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """`lines` are those of the script as JSON, the first of them that holds answers; each has its text as `tokens`.

    An image takes `image_tokens` tokens; where that is 0, the model takes none.
    """

    model_type = MODEL_TYPE

    def __init__(
        self,
        vocab_size: int = 0,
        max_position_embeddings: int = 0,
        lines: Sequence[dict[str, Any]] = (),
        image_tokens: int = 0,
        **others: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.lines = list(lines)
        self.image_tokens = image_tokens
        self.bos_token_id = self.pad_token_id = None
        self.eos_token_id = END
        self.tie_word_embeddings = False
        self.num_hidden_layers = 1
        self.hidden_size = NUM_BITS
        self.num_attention_heads = 1
        super().__init__(**others)


class ScriptedForCausalLM(PreTrainedModel, GenerationMixin):
    """One layer whose keys are the bits of the token ids."""

    config_class = ScriptedConfig
    config: ScriptedConfig
    _supports_attention_backend = True

    def __init__(self, config: ScriptedConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, NUM_BITS)
        self.layer = nn.Module()
        vars(self.layer)["layer_idx"] = 0
        self.script = CompiledScript([msgspec.convert(line, Line) for line in config.lines], config.vocab_size)
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: nn.Module) -> None:
        """They come with the directory."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> SimpleNamespace:
        bits_1TN: Tensor = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        bits_11TN = bits_1TN[None]
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        attend(self.layer, bits_11TN, bits_11TN, bits_11TN, None, scaling=1.0, **kwargs)
        metadata = kwargs.get("attention_metadata")
        if metadata is None or logits_to_keep is None:  # the trial run that finds the layout of the cache
            return SimpleNamespace(logits=bits_1TN.new_empty(1, 0, self.config.vocab_size, dtype=torch.float32))
        histories = self._histories(metadata, logits_to_keep.tolist())
        answers = [self.script.answer(history) for history in histories]
        if delay := max((answer.delay_seconds for answer in answers), default=0.0):  # a sleep of no length gives up the processor
            time.sleep(delay)
        return SimpleNamespace(logits=self.script.logits(answers).to(bits_1TN.device)[None])

    def _histories(self, metadata: AttentionMetadata, rows: list[int]) -> list[History]:
        """The tokens up to each of these rows of the batch, its own included."""
        cache: Any = self.layer
        starts, lens = metadata.query_start_loc.tolist(), metadata.context_lens_B.tolist()
        contexts: dict[int, History] = {}
        found = []
        for row in rows:
            sequence = bisect_right(starts, row) - 1
            if sequence not in contexts:
                blocks = metadata.blocks_of(sequence)[: -(-lens[sequence] // cache.key_cache.shape[1])]
                bits_TN = (cache.key_cache[blocks].view(-1, NUM_BITS)[: lens[sequence]] > 0).cpu().numpy()
                contexts[sequence] = np.packbits(bits_TN, axis=1, bitorder="little").view("<u2")[:, 0]
            num_after = starts[sequence + 1] - 1 - row
            found.append(contexts[sequence][: lens[sequence] - num_after])
        return found


def token_bits(vocab_size: int) -> Tensor:
    """The embedding [V, NUM_BITS]: 1 for a bit that is set, else -1."""
    ids_V1 = torch.arange(vocab_size)[:, None]
    return ((ids_V1 >> torch.arange(NUM_BITS)) & 1).float() * 2 - 1


def write_weights(directory: Path, lines: list[dict[str, Any]], vocab_size: int, settings: ModelSettings) -> None:
    """Config and weights. Each of `lines` has its tokens."""
    names = [ScriptedForCausalLM.__name__]
    ScriptedConfig(vocab_size, settings.context_length, lines, settings.image_tokens, architectures=names).save_pretrained(directory)
    save_file({"embed_tokens.weight": token_bits(vocab_size)}, directory / "model.safetensors", {"format": "pt"})


def register() -> None:
    """Makes the architecture known to transformers."""
    AutoConfig.register(MODEL_TYPE, ScriptedConfig, exist_ok=True)
    AutoModelForCausalLM.register(ScriptedConfig, ScriptedForCausalLM, exist_ok=True)


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt taken apart. Without messages it is that of a completion."""

    text: str
    messages: tuple[Message, ...]

    @property
    def user(self) -> str:
        return next((message.content for message in reversed(self.messages) if message.role == "user"), "" if self.messages else self.text)

    @property
    def tool_result(self) -> str | None:
        return self.messages[-1].content if self.messages and self.messages[-1].role == "tool" else None

    @property
    def turn(self) -> int:
        return sum(message.role == "assistant" for message in self.messages)

    def meets(self, when: When) -> bool:
        result = self.tool_result
        return (
            (when.user is None or when.user.holds(self.user))
            and (when.prompt is None or when.prompt.holds(self.text))
            and (when.turn is None or when.turn == self.turn)
            and (
                when.tool_result is None or (result is not None and when.tool_result.holds(result))
                if isinstance(when.tool_result, TextTest | None)
                else when.tool_result == (result is not None)
            )
        )


def decoded(token_ids: Sequence[int]) -> str:
    """The text of tokens, markers included."""
    markers = list(MARKERS)
    parts = (bytes([token_id]) if token_id < 256 else markers[token_id - 256].encode() for token_id in token_ids)
    return b"".join(parts).decode("utf-8", "replace")


def split_history(history: History) -> tuple[History, list[int]]:
    """The prompt, and the answer so far: what follows the last marker of a message's beginning. Without one, all is prompt."""
    starts = np.flatnonzero(history == START)
    start = int(starts[-1]) if len(starts) else len(history)
    said: list[int] = history[start + 1 :].tolist()
    is_chat = history[max(0, start - 2) : start].tolist() == [END, NEWLINE]
    if is_chat and said[: len(ASSISTANT)] == ASSISTANT:
        said = said[len(ASSISTANT) :]
    return history[:start], said


@lru_cache(maxsize=256)
def read_prompt(tokens: bytes) -> Prompt:
    """Takes a prompt, `History.tobytes()`, apart by the markers of the scripted models' chat template."""
    token_ids: list[int] = np.frombuffer(tokens, np.uint16).tolist()
    text = decoded(token_ids)
    if START not in token_ids:
        return Prompt(text, ())
    messages = []
    for part in text.split("<|im_start|>")[1:]:
        body, end, _ = part.partition("<|im_end|>")
        role, _, content = body.partition("\n")
        if end or content:
            messages.append(Message(role, content))
    return Prompt(text, tuple(messages))


@dataclass(frozen=True, slots=True)
class Answer:
    """What may come next: the scripted token, then those after it."""

    next_token_ids: list[int]
    delay_seconds: float = 0.0


class CompiledScript:
    """Which line answers a prompt, and which of its tokens come next."""

    def __init__(self, lines: list[Line], vocab_size: int) -> None:
        self._lines = lines
        others = [token_id for token_id in range(vocab_size) if token_id not in ENDINGS]
        self._fallback = [*ENDINGS, *others]

    def answer(self, history: History) -> Answer:
        """What follows these tokens, the prompt's and the answer's so far."""
        prompt_ids, said = split_history(history)
        prompt = read_prompt(prompt_ids.tobytes())
        has_no_reasoning = said[: len(NO_REASONING)] == NO_REASONING
        if has_no_reasoning:
            said = said[len(NO_REASONING) :]
        for line in self._lines:
            prefill = list(line.when.prefill.encode())
            if said[: len(prefill)] == prefill and prompt.meets(line.when):
                return Answer(_following(line, said[len(prefill) :], has_no_reasoning=has_no_reasoning), line.delay_ms / 1000)
        return Answer([END])

    def logits(self, answers: list[Answer]) -> Tensor:
        """[K, V], float32, on the CPU."""
        logits_KV = torch.empty(len(answers), len(self._fallback), dtype=torch.float32)
        for row, answer in zip(logits_KV, answers, strict=True):
            ranking = list(dict.fromkeys([*answer.next_token_ids, *self._fallback]))
            row[ranking] = -GAP * torch.arange(len(ranking), dtype=torch.float32)
        return logits_KV


def _following(line: Line, said: list[int], *, has_no_reasoning: bool) -> list[int]:
    """The tokens of the line that are still to be said, and how it ends.

    A mask may have forbidden some, which are skipped, and have asked for others, which do not count.
    """
    token_ids = line.tokens or []
    if has_no_reasoning and token_ids[:1] == [THINK_START] and THINK_END in token_ids:
        token_ids = token_ids[token_ids.index(THINK_END) + 1 :]
    if line.finish == "length":
        token_ids = token_ids * (len(said) // max(1, len(token_ids)) + 2)
        return token_ids[position_after(token_ids, said) :]
    return [*token_ids[position_after(token_ids, said) :], END]


def position_after(token_ids: list[int], said: list[int]) -> int:
    """The position in `token_ids` after what has been said, taken as tokens of it in their order and others in between."""
    if token_ids[: len(said)] == said:
        return len(said)
    position = 0
    for token_id in said:
        try:
            position = token_ids.index(token_id, position) + 1
        except ValueError:
            continue
    return position
