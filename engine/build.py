"""From what the operator asked for to a running engine's parts."""

from pathlib import Path

from penstock.engine import attention
from penstock.engine.block_pool import BlockPool
from penstock.engine.config import EngineConfig
from penstock.engine.engine_core import EngineCore
from penstock.engine.kv_cache import KVCache, block_bytes
from penstock.engine.memory import num_cache_blocks
from penstock.engine.model_loader import LoadedModel, load_model
from penstock.engine.model_runner import ModelRunner
from penstock.engine.packed_linear import pack_linears
from penstock.engine.scheduler import Scheduler
from penstock.engine.tokenizer import Tokenizer


def load(directory: Path, config: EngineConfig) -> LoadedModel:
    """Loads the model with paged attention. Raises `ConfigurationError` for what cannot be served."""
    attention.register()
    loaded = load_model(directory, config.dtype, config.device, max_len=config.max_model_len, trust_remote_code=config.trust_remote_code)
    if loaded.device.type == "cpu":
        pack_linears(loaded.model)
    return loaded


def build_core(loaded: LoadedModel, tokenizer: Tokenizer, config: EngineConfig) -> EngineCore:
    """Everything around a loaded model. Raises `ConfigurationError` where the KV cache does not fit."""
    device_type = loaded.device.type
    num_blocks = num_cache_blocks(
        config.kv_cache_memory,
        block_bytes=block_bytes(loaded.kv_layout, config.block_size, loaded.dtype),
        blocks_per_sequence=-(-loaded.max_model_len // config.block_size),
        device=loaded.device,
    )
    cache = KVCache(loaded.kv_layout, num_blocks, config.block_size, loaded.dtype, loaded.device)
    cache.attach(loaded.model)
    vocab_size = min(loaded.vocab_size, tokenizer.vocab_size)
    return EngineCore(
        runner=ModelRunner(loaded, cache, vocab_size=vocab_size, num_threads=config.num_threads),
        scheduler=Scheduler(
            BlockPool(num_blocks, enable_prefix_caching=config.enable_prefix_caching),
            block_size=config.block_size,
            max_num_seqs=config.num_seqs(device_type),
            max_num_batched_tokens=config.num_batched_tokens,
            max_waiting=config.max_waiting_requests,
        ),
        tokenizer=tokenizer,
        stop_token_ids=loaded.eos_token_ids | frozenset(tokenizer.eos_token_ids),
        max_model_len=loaded.max_model_len,
        vocab_size=vocab_size,
    )
