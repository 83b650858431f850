"""The published schemas: what the commands print and what a run holds is what they say, with no key besides."""

import copy
import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from referencing import Registry, Resource

from draftgauge.cli import cli
from tests import planted, tiny
from tests.test_crosscheck import asked, log_of, served
from tests.test_sweep import plan

FOLDER = files("draftgauge") / "schemas"
SCHEMAS: dict[str, dict[str, Any]] = {
    file.name.removesuffix(".json"): json.loads(file.read_text(encoding="utf-8")) for file in FOLDER.iterdir()
}
PAGE = Path(__file__).parents[1] / "docs" / "results.md"


@cache
def registry() -> Registry[Any]:
    return Registry().with_resources(
        [(schema["$id"], Resource.from_contents(schema)) for schema in SCHEMAS.values()]
    )


def require_valid(name: str, value: Any) -> None:
    Draft202012Validator(SCHEMAS[name], registry=registry()).validate(value)


def printed(*arguments: object) -> Any:
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the tiny drafter: on all anchors, on walks, with another block size; one damaged; and outputs."""
    folder = tmp_path_factory.mktemp("schemas")
    recording, runs = tiny.recording().path, folder / "runs"
    drafter = tiny.workshop() / "drafter"
    trainer = tiny.trainer_pt(folder / "step_7" / "checkpoint.pt", step=7, config=tiny.drafter_config())
    (folder / "stored.json").write_text('{"vanilla": 3.1, "DDTree top-4": 4.0, "unheard of": 1.0}')

    def keep(name: str, *arguments: object) -> None:
        (folder / f"{name}.json").write_text(json.dumps(printed(*arguments)))

    def evaluated(name: str, checkpoint: Path, *asked: object) -> None:
        to = ("--recording", recording, "--runs", runs, "--name", name, "--json")
        keep(name, "eval", checkpoint, *to, *asked)

    evaluated("full", drafter, "--gate", "tau>=1", "--gate", "tau>=100", "--beside", folder / "stored.json")
    evaluated("walk", trainer, "--anchors", "walk", "--num-prompts", 2)
    evaluated("blocks", drafter, "--block-size", 4)
    (runs / "damaged").mkdir()
    (runs / "damaged" / "run.json").write_text("{")
    on = (drafter, "--recording", recording, "--json")
    keep("check", "check", *on)
    keep("diagnose", "diagnose", *on)
    keep("crosscheck", "crosscheck", *on, "--target", tiny.workshop() / "target")
    keep("export", "export", drafter, folder / "served", "--to", "zlab", "--json")
    return folder


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_each_schema_is_one_and_says_its_version() -> None:
    assert "summary" in SCHEMAS
    for name, schema in SCHEMAS.items():
        Draft202012Validator.check_schema(schema)
        assert schema["$id"] == f"urn:draftgauge:schema:{name}:{schema['version']}"
        assert schema["description"]


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Every part of a schema that names properties."""
    if isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict) and "type" in schema:
            yield schema
        for part in schema.values():
            yield from objects(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from objects(part)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_object_that_names_its_keys_has_no_others(name: str) -> None:
    for part in objects(SCHEMAS[name]):
        assert part["additionalProperties"] is False
        assert set(part["required"]) <= set(part["properties"])


@pytest.mark.parametrize("run", ["full", "walk", "blocks"])
def test_a_run_and_what_shows_it(run: str, folder: Path) -> None:
    require_valid("run", read(folder / "runs" / run / "run.json"))
    require_valid("summary", read(folder / "runs" / run / "summary.json"))
    require_valid("show", read(folder / f"{run}.json"))
    require_valid("show", printed("show", folder / "runs" / run, "--json"))


@pytest.mark.parametrize("name", ["check", "diagnose", "crosscheck", "export"])
def test_what_a_command_prints(name: str, folder: Path) -> None:
    require_valid(name, read(folder / f"{name}.json"))


def test_a_server_and_a_log_held_beside_the_replay(tmp_path: Path) -> None:
    """A server whose texts part, and a log of other text."""
    pair = planted.shared_pair()
    accepted = {item.id: [0] * item.completion_len for item in pair.recording.items}
    texts = {item.id: [1, 2, 3] for item in pair.recording.items}
    log = log_of(tmp_path / "log.jsonl", {f"other{i}": [0, 0, 1] for i in range(8)})
    value = asked(pair, served(pair, accepted, texts), log=log)
    assert value["served"]["texts"]["parted"]
    require_valid("crosscheck", json.loads(json.dumps(value)))


def test_a_better_wiring_that_was_found(tmp_path: Path) -> None:
    drafter = tiny.drafter_dir(tmp_path / "drafter", rope_theta=20.0)
    value = printed("diagnose", drafter, "--recording", tiny.recording().path, "--json")
    assert value["changes"]
    require_valid("diagnose", value)


@pytest.mark.parametrize("checkpoint", ["drafter", "unknown"])
def test_what_a_file_holds(checkpoint: str, tmp_path: Path) -> None:
    path = tiny.workshop() / "drafter"
    if checkpoint == "unknown":  # nothing says how these weights are wired
        path = tiny.trainer_pt(tmp_path / "checkpoint.pt")
    value = printed("inspect", path, "--json")
    assert (value["wiring"] is None) == (checkpoint == "unknown")
    require_valid("inspect", value)


def test_two_runs_compared(folder: Path) -> None:
    require_valid(
        "compare", printed("compare", folder / "runs" / "full", folder / "runs" / "walk", "--json") or {}
    )


def test_lists_name_what_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    runs = printed("runs", "--runs", folder / "runs", "--json")
    require_valid("runs", runs)
    assert {run["name"]: run["reason"] is None for run in runs} == {
        "full": True,
        "walk": True,
        "blocks": True,
        "damaged": False,
    }
    tiny.copied_recording(tmp_path / "good")
    (tiny.copied_recording(tmp_path / "cut").path / "recording.json").write_text("{")
    recordings = printed("recordings", "--recordings", tmp_path, "--json")
    require_valid("recordings", recordings)
    assert [recording["reason"] is None for recording in recordings] == [False, True]
    assert recordings[0]["prompts"] is None


def test_what_came_of_a_sweep(tmp_path: Path) -> None:
    """One checkpoint that is measured, one that cannot be; and a key that no schema names."""
    path = plan(tmp_path, "[eval]\nnum_prompts = 1\n", checkpoints=["out/step_8", "out/step_90"])
    (tmp_path / "out" / "step_90" / "checkpoint.pt").write_bytes(b"cut short")
    value = printed("sweep", path, "--runs", tmp_path / "runs", "--json")
    assert [row["reason"] is None for row in value] == [True, False]
    require_valid("sweep", value)
    value[1]["surprise"] = 1
    with pytest.raises(ValidationError, match="surprise"):
        require_valid("sweep", value)


@pytest.mark.parametrize("name", ["check", "crosscheck", "diagnose", "export"])
def test_a_key_that_no_schema_names_is_noticed(name: str, folder: Path) -> None:
    value = read(folder / f"{name}.json")
    value["surprise"] = 1
    with pytest.raises(ValidationError, match="surprise"):
        require_valid(name, value)


def test_a_key_is_noticed_at_any_depth_of_a_summary(folder: Path) -> None:
    summary = read(folder / "runs" / "full" / "summary.json")
    paths = [(), ("per_depth",), ("reference",), ("trust",), ("trust", "controls", 0), ("caveats", 0)]
    paths += [("policies", "chain"), ("policies", "chain", "tau_response"), ("policies", "chain", "counts")]
    paths += [("prompts", "one"), ("prompts", "one", "policies", "chain")]
    for path in paths:
        changed = copy.deepcopy(summary)
        part = changed
        for key in path:
            part = part[key]
        part["surprise"] = 1
        with pytest.raises(ValidationError, match="surprise"):
            require_valid("summary", changed)


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_page_links_each_schema(name: str) -> None:
    assert f"(../src/draftgauge/schemas/{name}.json)" in PAGE.read_text(encoding="utf-8")
