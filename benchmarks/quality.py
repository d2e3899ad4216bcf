"""Measures what rounding weights costs a model: perplexity, and how far it agrees with itself in float32.

    python benchmarks/quality.py
    python benchmarks/quality.py --variants none auto --kv-cache-dtype int8
    python benchmarks/quality.py --model DIR|ID|GGUF --variants none auto int8 int4 --json results.json

Every variant reads the same passages of prose (`passages.py`), each from its beginning, and the reference's own greedy answers to the same
questions. The reference is the model with all of its weights in float32 and nothing rounded on the way; for a GGUF file, the weights that
its codes represent. Printed are

- `ppl`: perplexity over the passages
- `KL`: how much the distributions of next tokens differ from the reference's, in thousandths of a nat, the mean over the passages
- `same`: at how many positions of the passages the likeliest token is the reference's
- `greedy`: the same over the reference's answers, token by token after its own text
- `clear`: of those, only the tokens of which the reference was sure: likelier by a factor of two than its next choice

Variants run in the type that serving chooses (bfloat16 where the processor multiplies it), and on the kernels of serving, except attention:
`--kv-cache-dtype` has them attend over a paged cache of this type as well.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.passages import PASSAGES, QUESTIONS
from benchmarks.report import surroundings
from penstock.engine.attention.interface import IMPLEMENTATION, AttentionMetadata
from penstock.engine.config import Dtype, KVCacheDtype, QuantizationMode
from penstock.engine.kv_cache.tensors import KVCache, cache_dtype
from penstock.engine.model.fused import fuse_linears
from penstock.engine.model.loader import load_model
from penstock.engine.model.store import model_name, resolve_model
from penstock.engine.weights.linear import pack_linears
from penstock.engine.weights.quantization import quantized_layers

ANSWER_TOKENS = 48
BLOCK_SIZE = 16
CLEAR_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids; those from `start` on count."""

    token_ids: list[int]
    start: int


@dataclass(frozen=True, slots=True)
class Predictions:
    """For every token that counts, all texts in a row: log probabilities [T, V] of each possible token, and the actual ones [T]."""

    logprobs_TV: Tensor
    token_ids_T: Tensor

    @property
    def perplexity(self) -> float:
        return float((-self.logprobs_TV.gather(1, self.token_ids_T[:, None])).mean().exp())

    @property
    def choices_T(self) -> Tensor:
        return self.logprobs_TV.argmax(-1)

    @property
    def is_clear_T(self) -> Tensor:
        best_T2 = self.logprobs_TV.topk(2).values
        return (best_T2[:, 0] - best_T2[:, 1]).exp() > CLEAR_FACTOR


@dataclass(frozen=True, slots=True)
class Quality:
    """Of one variant. `layers`: how many linear layers by type; the others are in `dtype`."""

    variant: str
    dtype: str
    layers: dict[str, int]
    perplexity: float
    divergence: float
    same: float
    greedy: float
    greedy_clear: float


class Subject:
    """A model in one variant. With a `kv_cache_dtype`, it attends over a paged cache of this type, by the kernels of serving."""

    def __init__(self, directory: Path, dtype: Dtype, quantization: QuantizationMode, kv_cache_dtype: KVCacheDtype | None = None) -> None:
        implementation = "sdpa" if kv_cache_dtype is None else IMPLEMENTATION
        loaded = load_model(directory, dtype, "cpu", quantization=quantization, attn_implementation=implementation)
        fuse_linears(loaded.model)
        pack_linears(loaded.model)
        self.loaded = loaded
        self.model: Any = loaded.model
        self.kv_cache_dtype = kv_cache_dtype
        self.dtype = str(loaded.dtype).removeprefix("torch.")

    def logits(self, token_ids: list[int]) -> Tensor:
        """[T, V]."""
        ids_1T = torch.tensor([token_ids])
        if self.kv_cache_dtype is None:
            return self.model(ids_1T).logits[0]  # type: ignore[no-any-return]
        num_tokens, num_blocks = len(token_ids), -(-len(token_ids) // BLOCK_SIZE)
        dtype = cache_dtype(self.kv_cache_dtype, self.loaded.dtype, self.loaded.device)
        KVCache(self.loaded.kv_layout, num_blocks, BLOCK_SIZE, dtype, self.loaded.device).attach(self.model)
        tables_PN = torch.arange(num_blocks, dtype=torch.int32)[None]
        metadata = AttentionMetadata.pack(list(range(num_tokens)), [0, num_tokens], [num_tokens], [0], tables_PN, num_decodes=0)
        positions_1T = torch.arange(num_tokens)[None]
        return self.model(ids_1T, position_ids=positions_1T, use_cache=False, attention_metadata=metadata).logits[0]  # type: ignore[no-any-return]

    @torch.inference_mode()
    def predict(self, texts: Sequence[Text]) -> Predictions:
        rows, tokens = [], []
        for text in texts:
            logits_TV = self.logits(text.token_ids)[text.start - 1 : -1]
            rows.append(logits_TV.float().log_softmax(-1))
            tokens.append(torch.tensor(text.token_ids[text.start :]))
        return Predictions(torch.cat(rows), torch.cat(tokens))

    @torch.inference_mode()
    def answer(self, prompt: list[int]) -> Text:
        """The prompt with the model's greedy answer."""
        output = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            repetition_penalty=1.0,
            max_new_tokens=ANSWER_TOKENS,
        )
        return Text(output[0].tolist(), len(prompt))


