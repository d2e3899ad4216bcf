"""What an executor's request may hold by its original's definition, and nothing here can honour."""

from math import isfinite
from typing import Any

from penstock.engine.errors import InvalidRequest
from penstock.llm.executor_api.request import Request, RequestType

OF_REQUESTS = {
    "position_ids": "positions are counted from the first token",
    "external_draft_tokens_config": "the engine drafts for itself, from what was said before",
    "prompt_tuning_config": "prompts are token ids alone",
    "multimodal_input": "only text can be read",
    "multimodal_embedding": "only text can be read",
    "mrope_config": "positions are the model's own",
    "lora_config": "adapters cannot be loaded",
    "lookahead_config": "the engine drafts for itself: see `speculation` of the Executor",
    "eagle_config": "there are no draft models",
    "encoder_input_token_ids": "there are no encoders",
    "encoder_input_features": "there are no encoders",
    "encoder_output_length": "there are no encoders",
    "cross_attention_mask": "there are no encoders",
    "skip_cross_attn_blocks": "there are no encoders",
    "context_phase_params": "prompts and answers are computed in one place",
    "language_adapter_uid": "adapters cannot be loaded",
}
OF_SAMPLING = {
    "top_p_min": "`top_p` does not decay",
    "top_p_reset_ids": "`top_p` does not decay",
    "top_p_decay": "`top_p` does not decay",
    "beam_search_diversity_rate": "beams are scored by what the model says alone",
    "beam_width_array": "the beam width stays the same from step to step",
}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p_decay": (1,),
    "beam_search_diversity_rate": (0,),
    "top_k": (0, 1),
    "top_p": (0, 1),
    "min_p": (0,),
}


def check_supported(request: Request) -> None:
    """Raises `InvalidRequest` that names the first field which cannot be honoured. A value that asks for nothing is as good as none.

    Raises `TypeError` for one of the wrong type: configs may have been changed since they were made.
    """
    request.output_config.check()
    request.sampling_config.check()
    if request.type is not RequestType.CONTEXT_AND_GENERATION:
        raise InvalidRequest("`type` is not supported: prompts and answers are computed in one place", "type")
    if request.output_config.return_encoder_output:
        raise InvalidRequest("`return_encoder_output` is not supported: there are no encoders", "output_config.return_encoder_output")
    _refuse(request, OF_REQUESTS, "")
    config = request.sampling_config
    _refuse(config, OF_SAMPLING, "sampling_config.")
    if config.beam_width > 1:
        _refuse(config, dict.fromkeys(("top_k", "top_p", "min_p"), "beams are not drawn"), "sampling_config.")
    if config.beam_width < 1:
        raise InvalidRequest(f"`beam_width` must be at least 1, got {config.beam_width}", "sampling_config.beam_width")
    if not 0 <= request.priority <= 1:
        raise InvalidRequest(f"`priority` must be from 0 to 1, got {request.priority}", "priority")
    if request.end_id is not None and request.end_id < -1:
        raise InvalidRequest(f"`end_id` must be a token id, or -1 for none, got {request.end_id}", "end_id")
    seconds = request.allotted_seconds
    if seconds is not None and not (isfinite(seconds) and seconds >= 0):
        raise InvalidRequest(f"`allotted_time` must be 0 or more seconds, got {seconds}", "allotted_time")


def _refuse(holder: object, reasons: dict[str, str], path: str) -> None:
    for name, reason in reasons.items():
        value = getattr(holder, name)
        is_neutral = value is None or value is False or (isinstance(value, int | float) and value in NEUTRAL.get(name, ()))
        if not is_neutral:
            raise InvalidRequest(f"`{name}` is not supported: {reason}", f"{path}{name}")
