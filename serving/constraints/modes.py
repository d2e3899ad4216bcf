"""What precedes a constrained answer: nothing (`direct`), thoughts (`think`) or a free answer (`draft`), as docs/grammars.md says."""

from dataclasses import dataclass

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.contracts.parsing import Phase, ReasoningParser
from penstock.engine.errors import InvalidRequest
from penstock.engine.text.answer import PreambleParams
from penstock.engine.text.tokenizer import Tokenizer
from penstock.serving.requests import ConstraintFields, StructuredOutputs

THINK_OPENING = "Let's think step by step.\n"  # Kojima et al., arXiv:2205.11916
DEFAULT_CUE = "\n\nFinal answer:\n"
JSON_CUE = "\n\nAs JSON:\n"
DEFAULT_BUDGET = 1024  # tokens
OF_PREAMBLES = ("preamble_tokens", "include_preamble", "opening", "cue")
CONTRADICTING = ("use_beam_search", "continue_final_message", "echo")


@dataclass(frozen=True, slots=True)
class AnswerMode:
    """What the prompt ends with, and whether free text precedes the answer, with the cue that ends it.

    `channel_budget` is that of the model's own reasoning where this is what precedes the answer.
    """

    opening: str = ""
    has_preamble: bool = False
    cue: str | None = None
    budget: int | None = None
    channel_budget: int | None = None
    is_draft: bool = False
    shows_preamble: bool = False

    def preamble(self, tokenizer: Tokenizer, spec: GrammarSpec, max_tokens: int, *, may_call: bool = False) -> PreambleParams | None:
        """The free text has `DEFAULT_BUDGET` tokens unless the request says otherwise, but no more than are left for the answer.

        The cue is the request's own, or says what kind of constraint follows. Where the answer `may_call`, a call in a draft is the answer,
        and what follows thoughts may be either.
        """
        if not self.has_preamble:
            return None
        is_json = spec.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT) and (self.is_draft or not may_call)
        cue = (JSON_CUE if is_json else DEFAULT_CUE) if self.cue is None else self.cue
        cue_token_ids = tuple(tokenizer.encode(cue, add_special_tokens=False))
        half = max(max_tokens - len(cue_token_ids), 0) // 2
        schema = spec.text if spec.kind is GrammarKind.JSON_SCHEMA else None
        budget = min(DEFAULT_BUDGET, half) if self.budget is None else self.budget
        return PreambleParams(budget, cue_token_ids, schema, reads_calls=may_call and self.is_draft)


DIRECT = AnswerMode()


def answer_mode(body: ConstraintFields, reasoning: ReasoningParser | None = None) -> AnswerMode:
    """As the request says; `reasoning` is the parser of its answer, if it has one. Raises `InvalidRequest` for what has no meaning."""
    outputs = body.structured_outputs or StructuredOutputs()
    if outputs.mode is None or outputs.mode == "direct":
        for name in OF_PREAMBLES:
            if getattr(outputs, name) is not None:
                path = f"structured_outputs.{name}"
                raise InvalidRequest(f"`{path}` is for the modes `think` and `draft` of `structured_outputs`", path)
        return DIRECT
    if outputs.sampling == "exact":
        message = f'`structured_outputs.sampling` "exact" cannot be combined with the mode `{outputs.mode}`: it draws whole answers'
        raise InvalidRequest(message, "structured_outputs.sampling")
    for name in CONTRADICTING:
        if getattr(body, name, None):
            raise InvalidRequest(f"`{name}` cannot be combined with the mode `{outputs.mode}` of `structured_outputs`", name)
    if outputs.mode == "think" and reasoning is not None and reasoning.phase is not Phase.CONTENT:
        for name in ("opening", "cue"):
            if getattr(outputs, name) is not None:
                path = f"structured_outputs.{name}"
                raise InvalidRequest(f"`{path}` has no meaning here: the model has reasoning of its own, with its own markers", path)
        marker = reasoning.start_marker if reasoning.phase is Phase.UNDECIDED else ""
        return AnswerMode(opening=marker, channel_budget=outputs.preamble_tokens)
    default = THINK_OPENING if outputs.mode == "think" else ""
    opening = default if outputs.opening is None else outputs.opening
    return AnswerMode(
        opening,
        has_preamble=True,
        cue=outputs.cue,
        budget=outputs.preamble_tokens,
        is_draft=outputs.mode == "draft",
        shows_preamble=bool(outputs.include_preamble),
    )


def measures_pressure(body: ConstraintFields) -> bool:
    """Whether the answer is to come with its constraint's pressure. Raises `InvalidRequest` where that cannot be measured."""
    if body.structured_outputs is None or not body.structured_outputs.pressure:
        return False
    if getattr(body, "use_beam_search", None):
        raise InvalidRequest("`structured_outputs.pressure` is that of sampled tokens, and beam search samples none", "use_beam_search")
    if body.structured_outputs.sampling == "exact":
        message = '`structured_outputs.pressure` cannot be combined with `sampling` "exact", where no mask forces the model'
        raise InvalidRequest(message, "structured_outputs.pressure")
    return True


def ends_within(body: ConstraintFields) -> bool:
    """Whether the answer is to end within its `max_tokens`."""
    return body.structured_outputs is not None and bool(body.structured_outputs.within_max_tokens)


def asks_only_how(outputs: StructuredOutputs) -> bool:
    """Whether the field says how an answer is to be made whose constraint may be elsewhere in the request."""
    hows = (outputs.mode, outputs.pressure, outputs.sampling, outputs.within_max_tokens)
    return any(how is not None for how in hows)


def require_constraint(body: ConstraintFields, spec: GrammarSpec | None) -> None:
    """Raises `InvalidRequest` where anything is asked of a constrained answer and nothing in the request constrains the answer."""
    if body.structured_outputs is not None and asks_only_how(body.structured_outputs) and spec is None:
        message = "`structured_outputs` takes one of json, regex, choice, grammar, json_object and structural_tag, and got none"
        raise InvalidRequest(f"{message}; nor does another field constrain the answer", "structured_outputs")
