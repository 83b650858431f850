"""The plan file: what is read from it, and that every mistake names the file and the key."""

from pathlib import Path

import pytest

from draftgauge.cli.making import record
from draftgauge.cli.measuring import check, eval_
from draftgauge.errors import FleetError
from draftgauge.fleet.plans import (
    RECORD_OPTIONS,
    EvalTable,
    FleetPlan,
    eval_words,
    read_plan,
    trainer_state,
    wiring_words,
)

FLEET = '[hosts.eval1]\nssh = "eval1"\nwork = "/srv/dg"\n'
GOOD = r"""
fleet = "fleet.toml"
checkpoint = "eval1:/root/out/checkpoint.pt"
recording = "eval1:recordings/1f2e"

[eval]
block_size = 16
coverage = [4, 8]
wiring = "mine.toml"

[trainer]
log = "eval1:/root/train.log"
pattern = 'step (?P<step>[\d,]+) .*?(?P<ktok_per_s>[\d.]+) Ktok/s'
"""


def plan(folder: Path, text: str = GOOD) -> FleetPlan:
    (folder / "fleet.toml").write_text(FLEET)
    (folder / "mine.toml").write_text("mask_token_id = 2\n")
    file = folder / "drafter.toml"
    file.write_text(text)
    return read_plan(file)


def test_what_a_file_says(tmp_path: Path) -> None:
    read = plan(tmp_path)
    assert str(read.recording) == "eval1:/srv/dg/recordings/1f2e"
    assert read.results == tmp_path / "drafter"
    assert read.wiring == "mask_token_id = 2\n"
    assert eval_words(read.table.eval) == ("--block-size", "16", "--coverage", "4,8")
    assert wiring_words(read.table.eval) == ("--block-size", "16")


def test_local_paths_are_relative_to_the_plan(tmp_path: Path) -> None:
    read = plan(tmp_path, GOOD + '\n[watch]\nfolder = "out"\nmatch = "*"\n')
    assert read.spot("out").path == str(tmp_path / "out")
    assert read.spot("out").place.name == "workstation"


def test_the_digest_follows_what_changes_a_number(tmp_path: Path) -> None:
    first = plan(tmp_path)
    assert plan(tmp_path).digest == first.digest
    assert plan(tmp_path, GOOD.replace("16", "8")).digest != first.digest
    assert plan(tmp_path, GOOD.replace("1f2e", "2f2e")).digest != first.digest
    assert plan(tmp_path, GOOD.replace("train.log", "other.log")).digest == first.digest


def test_every_option_of_eval_can_be_stated() -> None:
    """But those that a plan says in other words (where the recording is, what is shown beside, and where to), and
    who does the work, which changes no number."""
    elsewhere = {
        "checkpoint",
        "recording",
        "like",
        "name",
        "trainer_step",
        "gates",
        "beside",
        "log_to",
        "root",
        "as_json",
        "workers",
        "share",
    }
    options = {p.name for p in eval_.params} - elsewhere
    names = {"wiring" if name == "wiring_file" else name for name in options}
    assert set(EvalTable.__struct_fields__) == names


def test_what_is_said_to_other_commands_are_their_options() -> None:
    table = EvalTable(
        state_dict="ema", taps=[1, 2], mask_token_id=3, block_size=4, dtype="bfloat16", budgets=[4]
    )
    for command, words in ((check, wiring_words(table)), (record, wiring_words(table, RECORD_OPTIONS))):
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known
    assert "--budgets" not in wiring_words(table)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("recording", "recordin"), "Object missing required field|unknown field `recordin`"),
        (("[eval]", "[eval]\nbudget = [4]"), r"unknown field `budget` - at `\$.eval`"),
        (("block_size = 16", "block_size = 0"), r"Expected `int` >= 1 - at `\$.eval.block_size`"),
        (("eval1:recordings", "evl1:recordings"), "no place 'evl1'"),
        (("mine.toml", "none.toml"), r"eval.wiring names .*none.toml, which cannot be read"),
        (("(?P<step>", "(?P<stop>"), "no group named step"),
        (("(?P<step>", "(?P<step"), "trainer.pattern is no regular expression"),
        (
            ("[trainer]", '[baseline]\nrun = "runs/none"\n[trainer]'),
            "baseline.run names .* which does not exist",
        ),
        (("fleet.toml", "flet.toml"), r"flet.toml cannot be read"),
    ],
)
def test_a_mistake_names_file_and_key(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=said) as raised:
        plan(tmp_path, GOOD.replace(*change))
    assert ".toml" in str(raised.value)


def test_the_last_line_that_matches_says_where_training_is(tmp_path: Path) -> None:
    log = "step 4,000 loss 2 | 19.1 Ktok/s\nsaved\nstep 5,329 loss 2 | 19.5 Ktok/s\nstep broken\n"
    assert trainer_state(plan(tmp_path), log) == {"step": 5329, "ktok_per_s": 19.5}
    assert trainer_state(plan(tmp_path), "nothing") == {}
