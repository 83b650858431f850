"""A comparison and stored numbers, as a reader sees them: 80 columns, plain words, nothing left unsaid."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftgauge.beside import beside, read_stored
from draftgauge.compare import compare_runs
from draftgauge.report.comparison import comparison_report, stored_report
from draftgauge.runs import Run
from tests.test_compare import run

LONG = "a-prompt-whose-name-somebody-generated-from-all-of-its-text-" * 3


def flat(text: str) -> str:
    return " ".join(text.split())


def fits(text: str) -> bool:
    """Lines of 80 characters; a long name stands whole, to be copied."""
    lines = text.splitlines()
    return all(line == line.rstrip() and (len(line) <= 80 or len(line.split()) <= 2) for line in lines)


def compared(ours: list[int], theirs: list[int]) -> str:
    late, early = (
        run(name, {f"p{i}": [streak] for i, streak in enumerate(side)})
        for name, side in (("late", ours), ("early", theirs))
    )
    return comparison_report(compare_runs(late, early))


@pytest.mark.parametrize(
    ("ours", "theirs", "answer"),
    [
        ([3, 3, 2, 3, 3, 3], [0, 1, 0, 0, 1, 0], "The tau of the chain is higher: +0.833 ["),
        ([0, 1, 0, 0, 1, 0], [3, 3, 2, 3, 3, 3], "The tau of the chain is lower: -0.833 [-"),
        (
            [3, 0, 2, 1, 3, 0],
            [0, 3, 1, 2, 1, 2],
            "No difference in the tau of the chain shows on 6 prompts: 0.000 [",
        ),
        ([3, 0, 2, 1, 3, 0], [3, 0, 2, 1, 3, 0], "The tau of the chain is the same on each of 6 prompt(s)."),
        ([3, 3], [0, 0], "cannot be told apart: no interval is honest from fewer than 5 prompts"),
    ],
    ids=["higher", "lower", "not resolved", "equal", "undecided"],
)
def test_the_answer_is_a_sentence(ours: list[int], theirs: list[int], answer: str) -> None:
    text = compared(ours, theirs)
    assert answer in flat(text.split("\n\n")[1])
    assert fits(text)


def test_every_policy_and_every_prompt_has_a_line() -> None:
    text = compared([3, 0], [0, 0])
    policies, prompts = text.split("\n\n")[2:4]
    # p0: rounds 4, 1, 1 against 1, 1, 1; p1 equal. Mean of 2.0 - 1.0 and 0.
    assert policies.splitlines()[2].split() == ["chain", "1.000", "1.500", "+0.500", "-", "-"]
    assert [line.split()[0] for line in prompts.splitlines()[2:]] == ["p0", "p1"]
    assert prompts.splitlines()[2].split() == ["p0", "1.000", "2.000", "+1.000"]


@pytest.mark.parametrize(("count", "rest"), [(40, ""), (41, "\n(more prompts in --json: 1)")])
def test_many_prompts_are_counted_and_not_all_listed(count: int, rest: str) -> None:
    prompts = compared([1] * count, [0] * count).split("\n\n")[3]
    assert len(prompts.splitlines()) == 2 + 40 + bool(rest)
    assert prompts.endswith(rest)


def test_it_says_what_is_the_same_what_differs_and_what_is_left_out() -> None:
    value: dict[str, Any] = {
        **compare_runs(run("late", {"five": [1]}), run("early", {"five": [1]})),
        "dropped": {"c": "only in late"},
        "dropped_policies": {"ddtree1024": "only in early"},
        "same": {"target": "t" * 64, "block size": 8, "references": "token for token"},
        "different": {
            "checkpoint": {"run": "a" * 64, "baseline": "b" * 64},
            "wiring: taps": {"run": [1, 3], "baseline": [0, 2]},
        },
    }
    text = comparison_report(value)
    assert "the same: target, block size (8), references (token for token)" in text
    assert "different: checkpoint: bbbbbbbbbbbbbbbb (baseline), aaaaaaaaaaaaaaaa (run)" in text
    assert "different: wiring: taps: 0, 2 (baseline), 1, 3 (run)" in text
    assert "! left out: prompt c: only in late" in text
    assert "! left out: policy ddtree1024: only in early" in text


@pytest.mark.parametrize(
    ("trust", "said"),
    [
        (
            {"trusted": False, "failed": ["final-state", "mask-token"], "controls": []},
            "! early is NOT TRUSTED: final-state, mask-token failed; do not use",
        ),
        (None, "- early was made before controls were: whether to trust it is not known"),
        ({"trusted": True, "failed": [], "controls": []}, None),
    ],
    ids=["failed", "not run", "trusted"],
)
def test_whether_a_run_is_trusted_stands_at_the_top(trust: Any, said: str | None) -> None:
    ours, theirs = run("late", {"a": [1]}), run("early", {"a": [1]})
    ours.summary["trust"] = {"trusted": True, "failed": [], "controls": []}
    if trust is not None:
        theirs.summary["trust"] = trust
    head = flat(comparison_report(compare_runs(ours, theirs)).split("\n\n")[0])
    assert "late is" not in head
    assert (said in head) if said else ("early" not in head.removeprefix("run late baseline early"))


def test_long_names_stand_whole() -> None:
    ours, theirs = (
        Run(Path(f"{name}-{LONG}"), *_parts(run(name, {LONG: [1]}))) for name in ("late", "early")
    )
    text = comparison_report(compare_runs(ours, theirs))
    assert fits(text)
    assert f"early-{LONG}" in text


def _parts(made: Run) -> tuple[Any, Any]:
    return made.manifest, made.summary


# --- stored numbers ------------------------------------------------------------------------------------


def stored(folder: Path, value: object) -> str:
    path = folder / "old.json"
    path.write_text(json.dumps(value))
    return stored_report(
        beside(run("late", {"a": [3, 1], "b": [2]}), read_stored(path), path=Path("old.json"))
    )


def test_stored_numbers_stand_beside_the_runs_own(tmp_path: Path) -> None:
    text = stored(tmp_path, {"vanilla": 0.778, "DDTree top-4": 1.111, "DDTree top-8": 1.467, "seconds": 3})
    assert fits(text)
    title, below = text.split("\n\n")
    head, _, vanilla, top4, top8, seconds, *notes = below.splitlines()
    assert (
        flat(title) == "beside the stored result old.json, which has no provenance: not compared, not tested"
    )
    assert head.split() == ["named", "there", "(here)", "stored", "this", "run", "all", "anchors"]
    # Accepted per round: of a 4 of 4, of b 2 of 3.
    assert vanilla.split()[:5] == ["vanilla", "(chain", "streak)", "0.778", "0.833"]
    assert top4.startswith("DDTree top-4 (coverage@4 streak)")
    assert top4.split()[4] == "1.111"
    assert top8.split()[-3:] == ["1.467", "-", "-"]
    assert seconds.split() == ["seconds", "3.000", "-", "-"]
    said = flat(" ".join(notes))
    assert "- top-k there is coverage@k here" in said
    assert "- this run has no policy coverage@8" in said


def test_a_stored_number_of_a_prompt_says_which(tmp_path: Path) -> None:
    text = stored(tmp_path, {"b": {"vanilla": 0.5}, LONG: {"vanilla": 1}})
    assert fits(text)
    assert "b: vanilla (chain streak)" in text
    assert LONG[:60] in text


def test_many_stored_numbers_are_counted_and_not_all_listed(tmp_path: Path) -> None:
    text = stored(tmp_path, [{"id": f"p{i}", "vanilla": 1} for i in range(41)])
    assert "\n(more values in --json: 1)" in text
