"""The fleet file: what is read from it, and that every mistake names the file and the key."""

from pathlib import Path

import pytest

from draftgauge.errors import FleetError
from draftgauge.fleet.places import ENTER, read_fleet, size_in_bytes

GOOD = """
[hosts.workstation]
keep_free = "5 GB"

[hosts.pve1]
ssh = "root@pve1"
reaches = { eval1 = "10.0.0.7" }

[hosts.eval1]
ssh = "eval1"
work = "/srv/draftgauge"
python = "/srv/venv/bin/python"
bandwidth = "50 MB/s"

[containers.ct200]
host = "pve1"
kind = "pct"
id = "200"

[containers.pod]
host = "eval1"
enter = ["kubectl", "exec", "-i", "-n", "ml", "trainer-0", "--"]
nice = 0
"""


def fleet(folder: Path, text: str = GOOD):
    file = folder / "fleet.toml"
    file.write_text(text)
    return read_fleet(file)


def test_what_a_file_says(tmp_path: Path) -> None:
    places = fleet(tmp_path).places
    assert sorted(places) == ["ct200", "eval1", "pod", "pve1", "workstation"]
    container = places["ct200"]
    assert (container.host, container.ssh, container.enter) == (
        "pve1",
        "root@pve1",
        ("pct", "exec", "200", "--"),
    )
    assert container.nice == 10, "a container gives way unless it is told otherwise"
    assert places["pod"].enter == ("kubectl", "exec", "-i", "-n", "ml", "trainer-0", "--")
    assert places["eval1"].bytes_per_s == 50_000_000
    assert (places["workstation"].ssh, places["workstation"].keep_free_bytes) == (None, 5 * 10**9)
    assert places["pve1"].reaches == {"eval1": "10.0.0.7"}


def test_without_a_file_the_workstation_is_there() -> None:
    assert list(read_fleet(None).places) == ["workstation"]


@pytest.mark.parametrize("kind", ENTER)
def test_every_kind_of_container_is_entered_with_its_own_words(kind: str, tmp_path: Path) -> None:
    text = f'[hosts.h]\nssh = "h"\n[containers.c]\nhost = "h"\nkind = "{kind}"\nid = "box"\n'
    enter = fleet(tmp_path, text).places["c"].enter
    assert "box" in enter
    assert "{id}" not in enter
    assert not {"-t", "-it", "--tty"} & set(enter), "a terminal changes bytes"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hosts = 3", "hosts must hold tables"),
        ("[machines.a]", r"unknown table \[machines\]"),
        ('[hosts.a]\nssh = "a"\nwrok = "/x"', "hosts.a: Object contains unknown field `wrok`"),
        ("[hosts.a]\nssh = 3", "hosts.a: Expected `str | null`, got `int`"),
        ("[hosts.a]", "hosts.a: `ssh` is missing"),
        ('[hosts.workstation]\nssh = "a"', "hosts.workstation.ssh"),
        ('[hosts.a]\nssh = "-oProxyCommand=x"', "hosts.a.ssh is '-oProxyCommand=x'"),
        ('[hosts.a]\nssh = "a b"', "must not begin with '-' or hold spaces"),
        ('[hosts."a b"]\nssh = "a"', "is no name for a place"),
        ('[hosts.a]\nssh = "a"\nwork = "data"', "hosts.a.work is 'data'; expected a whole path"),
        ('[hosts.a]\nssh = "a"\nkeep_free = "20 gigs"', "hosts.a.keep_free is '20 gigs'"),
        ('[hosts.a]\nssh = "a"\nbandwidth = "0 MB/s"', "hosts.a.bandwidth is 0"),
        ('[hosts.a]\nssh = "a"\nnice = 40', r"hosts.a: Expected `int` <= 19 - at `\$.nice`"),
        ('[hosts.a]\nssh = "a"\nreaches = { b = "c" }', "hosts.a.reaches names 'b', which is no host"),
        ('[containers.c]\nhost = "a"\nkind = "pct"\nid = "1"', "containers.c.host is 'a'; expected one of"),
        ('[containers.c]\nhost = "workstation"', "give either `kind` with `id`, or `enter`"),
        (
            '[containers.c]\nhost = "workstation"\nkind = "vm"\nid = "1"',
            "containers.c.kind is 'vm'; expected one of",
        ),
        ('[containers.c]\nhost = "workstation"\nkind = "pct"', "containers.c: `id` is missing"),
        ('[containers.c]\nhost = "workstation"\nkind = "pct"\nid = "--help"', "containers.c.id is '--help'"),
        ('[containers.c]\nhost = "workstation"\nenter = []', "containers.c.enter is empty"),
        ('[hosts.a]\nssh="a"\n[containers.a]\nhost="a"\nkind="pct"\nid="1"', "both a host and a container"),
        ("[hosts", "is not TOML"),
    ],
)
def test_a_mistake_names_file_and_key(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=said) as raised:
        fleet(tmp_path, text)
    assert "fleet.toml" in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=r"none.toml cannot be read"):
        read_fleet(tmp_path / "none.toml")


def test_what_a_spot_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fleet(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert str(made.spot("ct200:/data/a b.pt")) == "ct200:/data/a b.pt"
    assert made.spot("eval1:recordings/x/").path == "/srv/draftgauge/recordings/x"
    assert made.spot("relative").path == str(tmp_path / "relative")
    assert made.spot("./eval1:x").place.name == "workstation"
    assert str(made.spot("workstation:x")) == str(tmp_path / "x")
    assert made.spot("eval1:a:b").path == "/srv/draftgauge/a:b"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("evl1:/x", r"no place 'evl1'.*Did you mean eval1\?"),
        ("ct200:relative", "ct200 has no `work` folder"),
        ("ct200:", "names no path"),
        ("ct200:/a\0b", "names no path"),
    ],
)
def test_a_spot_that_means_nothing_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=said):
        fleet(tmp_path).spot(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [("20 GB", 20 * 10**9), ("1.5 MB/s", 1_500_000), ("7kB", 7000), ("12", 12), ("2 TB", 2 * 10**12)],
)
def test_sizes(text: str, count: int) -> None:
    assert size_in_bytes(text, where="x") == count
