"""A LoRA adapter that teaches SmolLM2-135M-Instruct to reason before it answers."""

from pathlib import Path

DIRECTORY = Path(__file__).parent
