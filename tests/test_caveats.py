"""Every caveat by its slug: the facts that yield it, what it says, and facts that do not."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from draftgauge import caveats as module
from draftgauge.caveats import Caveat, Facts, as_json, caveats
from draftgauge.wiring import LayerAttention

CLEAN = Facts(
    prompts_asked=30,
    prompts_recorded=30,
    prompts_evaluated=30,
    block_size=8,
    trained_block_size=8,
    unused={},
    opaque_classes=(),
    checksums_absent=0,
    dtype="float32",
    recorded_dtype="float32",
    tokens=1000,
    agreed=1000,
    near_ties=0,
    max_blocks=None,
    anchors="all",
    drafted_tokens=990,
    unreachable_tokens=0,
    stored_in="trainer-pt",
)
#: slug -> (severity, facts that yield it, words that it must hold)
YIELD: dict[str, tuple[str, dict[str, Any], str]] = {
    "prompts-incomplete": (
        "warning",
        {"prompts_evaluated": 29, "prompts_recorded": 29},
        "29 of 30 prompts were evaluated; the recording holds 29",
    ),
    "prompts-lost": (
        "warning",
        {
            "lost": {
                "p7": "ProcessExpired: Abnormal termination",
                "p8": "ProcessExpired: Abnormal termination",
            }
        },
        "2 prompt(s) were lost with their workers, twice: p7, p8 (ProcessExpired: Abnormal termination)",
    ),
    "few-prompts": ("warning", {"prompts_asked": 4, "prompts_evaluated": 4}, "4 prompt(s)"),
    "rough-interval": (
        "note",
        {"prompts_asked": 19, "prompts_evaluated": 19},
        "19 prompts: the intervals are rough",
    ),
    "anchors-limited": ("warning", {"max_blocks": 50}, "Only the first 50 anchors"),
    "walk-anchors": ("note", {"anchors": "walk"}, "only where the policies' walks go"),
    "block-size-differs": (
        "warning",
        {"block_size": 4},
        "Block size 4 was used, 8 was trained: a block cut short",
    ),
    "vocabulary-misses": ("warning", {"unreachable_tokens": 3}, "3 of 990 reference tokens"),
    "tensors-unused": (
        "note",
        {"unused": {"t2d": "only the inverse"}},
        "1 tensor(s) of the file are not used: t2d",
    ),
    "reference-agreement": ("note", {"agreed": 990, "near_ties": 5}, "10 of 1000 reference tokens are not"),
    "references-unverified": ("warning", {"agreed": None, "near_ties": None}, "came without its final state"),
    "dtype-differs": (
        "note",
        {"recorded_dtype": "bfloat16"},
        "recorded in bfloat16, computed with in float32",
    ),
    "opaque-values": (
        "note",
        {"opaque_classes": ("pkg.Config", "pkg.Args")},
        "never loaded: pkg.Config, pkg.Args",
    ),
    "mutable-revision": (
        "note",
        {"mutable_url": "hf://lab/drafter@main", "revision": "0123abcd"},
        "hf://lab/drafter@main may point to other weights tomorrow; measured was 0123abcd.",
    ),
    "no-checksums": (
        "note",
        {"checksums_absent": 2},
        "2 record(s) of the weights carry no checksum (trainer-pt)",
    ),
    "not-trusted": (
        "warning",
        {"failed_controls": ("final-state", "context-zeroed")},
        "2 control(s) failed: final-state, context-zeroed.",
    ),
    "controls-undecided": (
        "note",
        {"undecided_controls": ("context-zeroed",)},
        "too few for 1 control(s): context-zeroed",
    ),
    "wiring-overridden": (
        "warning",
        {"overridden": {"rope_theta": (100000.0, 10000.0)}},
        "rope_theta is 100000.0 in the file and was stated as 10000.0",
    ),
    "step-behind": ("note", {"step": 4000, "trainer_step": 5329}, "of step 4000; training is at step 5329"),
    "target-changed": (
        "warning",
        {"target_change": "config.json changed"},
        "may not be the one recorded: config.json changed",
    ),
    "template": ("note", {"template": "raw"}, "without a chat template"),
    "conventions": (
        "note",
        {"conventions": {"pooled": 2.0, "sglang_request": 2.05, "deepspec": None}},
        "count as 2.000 (pooled) to 2.050 (sglang_request)",
    ),
    "degenerate-references": (
        "warning",
        {"degenerate": {"word_count": 0.98}, "tau": 2.163, "tau_without": 2.003},
        "word_count (98%). A loop is easy to draft. Tau of the chain is 2.163 by response, 2.003 without",
    ),
    "outlier-prompts": (
        "note",
        {"outliers": {"a": 6.0, "b": 5.5}, "tau": 2.5, "tau_without": 2.0},
        "2 prompt(s) stand far from the others: a (6.00), b (5.50).",
    ),
}


def test_every_caveat_is_tried() -> None:
    """But the one that is made where a run is read again (test_kept)."""
    made = set(re.findall(r'Caveat\(\s*"([a-z-]+)"', Path(module.__file__).read_text(encoding="utf-8")))
    assert made - {"few-prompts"} == YIELD.keys() - {"few-prompts"}


def found(**changes: Any) -> dict[str, Caveat]:
    return {caveat.slug: caveat for caveat in caveats(dataclasses.replace(CLEAN, **changes))}


def test_a_clean_measurement_has_none() -> None:
    assert found() == {}


@pytest.mark.parametrize("slug", YIELD)
def test_each_caveat_has_its_facts_and_its_words(slug: str) -> None:
    severity, changes, words = YIELD[slug]
    caveat = found(**changes)
    assert caveat.keys() == {slug}
    assert caveat[slug].severity == severity
    assert words in caveat[slug].text


@pytest.mark.parametrize(
    ("changes", "slugs"),
    [
        ({"prompts_evaluated": 5, "prompts_asked": 5}, {"rough-interval"}),
        ({"prompts_evaluated": 20, "prompts_asked": 20}, set()),
        ({"prompts_evaluated": 3}, {"prompts-incomplete", "few-prompts"}),
        ({"trained_block_size": None}, set()),
        ({"step": 4000, "trainer_step": 4000}, set()),
        ({"step": None, "trainer_step": 4000}, set()),
        ({"conventions": {"pooled": 2.0, "deepspec": 2.03}}, set()),  # 1.5 % apart
        ({"template": "chat"}, set()),
        ({"template": "chat", "template_switches": ("enable_thinking",)}, {"template"}),
        ({"template": "chat-thinking", "template_switches": ("enable_thinking",)}, set()),
        ({"dtype": "bfloat16", "recorded_dtype": "bfloat16"}, set()),
    ],
    ids=str,
)
def test_where_the_bounds_lie(changes: dict[str, Any], slugs: set[str]) -> None:
    assert found(**changes).keys() == slugs


@pytest.mark.parametrize(
    ("agreed", "near_ties", "severity"),
    [(999, 0, "note"), (985, 5, "note"), (985, 4, "warning"), (0, 0, "warning"), (0, 1000, "note")],
)
def test_references_that_are_no_near_ties_are_a_warning_beyond_one_in_a_hundred(
    agreed: int, near_ties: int, severity: str
) -> None:
    assert found(agreed=agreed, near_ties=near_ties)["reference-agreement"].severity == severity


def test_few_disagreements_are_not_rounded_away() -> None:
    """1 of 67000 is an agreement of 99.9985 %, which two digits would call all."""
    text = found(tokens=67000, agreed=66999)["reference-agreement"].text
    assert text.startswith("1 of 67000 reference tokens")
    assert "100" not in text


def test_a_larger_block_than_the_trained_one_is_told_apart_from_a_smaller() -> None:
    assert "were never trained" in found(block_size=16)["block-size-differs"].text
    assert "cut short" in found(block_size=4)["block-size-differs"].text


def test_the_effect_of_another_block_size_is_told_where_it_was_measured() -> None:
    text = found(block_size=4, block_size_effect=(0.9, 1.25, 128, 3))["block-size-differs"].text
    assert text.endswith(
        "On 128 anchors the streak within depth 3 is 0.900, with the trained block size 1.250."
    )
    assert "anchors the streak" not in found(block_size=4)["block-size-differs"].text


def test_layers_that_were_stated_otherwise_are_told_in_words() -> None:
    layers = (LayerAttention(), LayerAttention(window=12))
    text = found(overridden={"attention": (layers, layers[:1] * 2)})["wiring-overridden"].text
    assert "window 12 from the row (exclusive), bidirectional in the block" in text
    assert "LayerAttention" not in text


def test_many_unused_tensors_are_counted_and_not_all_named() -> None:
    text = found(unused={f"model.layers.{i}.x": "of another model" for i in range(100)})[
        "tensors-unused"
    ].text
    assert text.startswith("100 tensor(s)")
    assert "model.layers.7.x (of another model)" in text
    assert "model.layers.8.x" not in text
    assert text.endswith("and 92 more, which run.json lists.")


def test_warnings_come_first_and_are_plain_values() -> None:
    both = caveats(dataclasses.replace(CLEAN, anchors="walk", max_blocks=2, checksums_absent=1))
    assert [c["slug"] for c in as_json(both)] == ["anchors-limited", "walk-anchors", "no-checksums"]
    assert as_json(both)[0] == {
        "slug": "anchors-limited",
        "severity": "warning",
        "text": "Only the first 2 anchors of each completion were evaluated.",
    }