def passages(tokenizer: Any) -> list[Text]:
    """The first token of each has nothing before it and does not count."""
    return [Text(tokenizer(passage)["input_ids"], 1) for passage in PASSAGES]


def prompts(tokenizer: Any) -> list[list[int]]:
    """The questions as the model's chat template writes them, or as they are where it has none."""
    if tokenizer.chat_template is None:
        return [tokenizer(question)["input_ids"] for question in QUESTIONS]
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What every variant reads, and what the reference makes of it."""

    passages: list[Text]
    answers: list[Text]
    read: Predictions
    said: Predictions

    @classmethod
    def by(cls, reference: Subject, tokenizer: Any) -> "Comparison":
        texts, answers = passages(tokenizer), [reference.answer(prompt) for prompt in prompts(tokenizer)]
        return cls(texts, answers, reference.predict(texts), reference.predict(answers))

    def quality(self, variant: str, subject: Subject) -> Quality:
        read, said = subject.predict(self.passages), subject.predict(self.answers)
        divergence = (self.read.logprobs_TV.exp() * (self.read.logprobs_TV - read.logprobs_TV)).sum(-1).mean()
        same, greedy = read.choices_T == self.read.choices_T, said.choices_T == self.said.choices_T
        return Quality(
            variant=variant,
            dtype=subject.dtype,
            layers=quantized_layers(subject.model),
            perplexity=read.perplexity,
            divergence=float(divergence),
            same=float(same.float().mean()),
            greedy=float(greedy.float().mean()),
            greedy_clear=float(greedy[self.said.is_clear_T].float().mean()),
        )


def table(qualities: Sequence[Quality]) -> Iterator[str]:
    yield f"{'variant':10} {'type':9} {'layers by type':42} {'ppl':>8} {'KL':>7} {'same':>7} {'greedy':>7} {'clear':>7}"
    for quality in qualities:
        layers = ", ".join(f"{count} {kind}" for kind, count in quality.layers.items()) or "-"
        numbers = [f"{quality.perplexity:8.3f}", f"{quality.divergence * 1000:7.2f}"]
        numbers += [f"{share:7.1%}" for share in (quality.same, quality.greedy, quality.greedy_clear)]
        yield f"{quality.variant:10} {quality.dtype:9} {layers:42} " + " ".join(numbers)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("--model", metavar="ID|DIR|GGUF", help="(default: the default model)")
    parser.add_argument(
        "--variants", nargs="+", choices=get_args(QuantizationMode), default=["none", "auto", "int8", "int4"], help="(default: all)"
    )
    parser.add_argument("--dtype", choices=get_args(Dtype), default="auto", help="of the variants (default: that of serving)")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "int8"], help="attend over a paged cache (default: none, over no cache)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    given = parser.parse_args(argv)
    directory = resolve_model(given.model)
    reference = Subject(directory, "float32", "none")
    comparison = Comparison.by(reference, AutoTokenizer.from_pretrained(directory, local_files_only=True))
    qualities = [comparison.quality("reference", reference)]
    qualities += [comparison.quality(variant, Subject(directory, given.dtype, variant, given.kv_cache_dtype)) for variant in given.variants]
    num_read, num_said = (len(predictions.token_ids_T) for predictions in (comparison.read, comparison.said))
    print(f"{model_name(given.model)}: {num_read} tokens of {len(PASSAGES)} passages, {num_said} tokens of {len(QUESTIONS)} answers")
    print("\n".join(table(qualities)))
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        counts = {"model": model_name(given.model), "passage_tokens": num_read, "answer_tokens": num_said}
        whole = {**surroundings([]), **counts, "qualities": [asdict(quality) for quality in qualities]}
        given.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
