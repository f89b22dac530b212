"""Write a model in bf16 as a Hugging Face directory, for engines that read no GGUF file.

python -m benchmarks.peers.dequantise qwen2.5-coder-1.5b FOLDER
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paceline.bench.peer_transformers import TransformersRunner, load_peers
from paceline.build import Options
from paceline.errors import PacelineError


def dequantise(model: str, folder: Path) -> None:
    """What transformers makes of `model`, so that both engines in bf16 run the same weights."""
    runner = load_peers(["transformers"], Options(model), 1, [])["transformers"]
    assert isinstance(runner, TransformersRunner)
    runner.model.generation_config.pad_token_id = None
    runner.model.save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.dequantise", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="preset, GGUF file or directory")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    try:
        dequantise(options.model, options.folder)
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
