"""Plants faults in a copy of a pair that is right: in its checkpoint, its recording, or what is stated."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftgauge.configs import OWN_KEY
from draftgauge.drafters import as_torch
from draftgauge.recording import MANIFEST
from draftgauge.store import sha256_file
from draftgauge.tensorfile import StoredTensor, read_safetensors, write_safetensors
from draftgauge.wiring import LayerAttention
from tests import planted


@dataclass
class Site:
    """A copy of a pair, to be spoiled: folders, and what the user states."""

    folder: Path
    checkpoint: Path
    recording: Path
    stated: dict[str, Any]

    def state(self, **fields: Any) -> None:
        """The user, or a config, says something wrong about the wiring."""
        self.stated |= fields

    def config(self, **fields: Any) -> None:
        """The checkpoint's own config says something else."""
        path = self.checkpoint / "config.json"
        value = json.loads(path.read_text())
        value[OWN_KEY] |= {name: json_of(value) for name, value in fields.items()}
        path.write_text(json.dumps(value))

    @contextmanager
    def weights(self) -> Iterator[dict[str, np.ndarray]]:
        """The checkpoint's tensors, written back when the block ends."""
        path = self.checkpoint / "model.safetensors"
        tensors = {name: array_of(stored) for name, stored in read_safetensors(path)[0].items()}
        yield tensors
        path.unlink()
        write_safetensors(path, tensors)

    @contextmanager
    def items(self) -> Iterator[list[dict[str, np.ndarray]]]:
        """Every item's tensors, written back with their digests in the manifest, as a faulty recorder would."""
        manifest = self.recording / MANIFEST
        value = json.loads(manifest.read_text())
        stored = [read_safetensors(self.recording / item["file"]) for item in value["items"]]
        tensors = [{name: array_of(t) for name, t in item.items()} for item, _ in stored]
        yield tensors
        for item, arrays, (_, metadata) in zip(value["items"], tensors, stored, strict=True):
            path = self.recording / item["file"]
            path.unlink()
            write_safetensors(path, arrays, metadata=metadata)
            item["sha256"] = sha256_file(path)
            item["length"] = len(arrays["tokens"])
        manifest.write_text(json.dumps(value))

    def manifest(self, change: Callable[[dict[str, Any]], None]) -> None:
        """The recording's manifest says something else."""
        path = self.recording / MANIFEST
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))


def array_of(stored: StoredTensor) -> np.ndarray:
    return as_torch(stored).numpy().copy()


def json_of(value: Any) -> Any:
    if isinstance(value, tuple):
        return [json_of(part) for part in value]
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value


def toml_layers(*layers: LayerAttention) -> list[dict[str, Any]]:
    return [{k: v for k, v in dataclasses.asdict(layer).items() if v is not None} for layer in layers]


def taps_columns(site: Site, order: Sequence[int]) -> None:
    """The features are recorded in another order than they are said to be."""
    with site.items() as items:
        for tensors in items:
            tensors["taps"][: len(order)] = tensors["taps"][list(order)]


def shift_features(site: Site, by: int) -> None:
    with site.items() as items:
        for tensors in items:
            tensors["taps"] = np.roll(tensors["taps"], by, axis=1)


def change_features(site: Site, change: Callable[[np.ndarray], None]) -> None:
    with site.items() as items:
        for tensors in items:
            change(tensors["taps"])


def swap_rows(site: Site) -> None:
    """Two prompts have each other's features, as far as both reach."""
    with site.items() as items:
        one, two = items[2]["taps"], items[5]["taps"]
        end = min(one.shape[1], two.shape[1])
        one[:, :end], two[:, :end] = two[:, :end].copy(), one[:, :end].copy()


def cut_rows(site: Site) -> None:
    """The features lack the first positions, which a prefix cache answered."""
    with site.items() as items:
        for tensors in items:
            tensors["taps"] = tensors["taps"][:, 4:]


def normed_final(site: Site) -> None:
    norm = array_of(read_safetensors(site.recording / "ends.safetensors")[0]["norm"])
    with site.items() as items:
        for tensors in items:
            x = tensors["final"]
            tensors["final"] = x / np.sqrt((x**2).mean(-1, keepdims=True) + planted.EPS) * norm


