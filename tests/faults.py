"""Plants every kind of silent fault that can be planted, and asks what draftgauge says about each.

    python -m tests.faults             run all, print the table, write docs/faults.json and docs/faults.md
    python -m tests.faults --tiny      only those in the tiny pair

A fault is planted in a copy of a pair that is known to be right: the tiny planted pair (`tests.planted`), in which
every field of the wiring matters, or the demo's drafter on its real target. What catches it is one of: a refusal with
a message, a control of `check`, a caveat of `eval`, the search of `diagnose`, a refusal of `compare`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftgauge.check import check_checkpoint
from draftgauge.compare import compare_runs
from draftgauge.configs import OWN_KEY
from draftgauge.diagnose import diagnose_checkpoint
from draftgauge.drafters import as_torch
from draftgauge.errors import DraftgaugeError
from draftgauge.evaluate import Options, evaluate_checkpoint
from draftgauge.inspection import inspect_checkpoint
from draftgauge.kept import checkpoint_caveat
from draftgauge.recording import MANIFEST
from draftgauge.stated import Stated
from draftgauge.store import sha256_file
from draftgauge.tensorfile import StoredTensor, read_safetensors, write_safetensors
from draftgauge.wiring import LayerAttention
from tests import planted

ROOT = Path(__file__).parents[1]
PAGE, DATA = ROOT / "docs" / "faults.md", ROOT / "docs" / "faults.json"


@dataclass
class Site:
    """A copy of a pair, to be spoiled: folders, and what the user states."""

    folder: Path
    checkpoint: Path
    recording: Path
    stated: dict[str, Any]

    def state(self, **fields: Any) -> None:
        """The user, or a config, says something wrong about the wiring."""
        self.stated |= fields

    def config(self, **fields: Any) -> None:
        """The checkpoint's own config says something else."""
        path = self.checkpoint / "config.json"
        value = json.loads(path.read_text())
        value[OWN_KEY] |= {name: _json(value) for name, value in fields.items()}
        path.write_text(json.dumps(value))

    @contextmanager
    def weights(self) -> Iterator[dict[str, np.ndarray]]:
        """The checkpoint's tensors, written back when the block ends."""
        path = self.checkpoint / "model.safetensors"
        tensors = {name: _array(stored) for name, stored in read_safetensors(path)[0].items()}
        yield tensors
        path.unlink()
        write_safetensors(path, tensors)

    @contextmanager
    def items(self) -> Iterator[list[dict[str, np.ndarray]]]:
        """Every item's tensors, written back with their digests in the manifest, as a faulty recorder would."""
        manifest = self.recording / MANIFEST
        value = json.loads(manifest.read_text())
        stored = [read_safetensors(self.recording / item["file"]) for item in value["items"]]
        tensors = [{name: _array(t) for name, t in item.items()} for item, _ in stored]
        yield tensors
        for item, arrays, (_, metadata) in zip(value["items"], tensors, stored, strict=True):
            path = self.recording / item["file"]
            path.unlink()
            write_safetensors(path, arrays, metadata=metadata)
            item["sha256"] = sha256_file(path)
            item["length"] = len(arrays["tokens"])
        manifest.write_text(json.dumps(value))

    def manifest(self, change: Callable[[dict[str, Any]], None]) -> None:
        """The recording's manifest says something else."""
        path = self.recording / MANIFEST
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))


