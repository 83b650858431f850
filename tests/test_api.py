"""The package as it is imported: its names, and the verbs of the command line as functions."""

import subprocess
import sys

import pytest

import draftgauge as dg
from tests import tiny


def test_every_public_name_loads_and_is_listed() -> None:
    assert dg.__all__ == sorted(dg.__all__)
    assert set(dg.__all__) <= set(dir(dg))
    assert all(callable(getattr(dg, name)) for name in dg.__all__)


@pytest.mark.parametrize(
    "code",
    [
        "import draftgauge.compare",
        "from draftgauge.compare import compare",
        "import draftgauge; draftgauge.compare",
        "import importlib; importlib.import_module('draftgauge.compare')",
    ],
)
def test_a_module_never_hides_the_function_of_its_name(code: str) -> None:
    check = "import draftgauge as dg; assert dg.compare.__qualname__ == 'compare', dg.compare"
    subprocess.run([sys.executable, "-c", f"{code}\n{check}\n{check}"], check=True, env=tiny.environment())


def test_a_name_that_is_not_there_is_named() -> None:
    with pytest.raises(AttributeError, match="module 'draftgauge' has no attribute 'evalute'"):
        _ = dg.evalute


def test_a_notebook_opens_measures_and_compares_in_a_few_lines() -> None:
    recording = tiny.recording()
    wiring = dg.Stated(block_size=4)

    full = dg.evaluate(tiny.workshop() / "drafter", recording.path, root=tiny.workshop() / "runs")
    quick = dg.Options(policies=(dg.Policy("chain"),), num_prompts=2)
    few = dg.evaluate(
        str(tiny.workshop() / "drafter"), str(recording.path), quick, root=str(tiny.workshop() / "runs")
    )
    value = dg.compare(few, dg.open_run(full.path))

    assert value["policies"]["chain"]["tau_response"]["difference"]["value"] == 0
    assert value["dropped"] == ["long", "pair", "three", "four"]
    assert full.blocks().num_rows == sum(item.completion_len - 1 for item in recording.items)
    assert {run.name for run in dg.list_runs(tiny.workshop() / "runs")} >= {full.name, few.name}
    assert dg.open_checkpoint(tiny.workshop() / "drafter").tensors["fc.weight"].shape == (64, 128)
    with pytest.raises(dg.DraftgaugeError, match="block size: 4 in"):
        other = dg.evaluate(
            tiny.workshop() / "drafter", recording.path, dg.Options(wiring), root=tiny.workshop() / "runs"
        )
        dg.compare(other, full)
