"""Texts as a pooling model's own library would turn them into tokens: lower case and instructions included."""

from dataclasses import dataclass

from penstock.engine.errors import InvalidRequest
from penstock.engine.pooling.encoder_batch import EncoderInput
from penstock.engine.pooling.pooling_files import SentenceFiles
from penstock.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EncodedText:
    """`num_instruction_tokens` goes into `PoolingParams`; it is counted for models that leave them out."""

    tokens: EncoderInput
    num_instruction_tokens: int = 0


def encode_text(
    tokenizer: Tokenizer,
    files: SentenceFiles,
    text: str,
    pair: str | None = None,
    *,
    max_tokens: int | None = None,
    max_pair_tokens: int | None = None,
    prompt_name: str | None = None,
) -> EncodedText:
    """A text, or a pair as a cross-encoder reads it, with special tokens.

    A single text is put behind the instruction of that name (`prompts` in config_sentence_transformers.json), without one behind the
    default one if the files have any. `max_tokens` cuts what is longer, `max_pair_tokens` a longer second text. Raises `InvalidRequest`.
    """
    instruction = "" if pair is not None else _instruction(files, prompt_name)
    if files.do_lower_case:
        text, pair, instruction = text.lower(), None if pair is None else pair.lower(), instruction.lower()
    token_ids, token_type_ids = tokenizer.encode_pair(instruction + text, pair, max_tokens=max_tokens, max_pair_tokens=max_pair_tokens)
    tokens = EncoderInput(token_ids, None if pair is None else token_type_ids)
    is_counted = bool(instruction) and not files.include_prompt
    return EncodedText(tokens, _num_tokens(tokenizer, instruction) if is_counted else 0)


def _instruction(files: SentenceFiles, name: str | None) -> str:
    prompts = files.prompts or {}
    if name is None:
        return prompts.get(files.default_prompt_name or "") or ""
    if name not in prompts:
        raise InvalidRequest(f"this model has no prompt named {name!r}; it has {', '.join(sorted(prompts)) or 'none'}", "prompt_name")
    return prompts[name] or ""


def _num_tokens(tokenizer: Tokenizer, instruction: str) -> int:
    """With the special tokens before the instruction, without those after it."""
    token_ids, _ = tokenizer.encode_pair(instruction)
    plain = tokenizer.encode(instruction, add_special_tokens=False)
    for start in range(len(token_ids) - len(plain) + 1):
        if token_ids[start : start + len(plain)] == plain:
            return start + len(plain)
    return len(token_ids)