@dataclass(frozen=True)
class Fault:
    """One fault: its kind in the list of faults, what is planted, how, and what must say so.

    `caught` is `refused`, `control SLUG`, `caveat SLUG`, `diagnose FIELD` or `compare`; `pair` are changes of the
    tiny pair's wiring that the fault needs.
    """

    kind: str
    what: str
    plant: Callable[[Site], None]
    caught: str
    pair: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the test is called."""
        return f"{self.kind}: {self.what}"


def _array(stored: StoredTensor) -> np.ndarray:
    return as_torch(stored).numpy().copy()


def _json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_json(part) for part in value]
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value


def _layers(*layers: LayerAttention) -> list[dict[str, Any]]:
    return [{k: v for k, v in dataclasses.asdict(layer).items() if v is not None} for layer in layers]


FULL, SLIDING = planted.WIRING.attention


def _taps_columns(site: Site, order: Sequence[int]) -> None:
    """The features are recorded in another order than they are said to be."""
    with site.items() as items:
        for tensors in items:
            tensors["taps"][: len(order)] = tensors["taps"][list(order)]


def _shift(site: Site, by: int) -> None:
    with site.items() as items:
        for tensors in items:
            tensors["taps"] = np.roll(tensors["taps"], by, axis=1)


def _change_features(site: Site, change: Callable[[np.ndarray], None]) -> None:
    with site.items() as items:
        for tensors in items:
            change(tensors["taps"])


def _swap_rows(site: Site) -> None:
    """Two prompts have each other's features, as far as both reach."""
    with site.items() as items:
        one, two = items[2]["taps"], items[5]["taps"]
        end = min(one.shape[1], two.shape[1])
        one[:, :end], two[:, :end] = two[:, :end].copy(), one[:, :end].copy()


def _cut_rows(site: Site) -> None:
    """The features lack the first positions, which a prefix cache answered."""
    with site.items() as items:
        for tensors in items:
            tensors["taps"] = tensors["taps"][:, 4:]


def _normed_final(site: Site) -> None:
    norm = _array(read_safetensors(site.recording / "ends.safetensors")[0]["norm"])
    with site.items() as items:
        for tensors in items:
            x = tensors["final"]
            tensors["final"] = x / np.sqrt((x**2).mean(-1, keepdims=True) + planted.EPS) * norm


def _foreign_tokens(site: Site) -> None:
    """The references are another model's: every third completion token is something else."""
    manifest = json.loads((site.recording / MANIFEST).read_text())
    with site.items() as items:
        for tensors, item in zip(items, manifest["items"], strict=True):
            tokens = tensors["tokens"]
            places = np.arange(item["prompt_len"] + 1, len(tokens), 3)
            tokens[places] = (tokens[places] + 17) % planted.VOCABULARY


def _loops(site: Site) -> None:
    """One completion says the same five tokens over and over."""
    manifest = json.loads((site.recording / MANIFEST).read_text())
    start = manifest["items"][0]["prompt_len"]
    with site.items() as items:
        tokens = items[0]["tokens"]
        tokens[start:] = np.resize([31, 32, 33, 34, 35], len(tokens) - start)


def _own_features(site: Site) -> None:
    """The drafter is shown the feature of the anchor itself: everything stands one position too early."""
    _shift(site, -1)


def _damage(site: Site) -> None:
    path = site.recording / "00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 0xFF
    path.write_bytes(data)


def _other_ends(site: Site) -> None:
    path = site.recording / "ends.safetensors"
    ends = {name: _array(t) for name, t in read_safetensors(path)[0].items()}
    ends["head"] = ends["head"] * 1.01
    path.unlink()
    write_safetensors(path, ends)


def _leave_out(site: Site, pattern: str) -> None:
    with site.weights() as tensors:
        for name in [name for name in tensors if pattern in name]:
            del tensors[name]


def _rename(site: Site, old: str, new: str) -> None:
    with site.weights() as tensors:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)


def _set(site: Site, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    with site.weights() as tensors:
        tensors[name] = change(tensors[name])


def _idle_layer(site: Site) -> None:
    """The second layer adds nothing, as if it had never been loaded."""
    with site.weights() as tensors:
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"layers.1.{name}.weight"] *= 1e-30


def _copied_layer(site: Site) -> None:
    with site.weights() as tensors:
        for name in [name for name in tensors if name.startswith("layers.0.")]:
            tensors[name.replace("layers.0.", "layers.1.")] = tensors[name].copy()


