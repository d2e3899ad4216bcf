"""Writes a model as plain safetensors, which every other server reads: a converted GGUF file is kept as only this one does.

python benchmarks/plain_model.py DIRECTORY
python benchmarks/plain_model.py DIRECTORY --model model.gguf --dtype float16
"""

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

from penstock.engine.model.loader import load_model
from penstock.engine.model.store import resolve_model

OWN_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("directory", type=Path, help="where to; made if it is not there")
    parser.add_argument("--model", metavar="ID|DIR|GGUF", help="(default: the default model)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="(default: %(default)s)")
    given = parser.parse_args(argv)
    source = resolve_model(given.model)
    model = load_model(source, given.dtype, "cpu", quantization="none", attn_implementation="sdpa").model
    model.save_pretrained(given.directory)
    written = {path for pattern in OWN_FILES for path in source.glob(pattern)}
    for path in source.iterdir():
        if path.is_file() and path not in written:  # the tokenizer and its templates
            shutil.copy(path, given.directory / path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
