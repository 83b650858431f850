"""The table of faults that stay silent elsewhere, and what must catch each: the tiny pair's, and the demo pair's.

What catches one is a refusal with a message, a control of `check`, a caveat of `eval`, the search of `diagnose`, or
a refusal of `compare`. The tiny pair (`tests.planted`) is built so that every field of the wiring matters; `find`
plants a fault in a copy of it and asks what must catch it. `tests.fault_matrix` runs all and writes docs/faults.md.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftgauge.check import check_checkpoint
from draftgauge.compare import compare_runs
from draftgauge.diagnose import diagnose_checkpoint
from draftgauge.errors import DraftgaugeError
from draftgauge.evaluate import Options, evaluate_checkpoint
from draftgauge.inspection import inspect_checkpoint
from draftgauge.kept import checkpoint_caveat
from draftgauge.stated import Stated
from draftgauge.wiring import LayerAttention
from tests import planted
from tests.planting import (
    Site,
    add_tensor,
    change_features,
    copied_layer,
    cut_rows,
    damage_item,
    foreign_tokens,
    idle_layer,
    in_config,
    leave_out,
    lose_a_shard,
    make_loop,
    no_map,
    normed_final,
    other_ends,
    own_features,
    rename,
    set_tensor,
    shift_features,
    stated,
    swap_rows,
    taps_columns,
    three_of_ten,
    toml_layers,
    truncate,
    tuned,
    untrained_row,
)

FULL, SLIDING = planted.WIRING.attention


@dataclass(frozen=True)
class Fault:
    """One fault: its kind in the list of faults, what is planted, how, and what must say so.

    `caught` is `refused`, `control SLUG`, `caveat SLUG`, `diagnose FIELD` or `compare`; `pair` are changes of the
    tiny pair's wiring that the fault needs, or `OFF_BY_ONE` in the demo's.
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


PRUNED = {"head": "own", "vocabulary_map": "offset"}
LAST_TAP = {"taps": (1, 3, 5)}

