"""The text view: its rounds against an independent walk and the run's own counts; and what it cannot show."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftgauge.acceptance import Policy
from draftgauge.errors import InputError, RunError
from draftgauge.evaluate import Options, evaluate_checkpoint
from draftgauge.report.tokens import (
    CHOICES,
    DEPTH,
    END_OF_TEXT,
    NOT_COVERED,
    OUTSIDE,
    Token,
    notable_prompts,
    token_view,
)
from draftgauge.runs import Run, open_run
from tests import tiny

POLICIES = tuple(map(Policy.parse, ("chain", "chain3", "ddtree4", "ddtree16")))
SLUGS = ("chain", "chain3", "ddtree4", "ddtree16", "coverage4")
CUT = 11


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """All anchors; and the walks' anchors alone, among the first of every prompt."""
    root = tmp_path_factory.mktemp("tokens")
    asked = {
        "all": Options(policies=POLICIES),
        "cut": Options(policies=POLICIES, anchors="walk", max_blocks=CUT),
    }
    return {
        name: evaluate_checkpoint(
            tiny.workshop() / "drafter", tiny.recording().path, options, root=root, name=name
        )
        for name, options in asked.items()
    }


def recorded(prompt: str) -> tuple[list[int], int]:
    """A prompt's tokens in the recording, and how many of them are the prompt's."""
    item = tiny.recording().item(prompt)
    content = b"".join(tiny.recording().tensors(item).tokens.blocks())
    return np.frombuffer(content, "<i4").tolist(), item.prompt_len


def walked(run: Run, prompt: str, policy: str) -> list[tuple[int, int, int]]:
    """The rounds as (anchor, streak, committed), from the streaks that the run keeps: slow and plain."""
    rows = {row["anchor"]: row for row in run.blocks().to_pylist() if row["prompt"] == prompt}
    said = run.summary["prompts"][prompt]
    anchor, last = said["prompt_tokens"], said["prompt_tokens"] + said["completion_tokens"] - 1
    found = []
    while anchor < last:
        streak = rows[anchor][f"streak_{policy}"]
        found.append((anchor, streak, min(streak + 1, last - anchor)))
        anchor += streak + 1
    return found


def rounds(tokens: tuple[Token, ...]) -> list[list[Token]]:
    return [list(some) for _, some in groupby((t for t in tokens if t.round is not None), lambda t: t.round)]


@pytest.mark.parametrize("name", ["all", "cut"])
@pytest.mark.parametrize("policy", SLUGS)
def test_the_kinds_are_those_of_the_walk(runs: dict[str, Run], name: str, policy: str) -> None:
    run = runs[name]
    for prompt in tiny.PROMPTS:
        view = token_view(run, prompt, policy=policy)
        ids, prompt_len = recorded(prompt)
        assert [t.position for t in view.tokens] == list(range(len(ids)))
        assert [t.text for t in view.tokens] == [f"⟨{i}⟩" for i in ids]
        tail = prompt_len + run.summary["prompts"][prompt]["completion_tokens"]
        kinds = [t.kind for t in view.tokens]
        assert kinds[: prompt_len + 1] == ["prompt"] * prompt_len + ["first"]
        assert kinds[tail:] == ["tail"] * (len(ids) - tail)
        shown = rounds(view.tokens)
        expected = walked(run, prompt, policy)
        assert len(shown) == len(expected)
        for some, (anchor, streak, committed) in zip(shown, expected, strict=True):
            assert [t.position for t in some] == list(range(anchor + 1, anchor + 1 + committed))
            assert [t.kind for t in some] == (["accepted"] * streak + ["bonus"])[:committed]
            assert [t.depth for t in some] == [*range(1, streak + 1), None][:committed]
            assert [t.missed is None for t in some] == [True] * (committed - 1) + [False]
    assert (name == "cut") == any(t.kind == "tail" for t in view.tokens)


@pytest.mark.parametrize("name", ["all", "cut"])
@pytest.mark.parametrize("policy", SLUGS)
def test_they_add_up_to_the_counts_of_the_run(runs: dict[str, Run], name: str, policy: str) -> None:
    run, ends = runs[name], Counter[str]()
    for prompt, said in run.summary["prompts"].items():
        tokens = token_view(run, prompt, policy=policy).tokens
        kinds = Counter(t.kind for t in tokens)
        counts = said["policies"][policy]
        assert kinds["accepted"] == counts["accepted"]
        assert kinds["accepted"] + kinds["bonus"] == counts["committed"]
        assert len(rounds(tokens)) == counts["rounds"]
        ends.update(t.missed.partition(",")[0] for t in tokens if t.missed)
    counts = run.summary["policies"][policy]["counts"]
    assert ends[NOT_COVERED] + ends[OUTSIDE] == counts["ended_not_covered"]
    assert ends["covered"] == counts["ended_not_selected"]
    assert ends[DEPTH] == counts["ended_depth"]
    assert ends[END_OF_TEXT] == counts["ended_reference"]


