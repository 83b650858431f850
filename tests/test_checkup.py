"""The look at a fleet: what every place answers, and that one that does not answer hides no other."""

import json
import sys
from pathlib import Path

from draftgauge.fleet.checkup import check_fleet
from draftgauge.fleet.places import read_fleet
from draftgauge.fleet.reach import reaching
from draftgauge.report.fleet import fleet_report
from tests.transports import programs_without_python

TEXT = f"""
[containers.good]
host = "workstation"
enter = ["env"]
work = "/var/tmp/draftgauge-none/yet"
python = {json.dumps(sys.executable)}

[containers.bare]
host = "workstation"
enter = ["env", "PATH={programs_without_python()}"]
work = "/var/tmp"

[containers.broken]
host = "workstation"
enter = ["sh", "-c", "echo 'no such container' >&2; exit 3", "sh"]
"""


def test_what_every_place_answers(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(TEXT)
    with reaching(read_fleet(tmp_path / "fleet.toml")) as reach:
        value = check_fleet(reach)
    places = value["places"]
    assert places["good"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert places["good"]["draftgauge"]
    assert places["good"]["space"]["folder"] == "/var/tmp"
    assert places["good"]["space"]["free_bytes"] > 0
    assert (places["bare"]["python"], places["bare"]["draftgauge"], places["bare"]["problem"]) == (
        None,
        "",
        "",
    )
    assert places["bare"]["space"]["writable"] is True
    assert "no such container" in places["broken"]["problem"]
    assert {(route["from"], route["to"]) for route in value["routes"]} == {("good", "bare"), ("bare", "good")}
    assert value["ways"] == []
    said = fleet_report(value)
    assert "! broken: " in said
    assert max(map(len, said.splitlines())) <= 80
