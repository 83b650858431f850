"""The table of formats: complete, printed, and in the documents."""

import json
from pathlib import Path

from draftgauge.engines.kinds import KINDS
from draftgauge.engines.logs import FORMS as LOGS
from draftgauge.exporting import FORMATS
from draftgauge.featurefiles import FORMS
from draftgauge.formats import formats
from draftgauge.keys import FAMILIES
from draftgauge.report.formats import formats_markdown, formats_report
from tests import tiny

PEERS = Path(__file__).parent / "peer_saves"


def of(kind: str) -> list[str]:
    return [row.format for row in formats() if row.kind == kind]


def test_everything_that_is_read_or_written_has_a_row() -> None:
    assert {row.written for row in formats()} >= {f"export --to {name}" for name in FORMATS}
    assert {form.description for form in FORMS.values()} < set(of("features"))
    assert {family.name for family in FAMILIES} < set(of("drafter"))
    assert len(of("engine")) == len(KINDS)
    assert len(of("counts")) == len(LOGS) + 1  # the lines of a log are no JSON
    assert {row.kind for row in formats()} == {
        "drafter",
        "features",
        "prompts",
        "engine",
        "counts",
        "results",
    }


def test_what_a_project_is_named_for_was_written_by_it() -> None:
    """A version in the table stands for files of that project's own in the tests."""
    said = {row.checked for row in formats() if row.kind == "drafter"}
    for name, folder in (
        ("specforge 0.2.0", "specforge"),
        ("dflash 0.1.0", "zlab"),
        ("transformers 5.19.0", None),
    ):
        assert name in said
        assert (PEERS / (folder or "transformers")).is_dir()


def test_the_table_reads_at_eighty_columns_and_as_markdown(tmp_path: Path) -> None:
    rows = [vars(row) for row in formats()]
    text = formats_report(rows)
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("drafter\n  z-lab: config.json")
    lines = formats_markdown(rows).splitlines()
    assert len(lines) == len(rows) + 2
    assert {line.replace("\\|", "").count("|") for line in lines} == {6}
    assert json.loads(tiny.draftgauge("formats", "--json", cwd=tmp_path).stdout) == rows
    assert tiny.draftgauge("formats", cwd=tmp_path).stdout == text + "\n"