def test_choices_and_ranks_are_those_of_the_block_that_committed_the_token(runs: dict[str, Run]) -> None:
    run, seen = runs["all"], Counter[bool]()
    rows = {(row["prompt"], row["anchor"]): row for row in run.blocks().to_pylist()}
    for prompt in tiny.PROMPTS:
        ids, _ = recorded(prompt)
        for some in rounds(token_view(run, prompt, policy="ddtree16").tokens):
            row = rows[prompt, some[0].position - 1]
            for depth, token in enumerate(some):
                if depth == len(row["rank"]):
                    assert (token.rank, token.probability, token.choices) == (None, None, ())
                    continue
                kept = row["top_id"][8 * depth : 8 * depth + CHOICES]
                assert [c.text for c in token.choices] == [f"⟨{i}⟩" for i in kept]
                given = np.exp(row["top_log_prob"][8 * depth : 8 * depth + CHOICES])
                assert [c.probability for c in token.choices] == pytest.approx(given.tolist())
                assert token.rank == row["rank"][depth]
                assert token.probability == pytest.approx(np.exp(row["log_prob"][depth]))
                among = token.rank is not None and token.rank < CHOICES
                assert among == (ids[token.position] in kept)
                seen[among] += 1
    assert seen[True]
    assert seen[False]


def test_the_first_choice_of_the_chain_is_what_it_accepts(runs: dict[str, Run]) -> None:
    tokens = token_view(runs["all"], "long").tokens
    accepted = [t for t in tokens if t.kind == "accepted"]
    assert accepted
    assert all(t.rank == 0 and t.text == t.choices[0].text for t in accepted)
    assert all(t.rank != 0 for t in tokens if t.missed == NOT_COVERED)


def test_without_a_tokenizer_it_says_so(runs: dict[str, Run]) -> None:
    reason = token_view(runs["all"], "one").reason
    assert reason == f"the target's tokenizer.json is not at {tiny.workshop() / 'target'}"


def measured_on(run: Run, path: Path) -> Run:
    """The run, as if its recording lay elsewhere."""
    return replace(run, manifest={**run.manifest, "recording": {"path": str(path)}})


def test_a_recording_that_is_gone_gives_no_tokens(runs: dict[str, Run], tmp_path: Path) -> None:
    view = token_view(measured_on(runs["all"], tmp_path / "gone"), "one")
    assert view.tokens == ()
    assert f"{tmp_path / 'gone'} is not a folder" in str(view.reason)


def test_a_recording_that_was_moved_is_as_good(runs: dict[str, Run], tmp_path: Path) -> None:
    moved = tiny.copied_recording(tmp_path / "moved")
    run = runs["all"]
    assert token_view(measured_on(run, moved.path), "one") == token_view(run, "one")


def test_another_recording_gives_no_tokens(runs: dict[str, Run], tmp_path: Path) -> None:
    other = tiny.copied_recording(tmp_path / "other")
    manifest = json.loads((other.path / "recording.json").read_text())
    manifest["items"][0]["sha256"] = "0" * 64
    (other.path / "recording.json").write_text(json.dumps(manifest))
    view = token_view(measured_on(runs["all"], other.path), "five")
    assert view.tokens == ()
    assert "is not the one that was measured" in str(view.reason)


def test_an_item_whose_tokens_were_edited_gives_no_tokens(runs: dict[str, Run], tmp_path: Path) -> None:
    other = tiny.copied_recording(tmp_path / "other")
    stored = other.tensors(other.item("one")).tokens
    with stored.path.open("r+b") as file:
        file.seek(stored.offset + 12)
        file.write((3).to_bytes(4, "little"))
    run = measured_on(runs["all"], other.path)
    view = token_view(run, "one")
    assert view.tokens == ()
    assert "has other tokens for this prompt" in str(view.reason)
    assert token_view(run, "five").tokens


@pytest.mark.parametrize("content", [b"", b"\xff" * 64])
def test_a_damaged_item_gives_no_tokens(runs: dict[str, Run], tmp_path: Path, content: bytes) -> None:
    other = tiny.copied_recording(tmp_path / "other")
    (other.path / other.item("one").file).write_bytes(content)
    view = token_view(measured_on(runs["all"], other.path), "one")
    assert view.tokens == ()
    assert "is not at hand" in str(view.reason)


def test_a_run_that_says_no_references_gives_no_tokens(runs: dict[str, Run], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(runs["all"].path, tmp_path / "run"))
    summary = json.loads((copy / "summary.json").read_text())
    del summary["prompts"]["one"]["reference_sha256"]
    (copy / "summary.json").write_text(json.dumps(summary))
    view = token_view(open_run(copy), "one")
    assert view.tokens == ()
    assert "does not say which tokens" in str(view.reason)


def test_what_was_not_asked_is_refused(runs: dict[str, Run]) -> None:
    with pytest.raises(RunError, match="no prompt 'zero'; it measured one, five"):
        token_view(runs["all"], "zero")
    with pytest.raises(InputError, match="evaluate again with ddtree64"):
        token_view(runs["all"], "one", policy="ddtree64")
    with pytest.raises(InputError, match="is not known"):
        token_view(runs["all"], "one", policy="tree")


def ranked(**taus: float | None) -> Run:
    prompts: dict[str, Any] = {n: {"policies": {"chain": {"tau": tau}}} for n, tau in taus.items()}
    return Run(Path("run"), {}, {"prompts": prompts})


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (ranked(a=1.0, b=3.0, c=2.0, d=None, e=2.5, f=1.5), ("b", "c", "a")),
        (ranked(a=1.0, b=3.0, c=2.0, d=4.0), ("d", "b", "a")),
        (ranked(a=1.0, b=3.0), ("b", "a")),
        (ranked(a=1.0), ("a",)),
        (ranked(a=None), ()),
        (Run(Path("run"), {}, {"prompts": {"a": {"policies": {"ddtree4": {"tau": 1.0}}}}}), ()),
    ],
    ids=["five", "four", "two", "one", "no round", "no chain"],
)
def test_the_best_the_median_and_the_worst_are_notable(run: Run, expected: tuple[str, ...]) -> None:
    assert notable_prompts(run) == expected
