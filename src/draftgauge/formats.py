"""What is read and written, as one table: by kind of thing, whose format, and with what it was checked.

What other modules list themselves (features, exports, engines, refused families) is taken from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from draftgauge.engines.kinds import KINDS
from draftgauge.exporting import FORMATS
from draftgauge.featurefiles import FORMS
from draftgauge.keys import FAMILIES

#: The drafters that `export` writes back.
_DRAFTERS = {
    "z-lab: config.json and model.safetensors, or shards with an index": ("zlab", "dflash 0.1.0"),
    "speculators directory": ("speculators", "speculators 0.9.0"),
    "SpecForge step directory or export": (None, "specforge 0.2.0"),
    "DeepSpec step directory": (None, "its own code, commit afdfa7c: it has no package"),
    "transformers' own DFlash (muse_glimmer_assistant)": (None, "transformers 5.19.0"),
    "SGLang's draft directory": ("sglang", "its format alone: SGLang needs a GPU to install"),
    ".pt, .pth, .bin of a trainer, weights at any nesting": (None, "torch.save"),
    "torch distributed checkpoint (.metadata, *.distcp)": (
        None,
        "torch.distributed.checkpoint, two processes",
    ),
    "bare .safetensors": (None, "safetensors"),
    "hf://, https://, s3:// and other addresses of any of these": (
        None,
        "a web server and a store of the tests",
    ),
}
_FEATURES = {
    "specforge": "files in the shape of its published code",
    "vllm": "files in the shape of its published code",
    "deepspec": "files in the shape of its published code",
    "modelopt": "files in the shape of its published code",
    "loose": "torch.save, safetensors",
}
_PROMPTS = (
    '{"prompt": ...}',
    '{"turns": [...]}, every turn measured',
    '{"messages": [{"role", "content"}]}, every turn measured',
    '{"conversations": [{"from", "value"}]}, every turn measured',
    '{"prompt_ids": [...], "completion_ids": [...]}',
    '{"input_ids": [...], "loss_mask": [...]}',
)
_ENGINES = {
    "sglang": "SGLang's own protocol: references, states, acceptance",
    "openai": "OpenAI-compatible servers: references; vLLM's also states and acceptance",
}
_COUNTS = (
    "vLLM log lines SpecDecoding metrics: ...",
    "vllm bench serve --save-result, JSON",
    "vLLM answers with metrics.speculative_decoding",
    "SGLang answers with meta_info and histogram",
    "DDTree results, JSON",
    "Spec-Bench answers, JSON lines",
)
_CHECKPOINT = "every command with a CHECKPOINT"
_NEVER_REAL = "a stand-in server of the tests, never a real one"


@dataclass(frozen=True)
class Row:
    """One format: the kind of thing that it holds, which command reads and which writes it, what it was held against.

    `read` or `written` is empty where draftgauge does not; `read` is `refused by name` for a family that is known
    and not measured.
    """

    kind: str
    format: str
    read: str
    written: str
    checked: str


def formats() -> list[Row]:
    """Every format, drafters first."""
    return [*_drafters(), *_features(), *_others()]


def _drafters() -> Iterator[Row]:
    for named, (export, checked) in _DRAFTERS.items():
        written = "" if export is None else f"export --to {FORMATS[export].name}"
        yield Row("drafter", named, _CHECKPOINT, written, checked)
    for family in FAMILIES:
        yield Row("drafter", family.name, "refused by name", "", "its tensors' names")


def _features() -> Iterator[Row]:
    for form in FORMS.values():
        yield Row("features", form.description, "recordings import, pick", "", _FEATURES[form.name])
    yield Row(
        "features", "a recording of ours", "every command with a RECORDING", "record", "the target itself"
    )


def _others() -> Iterator[Row]:
    for form in _PROMPTS:
        written = "references" if "completion_ids" in form else ""
        yield Row("prompts", form, "record, references, recordings import, fill", written, "JSON lines")
    for kind in KINDS:
        yield Row("engine", _ENGINES[kind], "references, crosscheck --engine", "", _NEVER_REAL)
    for form in _COUNTS:
        yield Row("counts", form, "crosscheck --log", "", "files in the shape of the published code")
    yield Row(
        "results", "an earlier result: JSON of numbers by name or prompt", "eval, show --beside", "", "JSON"
    )
    yield Row("results", "a run: run.json, summary.json, blocks.parquet", "show, compare", "eval", "pyarrow")
