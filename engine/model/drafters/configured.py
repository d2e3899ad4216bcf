"""The drafter that the configuration names: checked before any weights are read, and built over blocks with the model's numbers."""

import logging
from pathlib import Path

from penstock.engine.config import DRAFT, MTP, EngineConfig
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.tensors import KVCache, block_bytes
from penstock.engine.model.config import read_config
from penstock.engine.model.drafters.drafter import Drafter, DraftModel
from penstock.engine.model.drafters.eagle import architecture_of_head, read_head_config
from penstock.engine.model.drafters.heads import DraftHead, HeadDrafter
from penstock.engine.model.drafters.mtp import check_mtp
from penstock.engine.model.loader import LoadedModel, resolve_device
from penstock.engine.model.native import NativeDecoder, install_native_decoder
from penstock.engine.model.outputs import StepStates
from penstock.engine.model.store import resolve_model
from penstock.engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Draft = LoadedModel | DraftHead  # what makes drafts behind each step


def check_draft(config: EngineConfig, tokenizer: Tokenizer, directory: Path) -> Path | None:
    """Where the files of the draft model, or head, are that the configuration names; None without one.

    `directory` is the model's. Raises `ConfigurationError` where the draft model cannot be used, before any weights are read.
    """
    if (config.speculation == DRAFT) != (config.draft_model is not None):
        raise ConfigurationError("--speculation draft and --draft-model go together: give both, or neither")
    if config.speculation not in (DRAFT, MTP):
        return None
    option = f"--speculation {MTP}" if config.draft_model is None else "--draft-model"
    if resolve_device(config.device).type != "cpu":
        raise ConfigurationError(f"{option}: draft models run on the CPU only, and the model runs on {resolve_device(config.device)}")
    if config.is_async("cpu"):
        raise ConfigurationError(f"{option}: no step is scheduled ahead of its drafts; leave out --async-scheduling")
    if config.draft_model is None:
        check_mtp(read_config(directory, config.trust_remote_code))
        return directory
    draft = resolve_model(config.draft_model, config.trust_remote_code)
    architecture = architecture_of_head(draft)
    if architecture is not None:
        read_head_config(draft, architecture, read_config(directory, config.trust_remote_code))
        if not (draft / "tokenizer.json").is_file():
            return draft  # which most heads come without
    difference = tokenizer.difference(Tokenizer.load(draft, config.trust_remote_code))
    if difference is not None:
        raise ConfigurationError(f"--draft-model {config.draft_model}: its vocabulary is not the model's: {difference}")
    return draft


def drafts_read_whole_text(config: EngineConfig) -> bool:
    """Whether a group of the model's layers has to keep every block, for what makes drafts reads as much."""
    return config.speculation in (DRAFT, MTP)


def draft_block_bytes(draft: Draft, loaded: LoadedModel, config: EngineConfig) -> int:
    if isinstance(draft, DraftHead):
        return block_bytes(draft.cache_layout(), config.block_size, loaded.dtype)
    return block_bytes(draft.kv_layout, config.block_size, draft.dtype)


def drafter_over(draft: Draft, loaded: LoadedModel, cache: KVCache, config: EngineConfig, vocab_size: int) -> Drafter:
    """The draft model, or head, over blocks with the numbers of those of the model's first group, which keeps the whole text.

    Raises `ConfigurationError` for a draft model that knows fewer tokens than the model.
    """
    assert cache.groups[0].sliding_window is None, "see `drafts_read_whole_text`"
    layout, dtype = (draft.cache_layout(), loaded.dtype) if isinstance(draft, DraftHead) else (draft.kv_layout, draft.dtype)
    own = KVCache(layout, cache.num_blocks, cache.block_size, dtype, loaded.device, max_num_seqs=1, max_blocks=1)
    if isinstance(draft, DraftHead):
        own.attach(draft.module)
        states = StepStates(tuple(sorted(set(draft.layers))), draft.reads_last)
        states.attach(loaded.model, loaded.config.get_text_config(decoder=True).num_hidden_layers)
        if not isinstance(vars(loaded.model).get("forward"), NativeDecoder):
            logger.info("The draft head reads hidden states of the model's layers, which run one by one.")
        return HeadDrafter(own, cache.block_tables_PN, draft, states, vocab_size)
    if draft.vocab_size < vocab_size:
        raise ConfigurationError(f"--draft-model: it knows {draft.vocab_size} tokens, and the model {vocab_size}")
    own.attach(draft.model)
    if config.compile != "on":
        install_native_decoder(draft, own)
    return DraftModel(own, cache.block_tables_PN, draft, vocab_size)


def draft_cost(draft: Draft, loaded: LoadedModel) -> float:
    """That of a pass, over that of the model's: as their weights, which are what a step of few tokens reads."""
    return (draft.num_weights if isinstance(draft, DraftHead) else num_weights(draft)) / num_weights(loaded)


def num_weights(loaded: LoadedModel) -> int:
    """Of the layers and the head, as the config says: packed layers do not show theirs."""
    config = loaded.config.get_text_config(decoder=True)
    width = int(config.hidden_size)
    inner = int(getattr(config, "intermediate_size", None) or 4 * width)
    return int(config.num_hidden_layers) * (3 * width * inner + 3 * width * width) + width * loaded.vocab_size
