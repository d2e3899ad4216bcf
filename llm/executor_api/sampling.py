"""How an executor's request chooses its tokens. Names, order and meanings are those of TensorRT-LLM's `SamplingConfig`."""

from dataclasses import KW_ONLY, dataclass

from penstock.llm.executor_api.checks import check_integers, check_numbers


@dataclass(slots=True)
class SamplingConfig:
    """None is a field that was not given.

    Tokens are drawn where one of `temperature`, `top_k`, `top_p` and `min_p` is given; otherwise, and at `temperature` 0, `top_k` 1 or
    `top_p` 0, each is the most probable one. With a `beam_width` above 1 the answers are searched for, and `num_return_sequences` of the
    beams come back, by default all; otherwise it is how many sequences are generated. `early_stopping` is 1, 0, or another number for
    "never"; it and `length_penalty` concern beams alone. `no_repeat_ngram_size` counts the output, not the prompt.

    `beam_search_diversity_rate`, `beam_width_array` and the three fields of top-p decay are not supported: a request with one of them is
    answered with an error that names it. Raises `TypeError` for values of the wrong type; attributes that are set later are checked when a
    request with them is enqueued.
    """

    beam_width: int = 1
    _: KW_ONLY
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    num_return_sequences: int | None = None
    min_p: float | None = None
    beam_width_array: list[int] | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises `TypeError`."""
        check_integers(self, "beam_width", "top_k", "seed", "min_tokens", "early_stopping", "no_repeat_ngram_size", "num_return_sequences")
        check_numbers(
            self, "top_p", "temperature", "repetition_penalty", "presence_penalty", "frequency_penalty", "length_penalty", "min_p"
        )

    @property
    def is_drawn(self) -> bool:
        """Whether chance has a say in what is generated."""
        given = (self.temperature, self.top_k, self.top_p, self.min_p)
        return any(value is not None for value in given) and self.temperature != 0 and self.top_k != 1 and self.top_p != 0
