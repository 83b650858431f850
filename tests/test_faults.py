"""The fault matrix: what docs/faults.md says is what draftgauge says.

The searches of the matrix take minutes (`make faults`); here run those that are refused, controlled, caveated or
compared, in the tiny pair, and the sample of searches in test_diagnose. On the real target: two of each kind.
"""

import json
from pathlib import Path

import pytest

from demo.run import LATE
from draftgauge.check import check_checkpoint
from draftgauge.diagnose import diagnose_checkpoint
from tests.conftest import ROOT
from tests.fault_matrix import DATA, PAGE, demo_recordings, find_in_demo, page
from tests.faults import FAULTS, Fault, demo_faults, find

SAID = {(f["planted_in"], f["kind"], f["what"]): f for f in json.loads(DATA.read_text(encoding="utf-8"))}
QUICK = [fault for fault in FAULTS if not fault.caught.startswith("diagnose")]
REAL = ("10000 for 100000", "a middle layer of the target changed since", "all taps one layer later")


def test_the_page_is_what_was_found() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(list(SAID.values()))


def test_every_planted_fault_stands_on_the_page() -> None:
    planted = {("tiny pair", fault.kind, fault.what) for fault in FAULTS}
    planted |= {("demo pair", fault.kind, fault.what) for fault in demo_faults()}
    assert set(SAID) == planted


def test_every_kind_is_caught_somewhere() -> None:
    kinds = {finding["kind"] for finding in SAID.values()}
    assert len(kinds) > 20
    assert kinds == {finding["kind"] for finding in SAID.values() if finding["caught_by"] is not None}


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: fault.name)
def test_a_fault_is_caught_by_what_the_page_says(fault: Fault, tmp_path: Path) -> None:
    found = find(fault, tmp_path / "site")
    assert found.caught_by is not None
    assert found.caught_by == SAID["tiny pair", fault.kind, fault.what]["caught_by"]


@pytest.mark.real
@pytest.mark.parametrize("fault", [f for f in demo_faults() if f.what in REAL], ids=lambda fault: fault.name)
def test_a_fault_of_the_real_pair_is_caught(fault: Fault, real_recordings, tmp_path: Path) -> None:
    right, off = real_recordings
    place = right.parent / f".{tmp_path.name}"  # links need one file system
    found = find_in_demo(fault, place, drafter=ROOT / LATE, right=right, off_by_one=off)
    assert found.caught_by == SAID["demo pair", fault.kind, fault.what]["caught_by"]
    assert found.cause_first is SAID["demo pair", fault.kind, fault.what]["cause_first"]


@pytest.mark.real
def test_nothing_is_raised_on_the_real_pair_as_it_is(real_recordings) -> None:
    """But what is true of it: one of its references loops."""
    right, _ = real_recordings
    value = check_checkpoint(ROOT / LATE, right)
    raised = {c["slug"] for c in value["controls"] if c["verdict"] in ("failed", "caution", "undecided")}
    assert raised == {"references-degenerate"}
    assert diagnose_checkpoint(ROOT / LATE, right)["verdict"] == "given-wins"


@pytest.fixture(scope="module")
def real_recordings(smollm_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return demo_recordings(smollm_path, tmp_path_factory.mktemp("recordings"))
