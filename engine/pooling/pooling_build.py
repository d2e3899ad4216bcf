"""From what the operator asked for to an engine over a model that turns text into numbers."""

from pathlib import Path

import torch

from penstock.engine.build import NUM_THREADS
from penstock.engine.config import EngineConfig
from penstock.engine.layers.linear import pack_linears
from penstock.engine.loading.memory import settle_memory
from penstock.engine.pooling.pooling_engine import PoolingEngine
from penstock.engine.pooling.pooling_loader import load_pooling_model
from penstock.engine.pooling.pooling_queue import PoolingQueue
from penstock.engine.text.tokenizer import Tokenizer

MAX_NUM_BATCHED_TOKENS_CPU = 1024  # larger matrices are no faster, and a batch is what a short text waits behind
MAX_NUM_BATCHED_TOKENS_CUDA = 16384


def build_pooling_engine(directory: Path, tokenizer: Tokenizer, config: EngineConfig) -> PoolingEngine:
    """Loads the model and puts an engine around it. Raises `ConfigurationError` for what cannot be served."""
    torch.set_num_threads(1)  # as for models that generate: only the model's own thread has more
    model = load_pooling_model(directory, config)
    if model.device.type == "cpu":
        pack_linears(model.encoder)
        for module in model.modules:
            settle_memory(module)
    default = MAX_NUM_BATCHED_TOKENS_CUDA if model.device.type == "cuda" else MAX_NUM_BATCHED_TOKENS_CPU
    queue = PoolingQueue(config.max_num_batched_tokens or default, config.max_waiting_requests)
    return PoolingEngine(model, tokenizer, queue, num_threads=config.num_threads or NUM_THREADS)
