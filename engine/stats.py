"""What the engine counts. Reading it costs nothing and stops nobody."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The first three are of this moment, the others have counted since the start. Tokens are tokens, `kv_cache_usage` is from 0 to 1."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_prefix_cache_queries: int
    num_prefix_cache_hits: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_forced_tokens: int
    num_preemptions: int
    num_steps: int
