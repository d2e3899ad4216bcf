"""What of the KV cache leaves the process, as configured: blocks that persist in a directory, and those that are handed over."""

import logging
from pathlib import Path

from penstock.engine.config import KV_CACHE_DIR_SIZE, KV_TRANSFER_DIR_SIZE, EngineConfig
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.block_files import BlockFiles, BlockFormat
from penstock.engine.kv_cache.blocks import KVCacheManager
from penstock.engine.kv_cache.cache import KVCache
from penstock.engine.kv_cache.exchange import SCHEME
from penstock.engine.kv_cache.persistence import Persistence, Submit
from penstock.engine.kv_cache.transfer import BlockTransfer, check_transfer_directory, transfer_directory
from penstock.engine.system.cache import make_data_directory

logger = logging.getLogger(__name__)


def check_kv_cache_dir(config: EngineConfig) -> None:
    """Makes the directory of persistent blocks or checks it. Raises `ConfigurationError`."""
    if config.kv_cache_dir is None:
        if config.kv_cache_dir_size is not None:
            raise ConfigurationError("--kv-cache-dir-size: there is no --kv-cache-dir")
        return
    if not config.enable_prefix_caching:
        raise ConfigurationError("--kv-cache-dir holds blocks of the prefix cache, and --no-prefix-caching switches that off")
    make_data_directory(Path(config.kv_cache_dir).expanduser(), "--kv-cache-dir")


def check_kv_transfer_dir(config: EngineConfig) -> None:
    """Makes the directory of exported blocks or checks it. Raises `ConfigurationError`."""
    if config.kv_transfer_dir is None:
        if config.kv_transfer_dir_size is not None:
            raise ConfigurationError("--kv-transfer-dir-size: there is no --kv-transfer-dir")
        return
    if not config.enable_prefix_caching:
        raise ConfigurationError("--kv-transfer-dir receives blocks into the prefix cache, and --no-prefix-caching switches that off")
    check_transfer_directory(config.kv_transfer_dir)


def persistence_of(
    config: EngineConfig, cache: KVCache, blocks: KVCacheManager, submit: Submit, block_format: BlockFormat | None
) -> Persistence | None:
    """What keeps the KV cache in the directory that the configuration names, and hands prompts over in another; None for neither.

    Raises `ConfigurationError`.
    """
    if block_format is None:
        return None
    files = transfer = None
    if config.kv_cache_dir is not None:
        check_kv_cache_dir(config)
        max_bytes = KV_CACHE_DIR_SIZE if config.kv_cache_dir_size is None else config.kv_cache_dir_size
        files = BlockFiles(Path(config.kv_cache_dir).expanduser(), block_format, max_bytes)
        logger.info("Blocks of the KV cache are kept in %s, at most %.1f GiB", files.root, max_bytes / 2**30)
    if config.kv_transfer_dir is not None:
        check_kv_transfer_dir(config)
        max_bytes = KV_TRANSFER_DIR_SIZE if config.kv_transfer_dir_size is None else config.kv_transfer_dir_size
        address = config.kv_transfer_dir if config.kv_transfer_dir.startswith(SCHEME) else None
        transfer = BlockTransfer(transfer_directory(config.kv_transfer_dir), block_format, blocks, max_bytes, address)
        logger.info(
            "Prompts are handed over %s %s, at most %.1f GiB", "at" if address else "in", address or transfer.directory, max_bytes / 2**30
        )
    return Persistence(files, cache, blocks, submit, transfer)
