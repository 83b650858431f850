"""The files that make a target what it is, and their identity by content.

Weights and configs decide which function is computed and where it stops, the tokenizer's files which tokens a
prompt becomes. Knows nothing of models, recordings or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from draftgauge.errors import TargetError
from draftgauge.progress import Progress, silent
from draftgauge.store import sha256_file, sha256_json

#: What decides, beside the weights, which function the target computes and where it stops.
CONFIG_FILES = ("config.json", "generation_config.json", "adapter_config.json")
#: Files of which a tokenizer needs at least one; without them transformers makes an empty one up.
VOCABULARY_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"),
    *("spiece.model", "sentencepiece.bpe.model"),
)
TOKENIZER_FILES = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", *VOCABULARY_FILES),
)


def weight_files(folder: Path) -> list[Path]:
    """The files of a target's weights, by name.

    Raises:
        TargetError: There are none.
    """
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    if not files:
        raise TargetError(
            f"target {folder} holds no weights (*.safetensors or *.bin); give a Hugging Face directory"
        )
    return files


def config_files(folder: Path) -> list[Path]:
    """The configs that are there."""
    return [folder / name for name in CONFIG_FILES if (folder / name).is_file()]


def tokenizer_files(folder: Path) -> list[Path]:
    """The tokenizer's files that are there."""
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]


def function_digests(folder: Path, *, progress: Progress = silent) -> dict[str, str]:
    """The SHA-256 of every file that decides which function the target computes; reads all weights.

    Raises:
        TargetError: There are no weights.

    Example:
        `{"model.safetensors": "a1b2...", "config.json": "c3d4..."}`.
    """
    files = [*weight_files(folder), *config_files(folder)]
    shown = progress(files, label="hash target", total=len(files), unit="file")
    return {path.name: sha256_file(path) for path in shown}


def tokenizer_digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file of the tokenizer."""
    return {path.name: sha256_file(path) for path in tokenizer_files(folder)}


def joint_digest(digests: Mapping[str, str]) -> str:
    """One digest for several files' names and digests, in the mapping's order."""
    return sha256_json([list(pair) for pair in digests.items()])
