"""What a client may ask of beam search."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How beams are kept, scored and ended. Names are vLLM's, meanings `transformers`'."""

    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    temperature: float = 1.0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