def _untrained_row(site: Site) -> None:
    path = site.recording / "ends.safetensors"
    ends = {name: _array(t) for name, t in read_safetensors(path)[0].items()}
    ends["embedding"][planted.WIRING.mask_token_id] *= 1e-3
    path.unlink()
    write_safetensors(path, ends)
    digests = {name: t.sha256() for name, t in read_safetensors(path)[0].items()}

    def change(value: dict[str, Any]) -> None:
        for name, digest in digests.items():
            value["target"]["ends"][name]["sha256"] = digest

    site.manifest(change)


def _three_of_ten(site: Site) -> None:
    def change(value: dict[str, Any]) -> None:
        value["items"] = value["items"][:3]
        value["produced"]["prompts_asked"] = 10

    site.manifest(change)


def _add_tensor(site: Site, name: str) -> None:
    with site.weights() as tensors:
        tensors[name] = np.ones(planted.HIDDEN, np.float32)


def _truncate(site: Site) -> None:
    path = site.checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _lose_a_shard(site: Site) -> None:
    path = site.checkpoint / "model.safetensors"
    names = list(read_safetensors(path)[0])
    shards = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    path.rename(site.checkpoint / "model-00001-of-00002.safetensors")
    (site.checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def _no_map(site: Site) -> None:
    with site.weights() as tensors:
        del tensors["d2t"]


def _state(**fields: Any) -> Callable[[Site], None]:
    return lambda site: site.state(**fields)


def _config(**fields: Any) -> Callable[[Site], None]:
    return lambda site: site.config(**fields)


PRUNED = {"head": "own", "vocabulary_map": "offset"}
LAST_TAP = {"taps": (1, 3, 5)}

FAULTS: tuple[Fault, ...] = (
    Fault("tap off by one", "all taps one layer later", _state(taps=[2, 4, 5]), "diagnose taps"),
    Fault("tap off by one", "all taps one layer earlier", _state(taps=[0, 2, 3]), "diagnose taps"),
    Fault("tap off by one", "one tap one layer later", _state(taps=[1, 4, 3]), "diagnose taps"),
    Fault("tap off by one", "the first tap one layer earlier", _state(taps=[0, 3, 4]), "diagnose taps"),
    Fault("taps in another order", "two taps swapped", _state(taps=[3, 1, 4]), "diagnose taps"),
    Fault("taps in another order", "reversed", _state(taps=[4, 3, 1]), "diagnose taps"),
    Fault(
        "taps in another order",
        "recorded in another order than the manifest says",
        lambda site: _taps_columns(site, (1, 0, 2)),
        "diagnose taps",
    ),
    Fault("taps in another order", "one missing", _state(taps=[1, 3]), "refused"),
    Fault("taps in another order", "one doubled", _state(taps=[1, 1, 4]), "refused"),
    Fault(
        "last tap before or after the final norm",
        "after, where it was trained before",
        _state(tap_after_final_norm=True),
        "diagnose tap_after_final_norm",
        pair=LAST_TAP,
    ),
    Fault(
        "last tap before or after the final norm",
        "before, where it was trained after",
        _state(tap_after_final_norm=False),
        "diagnose tap_after_final_norm",
        pair={**LAST_TAP, "tap_after_final_norm": True},
    ),
    Fault(
        "last tap before or after the final norm",
        "the recorded final state is after the norm",
        _normed_final,
        "control final-state",
    ),
    Fault(
        "features that are not features",
        "all zeros",
        lambda site: _change_features(site, lambda taps: taps.fill(0)),
        "control features-vary",
    ),
    Fault(
        "features that are not features",
        "NaN",
        lambda site: _change_features(site, lambda taps: taps[:, 3:5].fill(np.nan)),
        "control features-finite",
    ),
    Fault(
        "features that are not features",
        "constant",
        lambda site: _change_features(site, lambda taps: np.copyto(taps, taps[:, :1])),
        "control features-vary",
    ),
    Fault(
        "features that are not features",
        "two taps equal",
        lambda site: _change_features(site, lambda taps: np.copyto(taps[1], taps[0])),
        "control taps-differ",
    ),
    Fault(
        "features that are not features",
        "one position too late",
        lambda site: _shift(site, 1),
        "control context-moved-earlier",
    ),
    Fault(
        "features that are not features", "rows of another request", _swap_rows, "control context-by-prompt"
    ),
    Fault("features that are not features", "cut by a cached prefix", _cut_rows, "refused"),
    Fault("stale or foreign recording", "an item edited", _damage, "refused"),
    Fault("stale or foreign recording", "the target's head changed since", _other_ends, "refused"),
    Fault(
        "stale or foreign recording",
        "of a target of another depth",
        _config(num_target_layers=12),
        "refused",
    ),
    Fault(
        "drafter does not read its context",
        "it drafts from the anchor alone",
        _state(),
        "control context-zeroed",
        pair={"blind": True},
    ),
    Fault("too good", "the anchor's own feature is shown", _own_features, "control context-moved-later"),
    Fault("RoPE base", "10000 for the target's", _state(rope_theta=10000.0), "diagnose rope_theta"),
    Fault("RoPE base", "1e6 for the target's", _state(rope_theta=1e6), "diagnose rope_theta"),
    Fault("partial rotary", "half of the dimensions", _state(rope_dims=8), "diagnose rope_dims"),
    Fault(
        "partial rotary",
        "all of the dimensions where half was trained",
        _state(rope_dims=16),
        "diagnose rope_dims",
        pair={"rope_dims": 8},
    ),
    Fault("RoPE layout", "interleaved", _state(rope_layout="interleaved"), "diagnose rope_layout"),
    Fault(
        "block mask",
        "bidirectional where it was causal",
        _state(attention=_layers(FULL, dataclasses.replace(SLIDING, block_causal=False))),
        "diagnose attention",
    ),
    Fault(
        "block mask",
        "causal where it was bidirectional",
        _state(attention=_layers(dataclasses.replace(FULL, block_causal=True), SLIDING)),
        "diagnose attention",
    ),
    Fault(
        "sliding window",
        "declared and not applied",
        _state(attention=_layers(FULL, dataclasses.replace(SLIDING, window=None))),
        "caveat wiring-overridden",
    ),
    Fault(
        "sliding window",
        "applied and not declared",
        _state(attention=_layers(dataclasses.replace(FULL, window=12), SLIDING)),
        "diagnose attention",
    ),
    Fault(
        "sliding window",
        "bound off by one",
        _state(attention=_layers(FULL, dataclasses.replace(SLIDING, window_inclusive=True))),
        "diagnose attention",
    ),
    Fault(
        "sliding window",
        "counted from the anchor",
        _state(attention=_layers(FULL, dataclasses.replace(SLIDING, window_from="anchor"))),
        "diagnose attention",
    ),
    Fault("mask token", "the id beside it", _state(mask_token_id=291), "diagnose mask_token_id"),
    Fault("mask token", "fell back to a stop token", _state(mask_token_id=2), "diagnose mask_token_id"),
    Fault("mask token", "outside the table", _state(mask_token_id=4000), "refused"),
    Fault("mask token", "a row that was never trained", _untrained_row, "control mask-token"),
    Fault(
        "mask token",
        "a token in the place of a mask embedding",
        _state(mask_embedding=False, mask_token_id=290),
        "diagnose mask_token_id",
        pair={"mask_embedding": True},
    ),
    Fault(
        "embedding, head, final norm",
        "the target's head for the drafter's own",
        _config(head="target"),
        "diagnose ends",
        pair={"head": "own"},
    ),
    Fault(
        "embedding, head, final norm",
        "the target's embedding, stated for the drafter's own",
        _state(embedding="target"),
        "diagnose ends",
        pair={"embedding": "own"},
    ),
    Fault(
        "embedding, head, final norm",
        "embedding scaled by the root of the width",
        _state(embedding_scale=planted.HIDDEN**0.5),
        "diagnose embedding_scale",
    ),
    Fault(
        "embedding, head, final norm",
        "NaN in the output norm",
        lambda site: _set(site, "norm.weight", lambda w: w * np.nan),
        "refused",
    ),
    Fault("pruned vocabulary", "d2t absent", _no_map, "refused", pair=PRUNED),
    Fault(
        "pruned vocabulary",
        "an offset read as absolute",
        _state(vocabulary_map="absolute"),
        "refused",
        pair=PRUNED,
    ),
    Fault(
        "pruned vocabulary",
        "all zero, as before it was filled",
        lambda site: _set(site, "d2t", lambda ids: ids * 0),
        "refused",
        pair=PRUNED,
    ),
    Fault("weights not loaded", "a layer missing", lambda site: _leave_out(site, "layers.1.mlp"), "refused"),
    Fault(
        "weights not loaded", "another prefix", lambda site: _rename(site, "layers.", "blocks."), "refused"
    ),
    Fault(
        "weights not loaded",
        "an extra norm, never applied",
        lambda s: _add_tensor(s, "verifier_norm.weight"),
        "caveat tensors-unused",
    ),
    Fault(
        "weights not loaded",
        "another family's tensors",
        lambda s: _add_tensor(s, "markov_head.w1.weight"),
        "refused",
    ),
    Fault("weights not loaded", "a layer that adds nothing", _idle_layer, "control tensors-used"),
    Fault("weights not loaded", "a layer that is a copy", _copied_layer, "control tensors-trained"),
    Fault(
        "weights not loaded",
        "norms at their initial value",
        lambda site: _set(site, "hidden_norm.weight", np.ones_like),
        "control tensors-trained",
    ),
    Fault(
        "dtype",
        "float16 would overflow in the tap fusion",
        lambda site: _set(site, "fc.weight", lambda w: w * 1e5),
        "control dtype",
    ),
    Fault(
        "anchor row",
        "row 0 predicts, where it re-reads",
        _state(predicts_from_anchor=True),
        "diagnose predicts_from_anchor",
    ),
    Fault(
        "anchor row",
        "row 0 re-reads, where it predicts",
        _state(predicts_from_anchor=False),
        "diagnose predicts_from_anchor",
        pair={"predicts_from_anchor": True},
    ),
    Fault(
        "block size",
        "twice the trained one is used",
        lambda site: site.state(used_block_size=12),
        "caveat block-size-differs",
    ),
    Fault("block size", "stated twice as large", _state(block_size=12), "diagnose block_size"),
    Fault("template, system prompt", "the prompts went in raw", lambda site: None, "caveat template"),
    Fault(
        "references not the target's own",
        "every third token another's",
        _foreign_tokens,
        "control final-state",
    ),
    Fault("looping text", "one completion loops", _loops, "caveat degenerate-references"),
    Fault("file damage", "cut short", _truncate, "refused"),
    Fault("file damage", "a shard missing", _lose_a_shard, "refused"),
    Fault(
        "in-place edit through a hard link",
        "the kept baseline changed",
        lambda site: None,
        "caveat checkpoint-changed",
    ),
    Fault("too few prompts", "3 of 10", _three_of_ten, "caveat few-prompts"),
    Fault("runs that measure different things", "another block size", lambda site: None, "compare"),
)


@dataclass(frozen=True)
class Finding:
    """What was said about a planted fault: by whom, in which words, and whether the cause was named first."""

    kind: str
    what: str
    planted_in: str
    expected: str
    caught_by: str | None
    message: str
    cause_first: bool | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for docs/faults.json."""
        return dataclasses.asdict(self)


def site_of(fault: Fault, folder: Path) -> Site:
    """A fresh copy of the tiny pair that the fault needs, with the fault planted in it."""
    pair = planted.shared_pair(0, **fault.pair)
    shutil.copytree(pair.checkpoint, folder / "drafter")
    shutil.copytree(pair.recording.path, folder / "recording")
    site = Site(folder, folder / "drafter", folder / "recording", {})
    fault.plant(site)
    return site


def find(fault: Fault, folder: Path) -> Finding:
    """Plants a fault in the tiny pair and asks the part of draftgauge that must catch it."""
    how, _, name = fault.caught.partition(" ")
    site = site_of(fault, folder)
    stated = dict(site.stated)
    used = stated.pop("used_block_size", None)
    caught, message, first = ASK[how](site, Stated(wiring=stated, source="--wiring", block_size=used), name)
    short = " ".join(message.replace(f"{folder}/", "").split())
    return Finding(fault.kind, fault.what, "tiny pair", fault.caught, caught, short[:220], first)


_Answer = tuple[str | None, str, bool | None]


def _ask_all(site: Site, stated: Stated, name: str) -> _Answer:
    """Whether anything that reads the pair refuses it, and in which words."""
    inspected = None
    try:
        inspected = inspect_checkpoint(site.checkpoint, stated)
        if inspected["problems"] or inspected["wiring"] is None:
            problem = (inspected["problems"] or [inspected["wiring_problem"]])[0]
            return "inspect", str(problem), None
    except DraftgaugeError as exc:
        return "inspect", str(exc), None
    try:
        evaluate_checkpoint(
            site.checkpoint, site.recording, Options(stated=stated), root=site.folder / "runs"
        )
    except DraftgaugeError as exc:
        return "eval", str(exc), None
    return None, "nothing refused it", None


def _ask_check(site: Site, stated: Stated, name: str) -> _Answer:
    value = check_checkpoint(site.checkpoint, site.recording, stated=stated)
    raised = [c for c in value["controls"] if c["verdict"] in ("failed", "caution")]
    for control in raised:
        if control["slug"] == name:
            said = f"{control['measured']}; {control['advice']}"
            return f"check: {name} ({control['verdict']})", said, raised[0]["slug"] == name
    return None, f"check raised {[c['slug'] for c in raised]}", None


def _ask_eval(site: Site, stated: Stated, name: str) -> _Answer:
    run = evaluate_checkpoint(
        site.checkpoint, site.recording, Options(stated=stated), root=site.folder / "runs"
    )
    caveats = list(run.summary["caveats"])
    if name == "checkpoint-changed":
        path = site.checkpoint / "model.safetensors"
        with path.open("r+b") as file:  # in place, as an editor of the original would
            file.seek(-4, os.SEEK_END)
            file.write(b"\0\0\0\x3f")
        found = checkpoint_caveat(run)
        caveats = [] if found is None else [found.as_dict()]
    for caveat in caveats:
        if caveat["slug"] == name:
            return f"eval: {name}", caveat["text"], None
    return None, f"eval said {[c['slug'] for c in caveats]}", None


def _ask_diagnose(site: Site, stated: Stated, name: str) -> _Answer:
    value = diagnose_checkpoint(site.checkpoint, site.recording, stated=stated)
    fields = [field for change in value["changes"] for field in change["fields"]]
    if name not in fields:
        return None, value["answer"], False
    return f"diagnose: {name}", value["answer"], fields[0] == name


def _ask_compare(site: Site, stated: Stated, name: str) -> _Answer:
    root = site.folder / "runs"
    one = evaluate_checkpoint(site.checkpoint, site.recording, Options(), root=root)
    other = Options(stated=Stated(block_size=4))
    two = evaluate_checkpoint(site.checkpoint, site.recording, other, root=root)
    try:
        compare_runs(one, two)
    except DraftgaugeError as exc:
        return "compare", str(exc), None
    return None, "the runs were compared", None


ASK: Mapping[str, Callable[[Site, Stated, str], _Answer]] = {
    "refused": _ask_all,
    "control": _ask_check,
    "caveat": _ask_eval,
    "diagnose": _ask_diagnose,
    "compare": _ask_compare,
}

#: Kinds of fault that cannot be planted, and what is done about them.
NOT_PLANTED: Mapping[str, str] = {
    "best of many on the test set": "whole curves over the budgets are reported, none is picked; a diagnosis "
    "corrects for how many wirings it tried",
    "still being written": "size and time of every file are compared before and after it is read; "
    "tests/test_checkpoint.py grows a file under the reader",
}


def demo_faults() -> tuple[Fault, ...]:
    """Faults of the demo's drafter on its real target: smaller, a few percent each, as faults in production are."""
    causal = _layers(*[LayerAttention(block_causal=True)] * 2)
    windowed = _layers(*[LayerAttention(window=64)] * 2)
    return (
        Fault("tap off by one", "all taps one layer later", _state(taps=[2, 11, 20, 28]), "diagnose taps"),
        Fault("taps in another order", "two taps swapped", _state(taps=[10, 1, 19, 27]), "diagnose taps"),
        Fault("RoPE base", "10000 for 100000", _state(rope_theta=10000.0), "diagnose rope_theta"),
        Fault("partial rotary", "half of the dimensions", _state(rope_dims=32), "diagnose rope_dims"),
        Fault("RoPE layout", "interleaved", _state(rope_layout="interleaved"), "diagnose rope_layout"),
        Fault(
            "block mask", "causal where it was bidirectional", _state(attention=causal), "diagnose attention"
        ),
        Fault("sliding window", "applied and not declared", _state(attention=windowed), "diagnose attention"),
        Fault("mask token", "token 2 for 3", _state(mask_token_id=2), "diagnose mask_token_id"),
        Fault(
            "anchor row",
            "row 0 predicts, where it re-reads",
            _state(predicts_from_anchor=True),
            "diagnose predicts_from_anchor",
        ),
        Fault(
            "tap off by one",
            "taps one layer later, and RoPE base 10000",
            _state(taps=[2, 11, 20, 28], rope_theta=10000.0),
            "diagnose taps",
        ),
        Fault(
            "stale or foreign recording",
            "a middle layer of the target changed since",
            _tuned,
            "control re-extracted",
        ),
        Fault(
            "block size",
            "half of the trained one is used",
            _state(used_block_size=4),
            "caveat block-size-differs",
        ),
        Fault("looping text", "word_count loops", _state(), "caveat degenerate-references"),
        Fault(
            "same name, different number", "conventions on one set of rounds", _state(), "caveat conventions"
        ),
    )


def _tuned(site: Site) -> None:
    """The recording is of the target before one of its middle layers was tuned."""

    def change(value: dict[str, Any]) -> None:
        value["target"]["path"] = str(tuned_target(site.folder / "tuned", Path(value["target"]["path"])))

    site.manifest(change)


def tuned_target(folder: Path, target: Path) -> Path:
    """A copy of a target in which one middle layer's weights are a tenth larger."""
    shutil.copytree(target, folder)
    file = folder / "model.safetensors"
    tensors: dict[str, Any] = {}
    for name, stored in read_safetensors(file)[0].items():
        array = as_torch(stored).float().numpy()
        tensors[name] = array * 1.1 if name.endswith("layers.8.mlp.down_proj.weight") else array
    file.unlink()
    write_safetensors(file, tensors)
    return folder


def demo_site(fault: Fault, folder: Path, *, drafter: Path, right: Path, off_by_one: Path) -> Site:
    """The demo's pair with a fault planted: the recording is copied by links, and only its manifest is changed."""
    site = Site(folder, drafter, folder / "recording", {})
    probe = Site(folder, drafter, folder / "recording", {})
    if fault.plant is not _tuned:
        fault.plant(probe)
    source = off_by_one if probe.stated.get("taps") == [2, 11, 20, 28] else right
    shutil.copytree(source, site.recording, copy_function=os.link)
    manifest = site.recording / MANIFEST
    text = manifest.read_text()
    manifest.unlink()
    manifest.write_text(text)
    fault.plant(site)
    return site


def find_in_demo(fault: Fault, folder: Path, *, drafter: Path, right: Path, off_by_one: Path) -> Finding:
    """Plants a fault in the demo's pair and asks the part of draftgauge that must catch it."""
    how, _, name = fault.caught.partition(" ")
    site = demo_site(fault, folder, drafter=drafter, right=right, off_by_one=off_by_one)
    stated = dict(site.stated)
    used = stated.pop("used_block_size", None)
    caught, message, first = ASK[how](site, Stated(wiring=stated, source="--wiring", block_size=used), name)
    short = " ".join(message.replace(f"{folder}/", "").split())
    return Finding(fault.kind, fault.what, "demo pair", fault.caught, caught, short[:220], first)


def demo_recordings(target: Path, root: Path) -> tuple[Path, Path]:
    """The target recorded at the drafter's taps, and one layer later, both with the layers around them."""
    from draftgauge.prompts import read_prompts
    from draftgauge.record import Request, record_target

    prompts = read_prompts("builtin:coding10")
    paths = []
    for taps in ((1, 10, 19, 27), (2, 11, 20, 28)):
        request = Request(taps=taps, max_new_tokens=192, taps_around=True)
        paths.append(record_target(target, prompts, request=request, root=root).path)
    return paths[0], paths[1]


def page(findings: Sequence[Mapping[str, Any]]) -> str:
    """docs/faults.md from the findings."""
    lines = [
        "# What is caught",
        "",
        "<!-- Written by `make faults` from what draftgauge said: do not edit. -->",
        "",
        "Faults that stay silent elsewhere: everything loads, nothing crashes, only the acceptance is wrong. Each",
        "was planted in a pair that is known to be right, and the part of draftgauge that must catch it was asked.",
        "The tiny pair is built so that every field of the wiring matters (`tests/planted.py`); in the demo pair, a",
        "real drafter of a real target, faults are worth a few percent, as in production.",
        "",
    ]
    caught = sum(finding["caught_by"] is not None for finding in findings)
    named = [finding["cause_first"] for finding in findings if finding["cause_first"] is not None]
    lines += [
        f"{caught} of {len(findings)} planted faults were caught; of {len(named)} whose cause can be searched for or "
        f"pointed at, {sum(named)} had the right cause named first.",
        "",
    ]
    for kind in dict.fromkeys(finding["kind"] for finding in findings):
        head = "| planted | in | caught by | cause first | it said |"
        lines += [f"## {kind}", "", head, "| --- | --- | --- | --- | --- |"]
        for f in findings:
            if f["kind"] == kind:
                first = {True: "yes", False: "no", None: "-"}[f["cause_first"]]
                said = f["message"].replace("|", "\\|")
                lines.append(
                    f"| {f['what']} | {f['planted_in']} | {f['caught_by'] or '**not caught**'} | {first} | {said} |"
                )
        lines.append("")
    lines += ["## Not planted", ""]
    lines += [f"- *{kind}*: {why}" for kind, why in NOT_PLANTED.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Runs the matrix; the exit code says whether every fault was caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="only the tiny pair; nothing is written")
    parser.add_argument("--target", type=Path, default=ROOT / ".cache" / "SmolLM2-135M-Instruct")
    parser.add_argument(
        "--recordings", type=Path, help="where recordings are kept; a temporary folder if not given"
    )
    arguments = parser.parse_args()
    findings = []
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for i, fault in enumerate(FAULTS):
            findings.append(_told(find(fault, root / f"tiny{i}")))
        if not arguments.tiny:
            right, off = demo_recordings(arguments.target, arguments.recordings or root / "recordings")
            drafter = ROOT / "demo" / "drafter" / "step_4000"
            for i, fault in enumerate(demo_faults()):
                place = right.parent / f".faults{i}"
                found = find_in_demo(fault, place, drafter=drafter, right=right, off_by_one=off)
                shutil.rmtree(place)
                findings.append(_told(found))
    values = [finding.as_dict() for finding in findings]
    if not arguments.tiny:
        DATA.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        PAGE.write_text(page(values), encoding="utf-8")
    missed = [f for f in findings if f.caught_by is None]
    print(f"{len(findings) - len(missed)} of {len(findings)} caught")
    return 1 if missed else 0


def _told(finding: Finding) -> Finding:
    first = {True: "cause first", False: "cause NOT first", None: ""}[finding.cause_first]
    print(
        f"{finding.caught_by or 'NOT CAUGHT':34} {first:16} {finding.planted_in:9} {finding.kind}: {finding.what}"
    )
    print(f"{'':34} {finding.message}", flush=True)
    return finding


if __name__ == "__main__":
    sys.exit(main())