FAULTS: tuple[Fault, ...] = (
    Fault("tap off by one", "all taps one layer later", stated(taps=[2, 4, 5]), "diagnose taps"),
    Fault("tap off by one", "all taps one layer earlier", stated(taps=[0, 2, 3]), "diagnose taps"),
    Fault("tap off by one", "one tap one layer later", stated(taps=[1, 4, 3]), "diagnose taps"),
    Fault("tap off by one", "the first tap one layer earlier", stated(taps=[0, 3, 4]), "diagnose taps"),
    Fault("taps in another order", "two taps swapped", stated(taps=[3, 1, 4]), "diagnose taps"),
    Fault("taps in another order", "reversed", stated(taps=[4, 3, 1]), "diagnose taps"),
    Fault(
        "taps in another order",
        "recorded in another order than the manifest says",
        lambda site: taps_columns(site, (1, 0, 2)),
        "diagnose taps",
    ),
    Fault("taps in another order", "one missing", stated(taps=[1, 3]), "refused"),
    Fault("taps in another order", "one doubled", stated(taps=[1, 1, 4]), "refused"),
    Fault(
        "last tap before or after the final norm",
        "after, where it was trained before",
        stated(tap_after_final_norm=True),
        "diagnose tap_after_final_norm",
        pair=LAST_TAP,
    ),
    Fault(
        "last tap before or after the final norm",
        "before, where it was trained after",
        stated(tap_after_final_norm=False),
        "diagnose tap_after_final_norm",
        pair={**LAST_TAP, "tap_after_final_norm": True},
    ),
    Fault(
        "last tap before or after the final norm",
        "the recorded final state is after the norm",
        normed_final,
        "control final-state",
    ),
    Fault(
        "features that are not features",
        "all zeros",
        lambda site: change_features(site, lambda taps: taps.fill(0)),
        "control features-vary",
    ),
    Fault(
        "features that are not features",
        "NaN",
        lambda site: change_features(site, lambda taps: taps[:, 3:5].fill(np.nan)),
        "control features-finite",
    ),
    Fault(
        "features that are not features",
        "constant",
        lambda site: change_features(site, lambda taps: np.copyto(taps, taps[:, :1])),
        "control features-vary",
    ),
    Fault(
        "features that are not features",
        "two taps equal",
        lambda site: change_features(site, lambda taps: np.copyto(taps[1], taps[0])),
        "control taps-differ",
    ),
    Fault(
        "features that are not features",
        "one position too late",
        lambda site: shift_features(site, 1),
        "control context-moved-earlier",
    ),
    Fault(
        "features that are not features", "rows of another request", swap_rows, "control context-by-prompt"
    ),
    Fault("features that are not features", "cut by a cached prefix", cut_rows, "refused"),
    Fault("stale or foreign recording", "an item edited", damage_item, "refused"),
    Fault("stale or foreign recording", "the target's head changed since", other_ends, "refused"),
    Fault(
        "stale or foreign recording",
        "of a target of another depth",
        in_config(num_target_layers=12),
        "refused",
    ),
    Fault(
        "drafter does not read its context",
        "it drafts from the anchor alone",
        stated(),
        "control context-zeroed",
        pair={"blind": True},
    ),
    Fault("too good", "the anchor's own feature is shown", own_features, "control context-moved-later"),
    Fault("RoPE base", "10000 for the target's", stated(rope_theta=10000.0), "diagnose rope_theta"),
    Fault("RoPE base", "1e6 for the target's", stated(rope_theta=1e6), "diagnose rope_theta"),
    Fault("partial rotary", "half of the dimensions", stated(rope_dims=8), "diagnose rope_dims"),
    Fault(
        "partial rotary",
        "all of the dimensions where half was trained",
        stated(rope_dims=16),
        "diagnose rope_dims",
        pair={"rope_dims": 8},
    ),
    Fault("RoPE layout", "interleaved", stated(rope_layout="interleaved"), "diagnose rope_layout"),
    Fault(
        "block mask",
        "bidirectional where it was causal",
        stated(attention=toml_layers(FULL, dataclasses.replace(SLIDING, block_causal=False))),
        "diagnose attention",
    ),
    Fault(
        "block mask",
        "causal where it was bidirectional",
        stated(attention=toml_layers(dataclasses.replace(FULL, block_causal=True), SLIDING)),
        "diagnose attention",
    ),
    Fault(
        "sliding window",
        "declared and not applied",
        stated(attention=toml_layers(FULL, dataclasses.replace(SLIDING, window=None))),
        "caveat wiring-overridden",
    ),
    Fault(
        "sliding window",
        "applied and not declared",
        stated(attention=toml_layers(dataclasses.replace(FULL, window=12), SLIDING)),
        "diagnose attention",
    ),
    Fault(
        "sliding window",
        "bound off by one",
        stated(attention=toml_layers(FULL, dataclasses.replace(SLIDING, window_inclusive=True))),
        "diagnose attention",
    ),
    Fault(
        "sliding window",
        "counted from the anchor",
        stated(attention=toml_layers(FULL, dataclasses.replace(SLIDING, window_from="anchor"))),
        "diagnose attention",
    ),
    Fault("mask token", "the id beside it", stated(mask_token_id=291), "diagnose mask_token_id"),
    Fault("mask token", "fell back to a stop token", stated(mask_token_id=2), "diagnose mask_token_id"),
    Fault("mask token", "outside the table", stated(mask_token_id=4000), "refused"),
    Fault("mask token", "a row that was never trained", untrained_row, "control mask-token"),
    Fault(
        "mask token",
        "a token in the place of a mask embedding",
        stated(mask_embedding=False, mask_token_id=290),
        "diagnose mask_token_id",
        pair={"mask_embedding": True},
    ),
    Fault(
        "embedding, head, final norm",
        "the target's head for the drafter's own",
        in_config(head="target"),
        "diagnose ends",
        pair={"head": "own"},
    ),
    Fault(
        "embedding, head, final norm",
        "the target's embedding, stated for the drafter's own",
        stated(embedding="target"),
        "diagnose ends",
        pair={"embedding": "own"},
    ),
    Fault(
        "embedding, head, final norm",
        "embedding scaled by the root of the width",
        stated(embedding_scale=planted.HIDDEN**0.5),
        "diagnose embedding_scale",
    ),
    Fault(
        "embedding, head, final norm",
        "NaN in the output norm",
        lambda site: set_tensor(site, "norm.weight", lambda w: w * np.nan),
        "refused",
    ),
    Fault("pruned vocabulary", "d2t absent", no_map, "refused", pair=PRUNED),
    Fault(
        "pruned vocabulary",
        "an offset read as absolute",
        stated(vocabulary_map="absolute"),
        "refused",
        pair=PRUNED,
    ),
    Fault(
        "pruned vocabulary",
        "all zero, as before it was filled",
        lambda site: set_tensor(site, "d2t", lambda ids: ids * 0),
        "refused",
        pair=PRUNED,
    ),
    Fault("weights not loaded", "a layer missing", lambda site: leave_out(site, "layers.1.mlp"), "refused"),
    Fault("weights not loaded", "another prefix", lambda site: rename(site, "layers.", "blocks."), "refused"),
    Fault(
        "weights not loaded",
        "an extra norm, never applied",
        lambda s: add_tensor(s, "verifier_norm.weight"),
        "caveat tensors-unused",
    ),
    Fault(
        "weights not loaded",
        "another family's tensors",
        lambda s: add_tensor(s, "markov_head.w1.weight"),
        "refused",
    ),
    Fault("weights not loaded", "a layer that adds nothing", idle_layer, "control tensors-used"),
    Fault("weights not loaded", "a layer that is a copy", copied_layer, "control tensors-trained"),
    Fault(
        "weights not loaded",
        "norms at their initial value",
        lambda site: set_tensor(site, "hidden_norm.weight", np.ones_like),
        "control tensors-trained",
    ),
    Fault(
        "dtype",
        "float16 would overflow in the tap fusion",
        lambda site: set_tensor(site, "fc.weight", lambda w: w * 1e5),
        "control dtype",
    ),
    Fault(
        "anchor row",
        "row 0 predicts, where it re-reads",
        stated(predicts_from_anchor=True),
        "diagnose predicts_from_anchor",
    ),
    Fault(
        "anchor row",
        "row 0 re-reads, where it predicts",
        stated(predicts_from_anchor=False),
        "diagnose predicts_from_anchor",
        pair={"predicts_from_anchor": True},
    ),
    Fault(
        "block size",
        "twice the trained one is used",
        lambda site: site.state(used_block_size=12),
        "caveat block-size-differs",
    ),
    Fault("block size", "stated twice as large", stated(block_size=12), "diagnose block_size"),
    Fault("template, system prompt", "the prompts went in raw", lambda site: None, "caveat template"),
    Fault(
        "references not the target's own",
        "every third token another's",
        foreign_tokens,
        "control final-state",
    ),
    Fault("looping text", "one completion loops", make_loop, "caveat degenerate-references"),
    Fault("file damage", "cut short", truncate, "refused"),
    Fault("file damage", "a shard missing", lose_a_shard, "refused"),
    Fault(
        "in-place edit through a hard link",
        "the kept baseline changed",
        lambda site: None,
        "caveat checkpoint-changed",
    ),
    Fault("too few prompts", "3 of 10", three_of_ten, "caveat few-prompts"),
    Fault("runs that measure different things", "another block size", lambda site: None, "compare"),
)


