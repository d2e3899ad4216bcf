"""The shapes of real models, and what a step over them must at least read and multiply."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ITEMSIZE = 2  # bytes of a bfloat16


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's dimensions. With experts, `intermediate_size` is that of one of them.

    Counted are matrix products, the KV cache and attention. Norms, embedding rows and activations are a thousandth of that.
    """

    name: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    is_tied: bool = False
    num_experts: int = 0
    experts_per_token: int = 0

    def config(self, max_len: int) -> "PretrainedConfig":
        """A config that transformers builds the model from."""
        from transformers import AutoConfig

        settings: dict[str, Any] = {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.is_tied,
            "max_position_embeddings": max_len,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        if self.num_experts:
            settings |= {
                "moe_intermediate_size": self.intermediate_size,
                "num_experts": self.num_experts,
                "num_experts_per_tok": self.experts_per_token,
                "norm_topk_prob": True,
            }
        return AutoConfig.for_model(self.model_type, **settings)

    @property
    def attention_weights(self) -> int:
        """Of one layer: the projections of queries, keys, values and of the output."""
        return self.hidden_size * self.head_size * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def mlp_weights(self) -> int:
        """Of one layer, or of one of its experts."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def router_weights(self) -> int:
        return self.hidden_size * self.num_experts

    @property
    def head_weights(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def num_weights(self) -> int:
        """Of all matrices, those of the embedding included."""
        num_mlps = self.num_experts or 1
        layer = self.attention_weights + self.router_weights + num_mlps * self.mlp_weights
        return self.num_layers * layer + self.head_weights * (1 if self.is_tied else 2)

    def experts_touched(self, num_tokens: int) -> float:
        """How many experts of a layer are read for that many tokens, on average, where each token's are drawn at random."""
        return self.num_experts * (1 - (1 - self.experts_per_token / self.num_experts) ** num_tokens)

    def decode_bytes(self, num_sequences: int, context_len: int) -> float:
        """What one step must read: each weight once, and each sequence's keys and values."""
        num_mlps = self.experts_touched(num_sequences) if self.num_experts else 1.0
        layer = self.attention_weights + self.router_weights + num_mlps * self.mlp_weights
        keys_and_values = num_sequences * context_len * 2 * self.num_kv_heads * self.head_size
        return ITEMSIZE * (self.num_layers * (layer + keys_and_values) + self.head_weights)

    def prefill_operations(self, num_prompts: int, prompt_len: int) -> float:
        """Multiplications and additions for whole prompts: two for each weight and token, causal attention, and one row of logits each."""
        mlp = self.mlp_weights * (self.experts_per_token or 1)
        linear = 2.0 * num_prompts * prompt_len * self.num_layers * (self.attention_weights + self.router_weights + mlp)
        num_pairs = num_prompts * prompt_len * (prompt_len + 1) // 2
        attention = 4.0 * num_pairs * self.num_heads * self.head_size * self.num_layers
        return linear + attention + 2.0 * num_prompts * self.head_weights


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama-3.1-8b", "llama", 4096, 14336, 32, 32, 8, 128, 128_256),
        Shape("qwen3-0.6b", "qwen3", 1024, 3072, 28, 16, 8, 128, 151_936, is_tied=True),
        Shape("qwen3-30b-a3b", "qwen3_moe", 2048, 768, 48, 32, 4, 128, 151_936, num_experts=128, experts_per_token=8),
        Shape("tiny", "llama", 64, 96, 2, 4, 2, 16, 320),  # to try the script out
        Shape("tiny-moe", "qwen3_moe", 64, 32, 2, 4, 2, 16, 320, num_experts=4, experts_per_token=2),
    )
}


def share(bound_s: float, measured_s: float) -> float:
    """How much of what the hardware can do was reached: 1 where it took no longer than it must."""
    return bound_s / measured_s
