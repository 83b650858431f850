"""Hidden states of references: what the servers return is kept as it is, and what they leave out is noticed."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftgauge.engines.references import Wanted, fetch_references, read_references
from draftgauge.engines.states import fetch_states, file_of
from draftgauge.errors import BeingWrittenError, EngineError, PromptError, StoreError
from draftgauge.tensorfile import read_safetensors
from tests.engine_servers import Sglang, StandIn, Vllm, engine, states
from tests.tiny import prompt_set

NAMES = ["one", "five", "pair"]


@pytest.fixture
def references(tmp_path: Path) -> Path:
    out = tmp_path / "refs.jsonl"
    with engine(Vllm()) as found:
        fetch_references(found, prompt_set(NAMES), out=out, wanted=Wanted(max_new_tokens=8, concurrency=1))
    return out


def a_server(name: str, tmp_path: Path, *faults: str) -> StandIn:
    (tmp_path / "served").mkdir(exist_ok=True)
    return (
        Sglang(faults={*faults}) if name == "sglang" else Vllm(faults={*faults}, folder=tmp_path / "served")
    )


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_states_of_every_row_are_kept(name: str, references: Path, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    with engine(a_server(name, tmp_path)) as found:
        seen = fetch_states(found, references, folder=folder)
    assert (seen.asked, seen.there, seen.failed) == (3, 0, {})
    for index, row in enumerate(read_references(references)):
        tensors, metadata = read_safetensors(folder / file_of(index))
        tokens = [*row["prompt_ids"], *row["completion_ids"]]
        assert (metadata["id"], metadata["prompt_len"]) == (row["id"], str(len(row["prompt_ids"])))
        own = states(tokens)
        own = own[:, -1:] if name == "sglang" else own
        np.testing.assert_array_equal(tensors["hidden_states"].to_float32(), own)
        read = np.fromfile(
            folder / file_of(index), "<i8", count=len(tokens), offset=tensors["token_ids"].offset
        )
        assert read.tolist() == tokens
    assert not [path for path in folder.iterdir() if path.name.startswith(".partial-")]


def test_a_repeated_command_computes_what_is_missing(references: Path, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    server = a_server("vllm", tmp_path)
    with engine(server) as found:
        fetch_states(found, references, folder=folder)
        (folder / file_of(1)).unlink()
        server.requests.clear()
        seen = fetch_states(found, references, folder=folder)
    assert (seen.asked, seen.there) == (1, 2)
    assert len(server.asked("/v1/completions")) == 1
    assert seen.as_dict() == {"path": str(folder), "asked": 1, "there": 2, "failed": {}}


def test_layers_side_by_side_are_taken_apart(references: Path, tmp_path: Path) -> None:
    with engine(Sglang()) as found:
        fetch_states(found, references, folder=tmp_path / "two", slots=2)
        seen = fetch_states(found, references, folder=tmp_path / "seven", slots=7)
    assert read_safetensors(tmp_path / "two" / file_of(0))[0]["hidden_states"].shape[1:] == (2, 32)
    assert list(seen.failed) == NAMES
    assert "a row of 64 numbers cannot be 7 layers" in seen.failed["one"]


@pytest.mark.parametrize(
    ("name", "fault", "said"),
    [
        (
            "vllm",
            "few states",
            "hidden states of 7 of 9 tokens: its prefix cache .*--no-enable-prefix-caching",
        ),
        ("sglang", "few states", "hidden states of 8 of 9 tokens: its prefix cache .*--disable-radix-cache"),
        ("vllm", "other states", "are of other token ids than those sent"),
    ],
)
def test_states_that_are_not_those_of_the_sequence(
    name: str, fault: str, said: str, references: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "states"
    with engine(a_server(name, tmp_path, fault)) as found:
        seen = fetch_states(found, references, folder=folder)
    assert seen.asked == 0
    assert list(seen.failed) == NAMES
    assert re.search(said, seen.failed["one"])
    assert not list(folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (Vllm(), "kv-transfer-config .*ExampleHiddenStatesConnector"),
        (Sglang(faults={"no states"}), "--enable-return-hidden-states"),
    ],
    ids=["vllm", "sglang"],
)
def test_a_server_without_hidden_states_says_what_it_lacks(
    server: StandIn, said: str, references: Path, tmp_path: Path
) -> None:
    with engine(server) as found, pytest.raises(EngineError, match=said):
        fetch_states(found, references, folder=tmp_path / "states")


def test_a_lock_that_is_held_ends_it_and_the_same_command_goes_on(references: Path, tmp_path: Path) -> None:
    server = a_server("vllm", tmp_path, "held lock")
    with engine(server) as found:
        with pytest.raises(BeingWrittenError, match="same command"):
            fetch_states(found, references, folder=tmp_path / "states")
        server.faults.clear()
        assert fetch_states(found, references, folder=tmp_path / "states").asked == 3


def test_a_folder_of_something_else_is_refused(references: Path, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    with engine(a_server("vllm", tmp_path)) as found:
        fetch_states(found, references, folder=folder)
        rows = [json.loads(line) for line in references.read_text().splitlines()]
        other = tmp_path / "other.jsonl"
        other.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
        with pytest.raises(StoreError, match="holds the states of another row"):
            fetch_states(found, other, folder=folder)
        (folder / file_of(0)).write_bytes(b"nothing")
        with pytest.raises(StoreError, match="is not one of ours"):
            fetch_states(found, references, folder=folder)
        empty = tmp_path / "empty.jsonl"
        empty.touch()
        with pytest.raises(PromptError, match="holds no references"):
            fetch_states(found, empty, folder=folder)


def test_progress_is_told_of_every_row(references: Path, tmp_path: Path) -> None:
    told: list[Any] = []

    def progress(items: Any, *, label: str, total: int | None = None, unit: str = "it") -> Any:
        told.append((label, total, unit))
        return items

    with engine(a_server("vllm", tmp_path)) as found:
        fetch_states(found, references, folder=tmp_path / "states", progress=progress)
    assert told == [("states", 3, "prompt")]
