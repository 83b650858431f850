"""Our own command line at another place: its output, its exit code, its last lines."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftgauge.errors import FleetError, UnfinishedError
from draftgauge.fleet.places import read_fleet
from draftgauge.fleet.reach import Reach, reaching
from draftgauge.fleet.remote import draftgauge_at, version_at

#: Stands in for an interpreter that holds another draftgauge: says something, prints, and ends with a code.
STANDS_IN = """#!/bin/sh
case "$*" in *metadata*) exit 1 ;; esac
echo 'first line' >&2; echo 'last line' >&2
printf '%s' '{out}'
exit {code}
"""


@pytest.fixture
def reach(tmp_path: Path) -> Iterator[Reach]:
    text = ""
    for name, out, code in (
        ("gate", '{"a": 1}', 4),
        ("words", "words", 0),
        ("later", "", 5),
        ("wrong", "", 1),
    ):
        script = tmp_path / name
        script.write_text(STANDS_IN.format(out=out, code=code))
        script.chmod(0o755)
        text += f'[containers.{name}]\nhost = "workstation"\nenter = ["env"]\npython = "{script}"\n'
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    with reaching(read_fleet(file)) as opened:
        opened.without_python.update(dict.fromkeys(opened.fleet.places, False))
        yield opened


def answer(reach: Reach, name: str, said: list[str]):
    return draftgauge_at(reach, reach.fleet.place(name), ("eval", "a b"), said=said.append)


def test_a_failed_gate_is_a_result(reach: Reach) -> None:
    said: list[str] = []
    done = answer(reach, "gate", said)
    assert (done.value, done.code) == ({"a": 1}, 4)
    assert said == ["gate: first line", "gate: last line"]


def test_what_is_no_json_is_an_error(reach: Reach) -> None:
    with pytest.raises(FleetError, match="words: draftgauge eval printed no JSON"):
        answer(reach, "words", [])


def test_what_asks_to_be_run_again_is_passed_on(reach: Reach) -> None:
    with pytest.raises(UnfinishedError, match="last line"):
        answer(reach, "later", [])


def test_an_error_names_the_place_and_what_it_said(reach: Reach) -> None:
    with pytest.raises(
        FleetError, match=r"wrong: draftgauge eval ended with exit code 1:\n  first line\n  last line"
    ):
        answer(reach, "wrong", [])


def test_a_python_without_draftgauge_says_what_to_do(tmp_path: Path) -> None:
    script = tmp_path / "plain python"
    script.write_text(f'#!/bin/sh\nexec {sys.base_prefix}/bin/python3 -I -S "$@"\n')
    script.chmod(0o755)
    file = tmp_path / "fleet.toml"
    file.write_text(f'[containers.a]\nhost = "workstation"\nenter = ["env"]\npython = "{script}"\n')
    with reaching(read_fleet(file)) as reach:
        with pytest.raises(FleetError, match="Install draftgauge there, or name its Python"):
            draftgauge_at(reach, reach.fleet.place("a"), ("runs",), said=lambda _: None)
        assert version_at(reach, reach.fleet.place("a")) == ""
        assert version_at(reach, reach.fleet.place("workstation"))
