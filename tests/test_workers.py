"""Workers: one conformance suite for processes and for Ray, and what happens when they die."""

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftgauge.errors import InputError
from draftgauge.evaluate import evaluate_checkpoint
from draftgauge.runs import BLOCKS, open_run
from draftgauge.workers import Workers
from tests import pieces, tiny
from tests.pieces import CASES


@functools.cache
def on_ray(folder: Path) -> dict[str, Any]:
    """Everything that is asked of Ray, from a process of its own: a cluster takes seconds to start."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.pieces"),
            *(str(tiny.workshop() / "drafter"), str(tiny.wide_recording().path), str(folder)),
        ],
        cwd=Path(__file__).parents[1],
        env=tiny.environment(PYTHONWARNINGS="ignore"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def ray_found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("ray")
    return on_ray(tmp_path_factory.mktemp("ray"))


@pytest.fixture(params=["processes", "ray"])
def outcome(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """What comes of a case, by piece: its result and how often it was tried."""
    if request.param == "ray":
        found = request.getfixturevalue("ray_found")
        return lambda case: found[case]
    return lambda case: pieces.outcomes(CASES[case][0], tmp_path, workers=Workers(2), **CASES[case][1])


def test_every_piece_is_run_once(outcome: Any) -> None:
    assert outcome("well") == {f"well-{i}": [f"well-{i}", 1] for i in range(7)}
    assert outcome("nothing") == {}


def test_a_piece_that_a_worker_took_with_it_is_run_again_and_no_other(outcome: Any) -> None:
    assert outcome("lost once") == {
        "well-0": ["well-0", 1],
        "killedonce-1": ["killedonce-1", 2],
        "raisesonce-2": ["raisesonce-2", 2],
        "well-3": ["well-3", 1],
    }


def test_a_piece_that_is_lost_twice_is_given_up_and_the_others_are_kept(outcome: Any) -> None:
    found = outcome("lost twice")
    assert {name: found[name] for name in ("well-0", "well-2", "well-4")} == {
        name: [name, 1] for name in ("well-0", "well-2", "well-4")
    }
    assert found["raises-1"][1] == found["killed-3"][1] == 2
    assert found["raises-1"][0].startswith("lost: ")
    assert "no room" in found["raises-1"][0]
    assert found["killed-3"][0].startswith("lost: ")


def test_a_piece_that_does_not_answer_is_given_to_another(outcome: Any) -> None:
    assert outcome("overdue")["hangsonce-2"] == ["hangsonce-2", 2]


def test_what_is_wrong_with_the_input_is_raised_as_it_is(outcome: Any) -> None:
    assert outcome("refused") == {"error": "refuses-1 is damaged; record it again"}


def test_an_evaluation_that_loses_a_node_gives_the_same_bytes(
    ray_found: dict[str, Any], tmp_path: Path
) -> None:
    alone = evaluate_checkpoint(tiny.workshop() / "drafter", tiny.wide_recording().path, root=tmp_path)
    run = open_run(ray_found["run"])
    assert ray_found["nodes"] == 2, "the head and one of two"
    assert run.manifest["status"] == "complete"
    assert (run.path / BLOCKS).read_bytes() == (alone.path / BLOCKS).read_bytes()
    assert run.summary == alone.summary
    assert len(run.summary["prompts"]) == 48


@pytest.mark.parametrize(
    ("text", "workers"), [("1", Workers()), ("4", Workers(4)), ("ray", Workers(ray=True))], ids=str
)
def test_workers_are_named_by_their_number_or_engine(text: str, workers: Workers) -> None:
    assert Workers.parse(text) == workers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "0 workers cannot work; give a number from 1 on, or ray"),
        ("-2", "--workers '-2' is not known; expected a number from 1 on, or ray"),
        ("dask", "--workers 'dask' is not known"),
    ],
)
def test_other_workers_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Workers.parse(text)


def test_workers_share_the_cores() -> None:
    assert Workers().threads >= Workers(2).threads >= 1
    assert Workers(10_000).threads == Workers(ray=True).threads == 1
