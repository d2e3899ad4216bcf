"""What an executor's responses are to hold beside token ids."""

from dataclasses import dataclass

from penstock.llm.executor_api.checks import check_flags, wrong


@dataclass(slots=True)
class AdditionalModelOutput:
    """A named output of the model, such as `hidden_states.last`: of the generated tokens and, with `gather_context`, of the prompt's."""

    name: str
    gather_context: bool = False


@dataclass(slots=True)
class OutputConfig:
    """`exclude_input_from_output` leaves the prompt out of `output_token_ids`, where it stands before an answer that is not streamed.

    `return_encoder_output` is answered with an error: there are no encoders. Raises `TypeError` for values of the wrong type; attributes
    that are set later are checked when a request with them is enqueued.
    """

    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = False
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: list[AdditionalModelOutput] | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises `TypeError`."""
        check_flags(self, "return_log_probs", "return_context_logits", "return_generation_logits", "exclude_input_from_output")
        check_flags(self, "return_encoder_output", "return_perf_metrics")
        for place, output in enumerate(self.additional_model_outputs or ()):
            if not isinstance(output, AdditionalModelOutput) or not isinstance(output.name, str):
                wrong(f"additional_model_outputs[{place}]", "an AdditionalModelOutput", output)

    @property
    def wanted(self) -> tuple[str, ...]:
        """The model outputs that the engine is to give, each once."""
        logits = ["logits"] if self.return_context_logits or self.return_generation_logits else []
        return tuple(dict.fromkeys([*logits, *(output.name for output in self.additional_model_outputs or ())]))

    @property
    def wants_context(self) -> bool:
        return self.return_context_logits or any(output.gather_context for output in self.additional_model_outputs or ())