def foreign_tokens(site: Site) -> None:
    """The references are another model's: every third completion token is something else."""
    manifest = json.loads((site.recording / MANIFEST).read_text())
    with site.items() as items:
        for tensors, item in zip(items, manifest["items"], strict=True):
            tokens = tensors["tokens"]
            places = np.arange(item["prompt_len"] + 1, len(tokens), 3)
            tokens[places] = (tokens[places] + 17) % planted.VOCABULARY


def make_loop(site: Site) -> None:
    """One completion says the same five tokens over and over."""
    manifest = json.loads((site.recording / MANIFEST).read_text())
    start = manifest["items"][0]["prompt_len"]
    with site.items() as items:
        tokens = items[0]["tokens"]
        tokens[start:] = np.resize([31, 32, 33, 34, 35], len(tokens) - start)


def own_features(site: Site) -> None:
    """The drafter is shown the feature of the anchor itself: everything stands one position too early."""
    shift_features(site, -1)


def damage_item(site: Site) -> None:
    path = site.recording / "00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 0xFF
    path.write_bytes(data)


def other_ends(site: Site) -> None:
    path = site.recording / "ends.safetensors"
    ends = {name: array_of(t) for name, t in read_safetensors(path)[0].items()}
    ends["head"] = ends["head"] * 1.01
    path.unlink()
    write_safetensors(path, ends)


def leave_out(site: Site, pattern: str) -> None:
    with site.weights() as tensors:
        for name in [name for name in tensors if pattern in name]:
            del tensors[name]


def rename(site: Site, old: str, new: str) -> None:
    with site.weights() as tensors:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)


def set_tensor(site: Site, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    with site.weights() as tensors:
        tensors[name] = change(tensors[name])


def idle_layer(site: Site) -> None:
    """The second layer adds nothing, as if it had never been loaded."""
    with site.weights() as tensors:
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"layers.1.{name}.weight"] *= 1e-30


def copied_layer(site: Site) -> None:
    with site.weights() as tensors:
        for name in [name for name in tensors if name.startswith("layers.0.")]:
            tensors[name.replace("layers.0.", "layers.1.")] = tensors[name].copy()


def untrained_row(site: Site) -> None:
    path = site.recording / "ends.safetensors"
    ends = {name: array_of(t) for name, t in read_safetensors(path)[0].items()}
    ends["embedding"][planted.WIRING.mask_token_id] *= 1e-3
    path.unlink()
    write_safetensors(path, ends)
    digests = {name: t.sha256() for name, t in read_safetensors(path)[0].items()}

    def change(value: dict[str, Any]) -> None:
        for name, digest in digests.items():
            value["target"]["ends"][name]["sha256"] = digest

    site.manifest(change)


def three_of_ten(site: Site) -> None:
    def change(value: dict[str, Any]) -> None:
        value["items"] = value["items"][:3]
        value["produced"]["prompts_asked"] = 10

    site.manifest(change)


def add_tensor(site: Site, name: str) -> None:
    with site.weights() as tensors:
        tensors[name] = np.ones(planted.HIDDEN, np.float32)


def truncate(site: Site) -> None:
    path = site.checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def lose_a_shard(site: Site) -> None:
    path = site.checkpoint / "model.safetensors"
    names = list(read_safetensors(path)[0])
    shards = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    path.rename(site.checkpoint / "model-00001-of-00002.safetensors")
    (site.checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def no_map(site: Site) -> None:
    with site.weights() as tensors:
        del tensors["d2t"]


def stated(**fields: Any) -> Callable[[Site], None]:
    return lambda site: site.state(**fields)


def in_config(**fields: Any) -> Callable[[Site], None]:
    return lambda site: site.config(**fields)


def tuned(site: Site) -> None:
    """The recording is of the target before one of its middle layers was tuned."""

    def change(value: dict[str, Any]) -> None:
        value["target"]["path"] = str(tuned_target(site.folder / "tuned", Path(value["target"]["path"])))

    site.manifest(change)


def tuned_target(folder: Path, target: Path) -> Path:
    """A copy of a target in which one middle layer's weights are a tenth larger."""
    shutil.copytree(target, folder)
    file = folder / "model.safetensors"
    tensors: dict[str, Any] = {}
    for name, stored in read_safetensors(file)[0].items():
        array = as_torch(stored).float().numpy()
        tensors[name] = array * 1.1 if name.endswith("layers.8.mlp.down_proj.weight") else array
    file.unlink()
    write_safetensors(file, tensors)
    return folder
