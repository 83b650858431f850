"""The package as it is imported: its names, and the verbs of the command line as functions."""

import pytest

import draftgauge as dg
from tests import tiny


def test_every_public_name_loads_and_is_listed() -> None:
    assert dg.__all__ == sorted(dg.__all__)
    assert set(dg.__all__) <= set(dir(dg))
    assert all(callable(getattr(dg, name)) for name in dg.__all__)


def test_a_name_that_is_not_there_is_named() -> None:
    with pytest.raises(AttributeError, match="module 'draftgauge' has no attribute 'evalute'"):
        _ = dg.evalute


def test_a_notebook_opens_measures_and_compares_in_a_few_lines() -> None:
    drafter, recording, root = tiny.workshop() / "drafter", tiny.recording(), tiny.workshop() / "runs"

    full = dg.evaluate_checkpoint(drafter, recording.path, root=root)
    quick = dg.Options(policies=(dg.Policy("chain"),), num_prompts=2)
    few = dg.evaluate_checkpoint(str(drafter), str(recording.path), quick, root=str(root))
    value = dg.compare_runs(few, dg.open_run(full.path))

    assert value["policies"]["chain"]["tau_response"]["difference"]["value"] == 0
    assert list(value["dropped"]) == ["long", "pair", "three", "four"]
    assert full.blocks().num_rows == sum(item.completion_len - 1 for item in recording.items)
    assert {run.name for run in dg.list_runs(root)} >= {full.name, few.name}
    assert dg.open_checkpoint(drafter).tensors["fc.weight"].shape == (64, 128)

    other = dg.evaluate_checkpoint(drafter, recording.path, dg.Options(dg.Stated(block_size=4)), root=root)
    with pytest.raises(dg.DraftgaugeError, match="block size: 4 in"):
        dg.compare_runs(other, full)
