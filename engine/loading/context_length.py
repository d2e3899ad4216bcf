"""How many tokens a model can attend to."""

from transformers import PretrainedConfig

from penstock.engine.errors import ConfigurationError

# These change their frequencies with the longest sequence in the batch, which would let one request change another's answer.
# Up to the length that the model was first trained for they do not.
BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def max_model_len(config: PretrainedConfig, asked: int | None = None) -> int:
    """The context length in tokens, prompt and answer together: the model's own limit, or `asked` where that is less.

    Raises `ConfigurationError` where `asked` is beyond what the model can do, or where nothing says what that is.
    """
    if asked is not None and asked < 1:
        raise ConfigurationError(f"--max-model-len must be at least 1, got {asked}")
    limit = _limit(config)
    if limit is None and asked is None:
        raise ConfigurationError(f"the config of this {config.model_type} model gives no context length: pass --max-model-len")
    if limit is None or asked is None:
        return limit or asked or 0
    if asked > limit:
        raise ConfigurationError(f"--max-model-len {asked} is more than this model's {limit} tokens")
    return asked


def _limit(config: PretrainedConfig) -> int | None:
    positions = getattr(config, "max_position_embeddings", None)
    if not positions:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    match rope.get("rope_type"):  # absent where each type of layer has parameters of its own
        case kind if kind in BATCH_DEPENDENT_ROPE:
            return int(original or positions)
        case "yarn":
            # Some configs write the length before scaling into max_position_embeddings, some the length after.
            return max(int(positions), int((original or positions) * rope.get("factor", 1.0)))
        case "linear":
            return int(positions * rope.get("factor", 1.0))
        case _:
            return int(positions)
