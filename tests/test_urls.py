"""Checkpoints by address: fetched once, into the cache, with what they were noted; through the whole instrument."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest

from draftgauge.checkpoint import open_checkpoint
from draftgauge.errors import CheckpointError
from draftgauge.evaluate import evaluate_checkpoint
from draftgauge.urls import Localised, localise
from tests import tiny
from tests.test_remotefiles import Shelf, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A hub of one repository, in a folder; remembers what was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.fetched = folder, list[str]()

    def files(self, repo: str, *, kind: str, revision: str | None) -> tuple[str, Sequence[str]]:
        assert (repo, kind) == ("lab/drafter", "model")
        return COMMIT, [
            str(p.relative_to(self.folder)) for p in sorted(self.folder.rglob("*")) if p.is_file()
        ]

    def fetch(self, repo: str, *, kind: str, commit: str, names: Sequence[str]) -> Path:
        assert commit == COMMIT
        self.fetched = list(names)
        return self.folder


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    folder = tmp_path / "hub"
    shutil.copytree(tiny.workshop() / "drafter", folder)
    for name in ("optimizer.pt", "README.md", "old/model.safetensors", "old/config.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    return Hub(folder)


@pytest.mark.parametrize(
    ("url", "path", "pinned", "names"),
    [
        ("hf://lab/drafter", "", False, ["config.json", "model.safetensors"]),
        ("hf://lab/drafter@main", "", False, ["config.json", "model.safetensors"]),
        (f"hf://lab/drafter@{COMMIT}", "", True, ["config.json", "model.safetensors"]),
        (f"hf://models/lab/drafter@{COMMIT}/old", "old", True, ["old/config.json", "old/model.safetensors"]),
        (
            "hf://lab/drafter@refs/pr/3/old/model.safetensors",
            "old/model.safetensors",
            False,
            ["old/config.json", "old/model.safetensors"],
        ),
    ],
)
def test_an_address_of_the_hub(url: str, path: str, pinned: bool, names: list[str], hub: Hub) -> None:
    assert localise(url, hub=hub) == Localised(hub.folder / path, url, COMMIT, pinned=pinned)
    assert sorted(hub.fetched) == names


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("hf://drafter", "names no repository of the hub; expected hf://OWNER/REPO"),
        ("hf://lab/drafter/nowhere", "holds no weights at nowhere; it holds README.md, config.json"),
    ],
)
def test_an_address_of_the_hub_that_means_nothing(url: str, text: str, hub: Hub) -> None:
    with pytest.raises(CheckpointError, match=text):
        localise(url, hub=hub)


def test_a_path_is_passed_through() -> None:
    assert localise("runs/step_1") == Localised(Path("runs/step_1"))
    assert localise(Path("runs/step_1")).path == Path("runs/step_1")
    assert localise("file:///runs/step%201").path == Path("/runs/step 1")


def test_a_file_is_fetched_once_and_again_when_it_changed(tmp_path: Path) -> None:
    shelf, cache = Shelf(), tmp_path / "cache"
    with serving(shelf) as url:
        first = localise(url, cache=cache, wait_s=0.01)
        asked = len(shelf.asked)
        assert localise(url, cache=cache, wait_s=0.01) == first
        assert len(shelf.asked) == asked + 1  # its headers, and not its bytes
        shelf.content, shelf.etag = b"another", '"two"'
        second = localise(url, cache=cache, wait_s=0.01)
    assert first.path.name == "step_4000.pt"
    assert (first.pinned, first.url) == (False, url)
    assert second.path.read_bytes() == b"another"
    assert first.path.read_bytes() != b"another"
    assert not list(cache.rglob(".partial-*"))


def test_a_drafter_in_a_store_is_measured_as_the_same_one_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run says what the address meant, that it may mean something else tomorrow, and is called by its name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shop, files = tiny.workshop(), fsspec.filesystem("memory")
    for name in ("config.json", "model.safetensors"):
        files.pipe(f"/lab/step_7/{name}", (shop / "drafter" / name).read_bytes())
    try:
        run = evaluate_checkpoint("memory://lab/step_7", tiny.recording().path, root=tmp_path / "runs")
    finally:
        files.rm("/lab", recursive=True)
    here = evaluate_checkpoint(shop / "drafter", tiny.recording().path, root=tmp_path / "here")
    assert run.plan == here.plan
    assert run.summary["policies"] == here.summary["policies"]
    assert run.path.name.startswith("step_7-")
    said = run.manifest["checkpoint"]
    assert said["url"] == "memory://lab/step_7"
    texts = {caveat["slug"]: caveat["text"] for caveat in run.summary["caveats"]}
    assert said["revision"] in texts["mutable-revision"]
    assert here.manifest["checkpoint"]["url"] is None
    assert "mutable-revision" not in {caveat["slug"] for caveat in here.summary["caveats"]}


def test_the_command_line_takes_an_address(tmp_path: Path) -> None:
    shelf = Shelf()
    shelf.content = (tiny.workshop() / "drafter" / "model.safetensors").read_bytes()
    with serving(shelf) as served:
        url = served.replace(".pt", ".safetensors")
        done = tiny.draftgauge("inspect", url, "--json", cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.returncode == 1
    assert f"{url} cannot be evaluated yet: its wiring is not known" in done.stderr  # no config came with it
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["file"]["url"] == url
    assert found["tensors"].keys() == open_checkpoint(tiny.workshop() / "drafter").tensors.keys()