#: The demo fault needs the recording whose taps are one layer later.
OFF_BY_ONE = {"off_by_one": True}


def demo_faults() -> tuple[Fault, ...]:
    """Faults of the demo's drafter on its real target: smaller, a few percent each, as faults in production are."""
    causal = toml_layers(*[LayerAttention(block_causal=True)] * 2)
    windowed = toml_layers(*[LayerAttention(window=64)] * 2)
    return (
        Fault(
            "tap off by one",
            "all taps one layer later",
            stated(taps=[2, 11, 20, 28]),
            "diagnose taps",
            pair=OFF_BY_ONE,
        ),
        Fault("taps in another order", "two taps swapped", stated(taps=[10, 1, 19, 27]), "diagnose taps"),
        Fault("RoPE base", "10000 for 100000", stated(rope_theta=10000.0), "diagnose rope_theta"),
        Fault("partial rotary", "half of the dimensions", stated(rope_dims=32), "diagnose rope_dims"),
        Fault("RoPE layout", "interleaved", stated(rope_layout="interleaved"), "diagnose rope_layout"),
        Fault(
            "block mask", "causal where it was bidirectional", stated(attention=causal), "diagnose attention"
        ),
        Fault("sliding window", "applied and not declared", stated(attention=windowed), "diagnose attention"),
        Fault("mask token", "token 2 for 3", stated(mask_token_id=2), "diagnose mask_token_id"),
        Fault(
            "anchor row",
            "row 0 predicts, where it re-reads",
            stated(predicts_from_anchor=True),
            "diagnose predicts_from_anchor",
        ),
        Fault(
            "tap off by one",
            "taps one layer later, and RoPE base 10000",
            stated(taps=[2, 11, 20, 28], rope_theta=10000.0),
            "diagnose taps",
            pair=OFF_BY_ONE,
        ),
        Fault(
            "stale or foreign recording",
            "a middle layer of the target changed since",
            tuned,
            "control re-extracted",
        ),
        Fault(
            "block size",
            "half of the trained one is used",
            stated(used_block_size=4),
            "caveat block-size-differs",
        ),
        Fault("looping text", "word_count loops", stated(), "caveat degenerate-references"),
        Fault(
            "same name, different number", "conventions on one set of rounds", stated(), "caveat conventions"
        ),
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
    return ask(fault, site_of(fault, folder), planted_in="tiny pair")


def ask(fault: Fault, site: Site, *, planted_in: str) -> Finding:
    """Asks the part of draftgauge that must catch what was planted there."""
    how, _, name = fault.caught.partition(" ")
    said = dict(site.stated)
    used = said.pop("used_block_size", None)
    caught, message, first = ASK[how](site, Stated(wiring=said, source="--wiring", block_size=used), name)
    short = " ".join(message.replace(f"{site.folder}/", "").split())
    return Finding(fault.kind, fault.what, planted_in, fault.caught, caught, short[:220], first)


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
