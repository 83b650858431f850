"""The command line in processes of its own: what goes to stdout, what to stderr, and every exit code."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import draftgauge as dg
from draftgauge.acceptance import Policy
from draftgauge.cli import cli
from draftgauge.errors import InputError
from draftgauge.evaluate import Options
from tests import tiny
from tests.test_stated import UNSAID

Done = subprocess.CompletedProcess[str]


def toml(fields: dict[str, Any]) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items())


@cache
def desk() -> Path:
    """A folder that a user works in: target, drafter, prompts."""
    folder = tiny.workshop() / "desk"
    tiny.target_dir(folder / "target", stops=[tiny.STOP])
    tiny.drafter_dir(folder / "drafter")
    tiny.prompts_file(folder / "prompts.jsonl")
    return folder


def draftgauge(*arguments: object, **variables: str) -> Done:
    return tiny.draftgauge(*arguments, cwd=desk(), **variables)


def value_of(done: Done) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@cache
def recorded() -> Done:
    asked = ("--prompts", "prompts.jsonl", "--checkpoint", "drafter", "--max-new-tokens", tiny.NEW_TOKENS)
    return draftgauge("record", "--target", "target", *asked, "--json")


def recording() -> str:
    path: str = value_of(recorded())["path"]
    return path


@cache
def evaluated() -> Done:
    asked = (
        "--recording",
        recording(),
        "--budgets",
        "4,16,1024",
        "--chain-lengths",
        "2,4",
        "--coverage",
        "2",
    )
    return draftgauge("eval", "drafter", *asked, "--json")


# --- one session ---------------------------------------------------------------------------------------------


def test_a_recording_is_made_and_listed() -> None:
    value = value_of(recorded())
    assert [item["id"] for item in value["items"]] == list(tiny.PROMPTS)
    assert value["plan"]["taps"] == [1, 3]
    assert "record: 100%" in recorded().stderr
    (listed,) = value_of(draftgauge("recordings", "--json"))
    assert listed == {"path": value["path"], "prompts": list(tiny.PROMPTS), "reason": None}
    text = draftgauge("recordings")
    assert "6 prompt(s) of prompts.jsonl, 141 reference tokens" in text.stdout
    assert text.stderr == ""


def test_a_run_has_the_numbers_of_the_python_call() -> None:
    value = value_of(evaluated())
    assert "evaluate: 100%" in evaluated().stderr
    policies = [Policy("chain"), Policy("chain", 2), Policy("chain", 4), Policy("coverage", 2)]
    policies += [Policy("ddtree", n) for n in (4, 16, 1024)]
    run = dg.evaluate_checkpoint(
        desk() / "drafter",
        desk() / recording(),
        Options(policies=tuple(policies)),
        root=tiny.workshop() / "desk runs",
    )
    assert run.plan.digest == value["run"]["plan_digest"]
    assert json.loads(json.dumps(run.summary)) == value["summary"]
    assert list(value["summary"]["policies"]) == [
        *("chain", "chain2", "chain4", "ddtree4", "ddtree16", "ddtree1024"),
        *("coverage2", "coverage4", "coverage8"),
    ]


def test_runs_are_listed_shown_and_compared_without_measuring_again() -> None:
    path = value_of(evaluated())["path"]
    (listed,) = value_of(draftgauge("runs", "--json"))
    assert listed["path"] == path
    assert value_of(draftgauge("show", path, "--json")) == value_of(evaluated())
    shown = draftgauge("show", path)
    assert shown.stderr == ""
    assert "DDTree(1024)" in shown.stdout
    assert shown.stdout.rstrip().endswith(f"kept in {path}")
    assert Path(path).name in draftgauge("runs").stdout
    value = value_of(draftgauge("compare", path, path, "--json"))
    assert value["policies"]["chain"]["tau_response"]["difference"]["value"] == 0
    assert "paired on 6 prompt(s)" in draftgauge("compare", path, path).stdout


def test_the_same_command_answers_from_the_run_that_is_there() -> None:
    asked = (
        "--recording",
        recording(),
        "--budgets",
        "16,4,1024",
        "--chain-lengths",
        "4,2",
        "--coverage",
        "2",
    )
    again = draftgauge("eval", "drafter", *asked, "--json")
    assert value_of(again) == value_of(evaluated())
    assert "evaluate:" not in again.stderr


def test_a_quick_run_says_that_it_is_one() -> None:
    asked = ("--num-prompts", 2, "--max-blocks", 5, "--block-size", 4, "--budgets", "4", "--anchors", "walk")
    done = draftgauge(
        "eval", "drafter", "--recording", recording(), *asked, "--runs", "quick", "--name", "quick"
    )
    assert done.returncode == 0, done.stderr
    for slug in (
        "prompts-incomplete",
        "few-prompts",
        "anchors-limited",
        "block-size-differs",
        "walk-anchors",
    ):
        assert f"[{slug}]" in done.stdout
    refused = draftgauge("compare", "quick/quick", value_of(evaluated())["path"])
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "block size: 4 in quick, 8 in" in refused.stderr
    assert "--max-blocks: 5 in quick, no limit in" in refused.stderr


def test_a_drafter_is_trained() -> None:
    plan = ("--steps", 6, "--save-steps", "3", "--mask-token-id", 255, "--block-size", 4, "--seed", 5)
    asked = ("train", "--recording", recording(), "--out", "training", *plan, "--json")
    assert value_of(draftgauge(*asked)) == {
        "checkpoint": "training/step_6",
        "steps": 6,
        "log": "training/train.jsonl",
    }
    assert (desk() / "training" / "step_3" / "checkpoint.pt").is_file()
    other = draftgauge(*asked, "--learning-rate", "0.1")
    assert other.returncode == 1
    assert "learning_rate is 0.001, not 0.1" in other.stderr


# --- inspect ---------------------------------------------------------------------------------------------------


@cache
def bare() -> Path:
    return tiny.trainer_pt(desk() / "step_7" / "checkpoint.pt", step=7)


def test_inspect_says_what_would_be_measured() -> None:
    done = draftgauge("inspect", "drafter")
    assert done.returncode == 0, done.stderr
    assert "config.json: dflash_config.target_layer_ids" in done.stdout
    value = value_of(draftgauge("inspect", "drafter", "--json", "--block-size", 4))
    assert value["wiring"]["block_size"] == {"value": 4, "source": "--block-size (trained: 8)"}


def test_inspect_asks_for_what_nobody_says_until_it_is_stated() -> None:
    bare()
    asked = draftgauge("inspect", "step_7")
    assert asked.returncode == 1
    for field in set(UNSAID) - {"num_target_layers"}:
        assert f"\n  {field} = " in asked.stdout
    assert "cannot be evaluated yet: its wiring is not known, see above" in asked.stderr
    assert json.loads(draftgauge("inspect", "step_7", "--json").stdout)["wiring"] is None

    (desk() / "mine.toml").write_text(toml({name: UNSAID[name] for name in UNSAID if name != "taps"}))
    stated = draftgauge("inspect", "step_7", "--wiring", "mine.toml", "--taps", "1,3", "--json")
    wiring = value_of(stated)["wiring"]
    assert wiring["taps"] == {"value": [1, 3], "source": "--taps"}
    assert wiring["rope_theta"]["source"] == "--wiring mine.toml: rope_theta"
    assert value_of(stated)["file"]["step"] == 7


def test_a_bare_file_is_measured_as_what_it_was_stated_to_be() -> None:
    bare()
    (desk() / "all.toml").write_text(toml(UNSAID))
    asked = ("--recording", recording(), "--budgets", "4", "--num-prompts", 1, "--runs", "stated")
    done = draftgauge("eval", "step_7", "--wiring", "all.toml", *asked, "--json")
    theirs = value_of(evaluated())["summary"]["prompts"]["one"]["policies"]
    ours = value_of(done)["summary"]["prompts"]["one"]["policies"]
    assert ours == {slug: theirs[slug] for slug in ("chain", "ddtree4", "coverage4", "coverage8")}
    assert value_of(done)["run"]["checkpoint"]["step"] == 7


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            toml({**UNSAID, "rope_base": 1.0}),
            "--wiring w.toml: unknown wiring field(s) rope_base; known: taps",
        ),
        ("taps = [1, ", "--wiring w.toml is not TOML"),
        (None, "--wiring w.toml cannot be read: No such file or directory"),
        (
            toml({**UNSAID, "taps": "all"}),
            "wiring field taps = 'all' cannot be read: expected a whole number",
        ),
    ],
    ids=["unknown", "no TOML", "missing", "type"],
)
def test_a_wiring_file_that_cannot_be_used_is_named(content: str | None, message: str) -> None:
    bare()
    (desk() / "w.toml").unlink(missing_ok=True)
    if content is not None:
        (desk() / "w.toml").write_text(content)
    done = draftgauge("inspect", "step_7", "--wiring", "w.toml")
    assert done.returncode == 1
    assert message in " ".join((done.stdout + done.stderr).split())  # wherever lines were broken


def test_weights_that_cannot_be_measured_are_told_and_fail() -> None:
    state = tiny.weights()
    state["fc.weight"][0, 0] = torch.nan
    tiny.trainer_pt(desk() / "nan.pt", state, config=tiny.drafter_config())
    done = draftgauge("inspect", "nan.pt", "--json")
    assert done.returncode == 1
    (problem,) = json.loads(done.stdout)["problems"]
    assert "fc.weight: 1 of 8192 values are NaN or infinite" in problem
    assert "cannot be evaluated as it is" in done.stderr


# --- exit codes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("show nowhere", "nowhere holds no run.json"),
        ("inspect nowhere", "nowhere"),
        ("eval nowhere --recording nowhere", "nowhere"),
        ("eval drafter --recording nowhere", "nowhere is not a folder"),
        ("train --recording nowhere --out o --steps 1 --mask-token-id 3", "nowhere is not a folder"),
        ("record --target nowhere --prompts prompts.jsonl --taps 1", "target nowhere is not"),
        ("record --target target --prompts nowhere --taps 1", "prompt file nowhere does not exist"),
    ],
)
def test_what_was_given_is_wrong(arguments: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk())
    with pytest.raises(InputError, match=re.escape(message)):
        CliRunner().invoke(cli, arguments.split(), catch_exceptions=False)


def test_1_is_said_in_one_line() -> None:
    done = draftgauge("show", "nowhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: nowhere holds no run.json")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("measure", "No such command 'measure'"),
        ("eval drafter", "--recording FOLDER or --like RUN"),
        ("eval drafter --recording r --budgets 4,x", "'4,x' is not a list of whole numbers like 4,8,16"),
        ("eval drafter --recording r --budgets 0,4", "'0,4' holds a number below 1"),
        ("eval drafter --recording r --num-prompts 0", "'0' holds a number below 1"),
        ("eval drafter --recording r --max-blocks many", "'many' is not a list of whole numbers"),
        ("eval drafter --recording r --num-prompts 1,2", "'1,2' is not a whole number"),
        ("eval drafter --recording r --dtype float16", "'float16' is not one of"),
        ("inspect drafter --taps=-2", "'-2' holds a number below -1"),
        ("record --target target --prompts prompts.jsonl", "--checkpoint CHECKPOINT or --taps N,N,..."),
    ],
)
def test_usage_is_explained(arguments: str, message: str) -> None:
    done = CliRunner().invoke(cli, arguments.split())
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.parametrize("arguments", ["", "eval drafter"])
def test_2_goes_to_stderr(arguments: str) -> None:
    done = draftgauge(*arguments.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: draftgauge")


BROKEN = """
from draftgauge.cli import cli, main
@cli.command()
def broken():
    raise ZeroDivisionError("of ours")
