"""A model directory through transformers, refused where its weights cannot be read or some are missing."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from penstock.engine.errors import ConfigurationError

# Raised by transformers for invalid model files.
UNREADABLE = (
    *(OSError, ValueError, TypeError, ImportError, RuntimeError, LookupError, AttributeError, ArithmeticError),
    *(SafetensorError, StrictDataclassError),
)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_pretrained(
    factory: Any,
    directory: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    *,
    trust_remote_code: bool,
    is_needed: Callable[[str], bool] = lambda name: True,
    **options: Any,
) -> PreTrainedModel:
    """What one of transformers' `AutoModel` classes makes of the directory; `is_needed` says of a weight's name whether it must be there.

    Raises `ConfigurationError`.
    """
    try:
        with _progress_for_terminals():
            model, report = factory.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **options,
            )
    except (
        OSError,
        ValueError,
        TypeError,
        ImportError,
        RuntimeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        SafetensorError,
    ) as error:
        raise ConfigurationError(f"{directory} cannot be loaded: {error}") from error
    # transformers fills what is missing with random numbers and goes on.
    if missing := sorted(filter(is_needed, report["missing_keys"])):
        raise ConfigurationError(f"{directory} lacks {len(missing)} of the model's weights: {', '.join(missing[:3])}, ...")
    loaded: PreTrainedModel = model
    return loaded


@contextmanager
def _progress_for_terminals() -> Iterator[None]:
    """No progress bars in logs: transformers draws them wherever stderr goes."""
    if sys.stderr.isatty() or not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
