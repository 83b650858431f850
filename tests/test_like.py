"""Measuring again what an earlier run measured: the same recording or the same references, the same options."""

import dataclasses
import shutil
from functools import cache
from pathlib import Path

import pytest

from draftgauge.acceptance import Policy
from draftgauge.compare import compare_runs
from draftgauge.errors import RunError
from draftgauge.evaluate import Options, evaluate_checkpoint
from draftgauge.like import options_like
from draftgauge.record import Request, record_target
from draftgauge.recording import Recording
from draftgauge.runs import Run
from draftgauge.stated import Stated
from tests import tiny

POLICIES = (Policy("chain"), Policy("ddtree", 4))


@cache
def earlier() -> Run:
    options = Options(
        stated=Stated(block_size=4),
        policies=POLICIES,
        anchors="walk",
        prompts=("five", "long"),
        max_blocks=6,
        dtype="bfloat16",
    )
    return evaluate_checkpoint(
        tiny.workshop() / "drafter", tiny.recording().path, options, root=tiny.workshop() / "like"
    )


def recorded(
    folder: Path, *names: str, taps: tuple[int, ...] = (1, 3), tokens: int = tiny.NEW_TOKENS
) -> Recording:
    request = Request(taps=taps, max_new_tokens=tokens)
    return record_target(tiny.workshop() / "target", tiny.prompt_set(names), request=request, root=folder)


def moved(run: Run, recording: Path) -> Run:
    """The run, whose recording is said to lie elsewhere."""
    facts = {**run.manifest["recording"], "path": str(recording)}
    return dataclasses.replace(run, manifest={**run.manifest, "recording": facts})


def test_everything_but_the_checkpoints_own_is_the_earlier_runs() -> None:
    mine = Options(
        stated=Stated(wiring={"rope_theta": 1.0}, source="mine", block_size=8, options={"mask_token_id": 3}),
        num_prompts=1,
        state_dict="ema",
        trainer_step=9,
    )
    path, options = options_like(earlier(), mine)
    assert path == tiny.recording().path.resolve()
    assert options == Options(
        stated=Stated(wiring={"rope_theta": 1.0}, source="mine", block_size=4, options={"mask_token_id": 3}),
        policies=(*POLICIES, Policy("coverage", 4), Policy("coverage", 8)),
        anchors="walk",
        prompts=("five", "long"),
        max_blocks=6,
        dtype="bfloat16",
        state_dict="ema",
        trainer_step=9,
    )


def test_the_same_checkpoint_measured_so_is_the_same_plan() -> None:
    path, options = options_like(earlier(), Options())
    again = evaluate_checkpoint(tiny.workshop() / "drafter", path, options, root=tiny.workshop() / "like")
    assert again.path == earlier().path


def test_a_recording_that_was_moved_is_asked_for_and_taken(tmp_path: Path) -> None:
    run = moved(earlier(), tmp_path / "gone")
    with pytest.raises(
        RunError, match=r"its recording [0-9a-f]{16} is not at .*gone.*say where it is now with --rec"
    ):
        options_like(run, Options())
    copy = Path(shutil.copytree(tiny.recording().path, tmp_path / "copy"))
    path, options = options_like(run, Options(), recording=copy)
    assert path == copy
    assert options.prompts == ("five", "long")


def test_a_recording_of_other_taps_and_the_same_references_is_taken_and_comparable(tmp_path: Path) -> None:
    other = recorded(tmp_path, "long", "one", "five", taps=(1, 2, 3))
    assert other.digest != tiny.recording().digest
    path, options = options_like(earlier(), Options(), recording=other.path)
    run = evaluate_checkpoint(tiny.workshop() / "drafter", path, options, root=tmp_path / "runs")
    value = compare_runs(run, earlier())
    assert sorted(value["prompts"]) == ["five", "long"]
    assert value["dropped"] == {}
    assert value["policies"]["chain"]["tau_response"]["verdict"] == "equal"
    assert list(value["different"]) == ["recording"]


@pytest.mark.parametrize(
    ("names", "tokens", "words"),
    [
        (("long",), tiny.NEW_TOKENS, r"they differ in five \(not recorded\);"),
        (
            ("five", "long"),
            8,
            r"five \(another text\), long \(another text\); say where the one measured is with --rec",
        ),
    ],
    ids=["a prompt less", "other texts"],
)
def test_a_recording_of_other_references_is_refused(
    names: tuple[str, ...], tokens: int, words: str, tmp_path: Path
) -> None:
    other = recorded(tmp_path, *names, tokens=tokens)
    with pytest.raises(RunError, match=words) as caught:
        options_like(moved(earlier(), other.path), Options())
    assert other.digest[:16] in str(caught.value)
    assert tiny.recording().digest[:16] in str(caught.value)


def test_a_run_that_does_not_say_its_texts_needs_its_very_recording(tmp_path: Path) -> None:
    run, other = earlier(), recorded(tmp_path, "five", "long", taps=(1, 2, 3))
    prompts = {name: {**prompt, "reference_sha256": None} for name, prompt in run.summary["prompts"].items()}
    run = dataclasses.replace(run, summary={**run.summary, "prompts": prompts})
    assert options_like(run, Options())[0] == tiny.recording().path.resolve()
    with pytest.raises(RunError, match=r"five \(the run does not say its text\), long \(the run"):
        options_like(run, Options(), recording=other.path)


def test_another_target_is_refused(tmp_path: Path) -> None:
    plan = dataclasses.asdict(earlier().plan) | {"target_digest": "0" * 64, "recording_digest": "1" * 64}
    run = dataclasses.replace(earlier(), manifest={**earlier().manifest, "plan": plan})
    with pytest.raises(RunError, match="they differ in the target;"):
        options_like(run, Options())