main()
"""


def broken(state: Path | str) -> Done:
    return subprocess.run(
        [sys.executable, "-c", BROKEN, "broken"],
        env=tiny.environment(XDG_STATE_HOME=str(state)),
        capture_output=True,
        text=True,
        check=False,
    )


def test_3_an_error_of_ours_writes_a_log_and_names_it(tmp_path: Path) -> None:
    done = broken(tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    (log,) = (tmp_path / "draftgauge").iterdir()
    assert done.stderr == f"internal error (ZeroDivisionError), please report it with the log {log}\n"
    text = log.read_text()
    assert "argv: ['-c', 'broken']" in text
    assert f"'torch': '{torch.__version__}'" in text
    assert text.endswith("ZeroDivisionError: of ours\n")


def test_3_where_no_log_can_be_written_it_is_shown() -> None:
    done = broken("/dev/null")
    assert done.returncode == 3
    assert "please report it with this:\nargv: " in done.stderr
    assert "ZeroDivisionError: of ours" in done.stderr


def test_4_a_prompt_that_failed_makes_a_recording_incomplete() -> None:
    prompts = [{"id": "good", "prompt_ids": [26]}, {"id": "bad", "prompt_ids": [999]}]
    (desk() / "two.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    done = draftgauge(
        "record", "--target", "target", "--prompts", "two.jsonl", "--taps", "1,3", "--recordings", "two"
    )
    assert done.returncode == 4
    assert "1 prompt(s) of two.jsonl" in done.stdout
    assert "! bad was not recorded: a token id is outside the target's vocabulary of 256" in done.stdout
    assert "error: 1 of 2 prompts could not be recorded" in done.stderr
    (found,) = json.loads(draftgauge("recordings", "--recordings", "two", "--json").stdout)
    asked = ("--recording", found["path"], "--budgets", "4", "--runs", "two-runs")
    assert "1 of 2 prompts were evaluated" in draftgauge("eval", "drafter", *asked).stdout


def interruptible(*arguments: object) -> list[str]:
    """The command with the handler of an interactive shell, which a shell in the background takes away."""
    code = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('draftgauge', run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-c", code, *map(str, arguments)]


def test_130_interrupted(tmp_path: Path) -> None:
    out = tmp_path / "training"
    asked = ("--recording", desk() / recording(), "--out", out, "--steps", 1000000, "--mask-token-id", 255)
    command = interruptible("train", *asked)
    with subprocess.Popen(command, env=tiny.environment(), stderr=subprocess.PIPE, text=True) as process:
        log = out / "train.jsonl"
        while process.poll() is None and not (log.exists() and log.stat().st_size):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.endswith("interrupted\n")
    assert "Traceback" not in stderr


def test_a_reader_that_leaves_early_is_no_error_of_ours() -> None:
    path = value_of(evaluated())["path"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        tiny.command("show", path, "--json"),
        cwd=desk(),
        env=tiny.environment(),
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert done.returncode != 3
    assert done.stderr == ""
