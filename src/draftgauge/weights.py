"""Finds the one set of weights in a directory or file, and what else is said there, without guessing.

Knows how trainers lay out their saves: which files stand beside the weights, where in a `.pt` the weights,
the step and the config may be. It does not know what the tensors are for; the only name it relies on is
`fc.weight`, the fusion of the taps, which every DFlash drafter has.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from draftgauge.distcp import DATA_SUFFIX, METADATA, DistributedSave, located, read_distributed
from draftgauge.errors import CheckpointError, FamilyError
from draftgauge.keys import canonical_name, foreign_family
from draftgauge.plainpickle import Opaque, joined
from draftgauge.tensorfile import Fingerprint, StoredTensor, open_to_read, read_safetensors
from draftgauge.torchfile import TorchFile, read_torch_file, tensors_in

TORCH_SUFFIXES = (".pt", ".pth", ".bin")
#: In the metadata of a safetensors file: what the torch file said from which its tensors were taken, as JSON.
STAGED = "draftgauge_staged"
_INDEX_SUFFIX = ".index.json"
_NOT_WEIGHTS = re.compile(
    r"(?:optim|scheduler|scaler|rng_state|random_states|training_args|training_state[._]rank|zero_pp)"
)
#: `probe.PROBE_FILE`, a floor above.
_PROBE = "probe.safetensors"
_FUSION = "fc.weight"
_CONFIG_KEYS = (
    *("config", "draft_config", "draft_model_config", "model_config", "dflash_config"),
    *("args", "cfg", "hparams", "hyper_parameters"),
)
_DRAFTER_WORDS = {
    *("draftgauge_wiring", "dflash_config", "block_size", "mask_token_id", "num_target_layers"),
    *("target_layer_ids", "aux_hidden_state_layer_ids"),
}
_STEP_KEYS = ("step", "global_step", "global_steps", "iteration", "iter", "num_steps")
_STEP_IN_NAME = re.compile(
    r"(?:^|[_\-.])(?:step|steps|iter|iteration|checkpoint|ckpt)[_\-=]?(\d+)", re.IGNORECASE
)
_Save = TorchFile | DistributedSave


@dataclass(frozen=True)
class Weights:
    """One set of weights by stored name, and what stands around it.

    A value that is no tensor is represented by the name of its class.
    """

    path: Path
    kind: str
    state_dict: str
    tensors: dict[str, StoredTensor | str]
    config: dict[str, object] | None
    config_source: str
    step: int | None
    step_source: str
    extras: dict[str, str]
    opaque_classes: tuple[str, ...]
    tensor_files: tuple[Path, ...]
    fingerprints: dict[Path, Fingerprint]


def read_weights(path: Path, *, state_dict: str | None) -> Weights:
    """Find and list the weights at `path`; symbolic links are followed once, at the beginning.

    Raises:
        CheckpointError: nothing there, several possibilities, or a file that cannot be read.
        FamilyError: no DFlash weights, but those of another known family.
    """
    given = path
    try:
        path = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links
        raise CheckpointError(f"{given} does not exist or cannot be reached. Check the path") from error
    source = _only_source(path) if path.is_dir() else path
    extras = _files_beside(source) if path.is_dir() else {}
    if source.name.endswith(_INDEX_SUFFIX) or source.suffix == ".safetensors":
        if state_dict is not None:
            raise CheckpointError(
                f"{source} is one set of tensors; --state-dict is for .pt files. Leave it out"
            )
        return _from_safetensors(path, source, extras)
    if source.suffix in TORCH_SUFFIXES:
        return _from_torch(path, source, extras, state_dict)
    if source.name == METADATA or source.suffix == DATA_SUFFIX:
        return _from_distributed(path, source.with_name(METADATA), extras, state_dict)
    raise CheckpointError(
        f"{source} ends in {source.suffix or 'nothing'}; expected a directory, a .safetensors file or a "
        f"torch file ({', '.join(TORCH_SUFFIXES)})"
    )


# --- which file ----------------------------------------------------------------------------------------


def _only_source(directory: Path) -> Path:
    """The one weight file, or the index of the shards, of a directory."""
    names = sorted(entry.name for entry in directory.iterdir() if entry.is_file())
    indexes = [directory / name for name in names if name.endswith(_INDEX_SUFFIX)]
    shards = {shard for index in indexes for shard in _weight_map(index).values()}
    suffixes = (".safetensors", *TORCH_SUFFIXES)
    alone = [
        directory / name
        for name in names
        if name.endswith(suffixes) and not _NOT_WEIGHTS.match(name) and name not in {*shards, _PROBE}
    ]
    found = indexes + alone + [directory / name for name in names if name == METADATA]
    if len(found) == 1:
        return found[0]
    if not found:
        raise CheckpointError(f"{directory} holds no weights. {_what_helps(directory, names)}")
    listed = "\n".join(f"  {file}" for file in found)
    raise CheckpointError(
        f"{directory} holds {len(found)} files that may be the drafter; expected one:\n{listed}\n"
        "Give the path of one of them (shards without their index.json are incomplete)"
    )


def _what_helps(directory: Path, names: list[str]) -> str:
    if any(name.endswith(DATA_SUFFIX) for name in names):
        return (
            f"Its *{DATA_SUFFIX} files are those of a distributed checkpoint whose {METADATA} is missing; that is "
            "written last, and some copies leave hidden files out. Wait until it is saved, or copy it as well"
        )
    kinds = ("*.safetensors", "*.pt", METADATA)
    below = sorted(
        entry.name
        for entry in directory.iterdir()
        if entry.is_dir() and any(any(entry.glob(kind)) for kind in kinds)
    )
    if below:
        return f"Give one of its directories: {', '.join(below[:8])}{', ...' if len(below) > 8 else ''}"
    return f"It holds {', '.join(names[:8]) or 'nothing'}; expected model.safetensors or checkpoint.pt. Copy it again"


def _weight_map(index: Path) -> dict[str, str]:
    content = _json(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map. Copy the index again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(
                f"{index} places {name} in {shard!r}; expected the name of a file beside it"
            )
    return weight_map


def _files_beside(source: Path) -> dict[str, str]:
    own = {source.name, "config.json"}
    if source.name.endswith(_INDEX_SUFFIX):
        own |= set(_weight_map(source).values())
    beside = {
        entry.name: in_bytes(entry.stat().st_size) for entry in source.parent.iterdir() if entry.is_file()
    }
    what = {_PROBE: "the trainer's probe, which `draftgauge check` replays"}
    return {
        name: f"{size}, {what.get(name, 'not read')}"
        for name, size in sorted(beside.items())
        if name not in own and not (source.name == METADATA and name.endswith(DATA_SUFFIX))
    }


def _json(path: Path) -> dict[str, object]:
    with open_to_read(path) as file:
        text = file.read()
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}): still being written? Copy it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} holds a {type(content).__name__}; expected a mapping of names to values"
        )
    return content


# --- safetensors ---------------------------------------------------------------------------------------


def _from_safetensors(path: Path, source: Path, extras: dict[str, str]) -> Weights:
    weight_map = _weight_map(source) if source.suffix == ".json" else {}
    files = [source.parent / shard for shard in sorted(set(weight_map.values()))] or [source]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise CheckpointError(
            f"{source} names {len(files)} shards; missing: {', '.join(missing)}. Copy them beside the index"
        )
    fingerprints = {source: Fingerprint.of(source)} | {file: Fingerprint.of(file) for file in files}
    tensors: dict[str, StoredTensor | str] = {}
    for file in files:
        for name, tensor in read_safetensors(file)[0].items():
            if weight_map and weight_map.get(name) != file.name:
                raise CheckpointError(
                    f"{file} holds {name}, which {source.name} places in {weight_map.get(name)}. "
                    "Index and shards are not of the same save: copy all of them again"
                )
            tensors[name] = tensor
    absent = sorted(set(weight_map) - set(tensors))
    if absent:
        raise CheckpointError(
            f"{source} names {absent[0]} and {len(absent) - 1} more tensors that its shards do not hold. "
            "Copy index and shards again"
        )
    staged = _staged(source) if len(files) == 1 and files[0] == source else {}
    config, config_source = _config_beside(source, fingerprints)
    if config is None and staged:
        config, config_source = staged["config"], staged["config_source"]
    step, step_source = (staged["step"], staged["step_source"]) if staged else _step_in_name(path)
    return Weights(
        path=path,
        kind="hf-directory" if path.is_dir() else "safetensors",
        state_dict=staged.get("state_dict", ""),
        tensors=tensors,
        config=config,
        config_source=config_source,
        step=step,
        step_source=step_source,
        extras=extras | staged.get("extras", {}),
        opaque_classes=tuple(staged.get("opaque_classes", ())),
        tensor_files=tuple(files),
        fingerprints=fingerprints,
    )


def _staged(source: Path) -> dict[str, Any]:
    """What a staged file says of the torch file that it was taken from; nothing for any other."""
    text = read_safetensors(source)[1].get(STAGED)
    if text is None:
        return {}
    shape: dict[str, Any] = {"config": dict | None, "config_source": str, "step": int | None}
    shape |= {"step_source": str, "state_dict": str, "extras": dict, "opaque_classes": list}
    try:
        staged = json.loads(text)
        sound = all(isinstance(staged[key], kind) for key, kind in shape.items())
    except (ValueError, RecursionError, TypeError, KeyError):
        sound = False
    if not sound:
        raise CheckpointError(f"{source}: its metadata {STAGED} is damaged. Stage the checkpoint again")
    return dict(staged)


def _config_beside(
    source: Path, fingerprints: dict[Path, Fingerprint]
) -> tuple[dict[str, object] | None, str]:
    """The config.json in the directory of the weights; its fingerprint is added."""
    file = source.parent / "config.json"
    if not file.exists():
        return None, f"no config.json beside {source.name}"
    fingerprints[file] = Fingerprint.of(file)
    return _json(file), "config.json"


# --- torch files ---------------------------------------------------------------------------------------


def _from_torch(path: Path, source: Path, extras: dict[str, str], state_dict: str | None) -> Weights:
    torch_file = read_torch_file(source)
    name, mapping = _chosen_state_dict(torch_file, state_dict)
    files = {source: torch_file.fingerprint}
    return _weights(path, "trainer-pt", extras, save=torch_file, chosen=(name, mapping), files=files)


def _from_distributed(path: Path, source: Path, extras: dict[str, str], state_dict: str | None) -> Weights:
    """The weights of a distributed checkpoint; what was sharded is put together in the cache folder."""
    save = read_distributed(source.parent)
    name, mapping = _chosen_state_dict(save, state_dict)
    tensors, files = located(save, mapping)
    found = _weights(path, "distributed", extras, save=save, chosen=(name, tensors), files=files)
    return replace(found, fingerprints=save.fingerprints | found.fingerprints)


def _weights(
    path: Path,
    kind: str,
    extras: dict[str, str],
    *,
    save: _Save,
    chosen: tuple[str, Mapping[str, object]],
    files: dict[Path, Fingerprint],
) -> Weights:
    """The chosen mapping of a save with all that stands around it; `files` are those that hold its tensors."""
    name, mapping = chosen
    fingerprints = dict(files)
    beside = next(iter(files), save.path)
    config, config_source = _config_beside(beside, fingerprints)
    if config is None:
        config, config_source = _config_within(save)
    step, step_source = _step_within(save)
    if step is None and step_source == "":
        step, step_source = _step_in_name(path)
    return Weights(
        path=path,
        kind=kind,
        state_dict=name,
        tensors={key: v if isinstance(v, StoredTensor) else _class_name(v) for key, v in mapping.items()},
        config=config,
        config_source=config_source,
        step=step,
        step_source=step_source,
        extras=extras | dict(_described(save.value, "", name)),
        opaque_classes=save.opaque_classes,
        tensor_files=tuple(files),
        fingerprints=fingerprints,
    )


def _chosen_state_dict(save: _Save, wanted: str | None) -> tuple[str, dict[str, object]]:
    mappings = dict(_mappings(save.value, "", set()))
    found = {path: mapping for path, mapping in mappings.items() if _has_fusion(mapping)}
    if wanted is not None:
        if wanted in found:
            return wanted, found[wanted]
        raise CheckpointError(
            f"{save.path} has no drafter weights at {wanted!r}; expected one of "
            f"{', '.join(found) or 'none'}. Change --state-dict"
        )
    # An optimizer may keep its moments under the names of the weights; they are never the weights.
    found = {p: m for p, m in found.items() if not any(part.startswith("optim") for part in p.split("."))}
    if len(found) == 1:
        return next(iter(found.items()))
    if found:
        listed = ", ".join(path or "(the whole file)" for path in found)
        raise CheckpointError(
            f"{save.path} holds {len(found)} sets of drafter weights: {listed}. "
            f"Choose one: --state-dict {next(filter(None, found))}"
        )
    for mapping in mappings.values():
        foreign = foreign_family(key for key, value in mapping.items() if isinstance(value, StoredTensor))
        if foreign is not None:
            raise FamilyError(
                f"{save.path} holds {foreign[1]}, which makes it {foreign[0].name}; only plain DFlash "
                f"drafters are computed. {foreign[0].help}"
            )
    raise CheckpointError(
        f"{save.path} holds no mapping of names to tensors with {_FUSION} in it; it holds "
        f"{', '.join(path for path in list(mappings)[1:9]) or 'no mapping'}. "
        "Give the checkpoint of a DFlash drafter"
    )


def _mappings(value: object, path: str, seen: set[int]) -> Iterator[tuple[str, dict[str, object]]]:
    """Every mapping with names as keys, with its dotted path; one that occurs twice is visited once."""
    content = value.state if isinstance(value, Opaque) else value
    if not isinstance(content, dict | list | tuple) or id(content) in seen:
        return
    seen.add(id(content))
    if isinstance(content, dict) and all(isinstance(key, str) for key in content):
        yield path, content
    for key, item in content.items() if isinstance(content, dict) else enumerate(content):
        yield from _mappings(item, joined(path, key), seen)


def _has_fusion(mapping: Mapping[str, object]) -> bool:
    """True for weights; an optimizer's per-parameter entries are mappings, not tensors."""
    return any(
        canonical_name(key) == _FUSION and isinstance(value, StoredTensor | Opaque)
        for key, value in mapping.items()
    )


def _described(value: object, path: str, chosen: str) -> Iterator[tuple[str, str]]:
    """One line for everything beside the chosen weights, level by level down to them."""
    content = value.state if isinstance(value, Opaque) else value
    if path == chosen or not isinstance(content, dict):
        return
    for key, item in content.items():
        below = joined(path, key)
        if below == chosen or chosen.startswith(f"{below}."):
            yield from _described(item, below, chosen)
        else:
            yield below, _description(item)


def _description(value: object) -> str:
    tensors = {(t.path, t.offset, t.nbytes) for _, t in tensors_in(value)}
    if isinstance(value, StoredTensor):
        return f"tensor {value.dtype} {list(value.shape)}, {in_bytes(value.nbytes)}, not read"
    if tensors:
        count = sum(1 for _ in tensors_in(value))
        return f"{count} tensors, {in_bytes(sum(nbytes for *_, nbytes in tensors))}, not read"
    if isinstance(value, str | float | bool | None) or (isinstance(value, int) and value.bit_length() < 64):
        return repr(value)[:80]
    if isinstance(value, dict | list | tuple | set | frozenset):
        return f"{type(value).__name__} of {len(value)}"
    return _class_name(value)


def _class_name(value: object) -> str:
    return value.class_name if isinstance(value, Opaque) else type(value).__name__


def _config_within(save: _Save) -> tuple[dict[str, object] | None, str]:
    """The config among the values beside the weights, if one alone can be meant."""
    top = save.value if isinstance(save.value, dict) else {}
    done: dict[int, object] = {}
    found = {key: plain for key in _CONFIG_KEYS if isinstance(plain := _plain(top.get(key), done), dict)}
    flat = {key: value for key, value in top.items() if str(key).startswith("dflash_") and key not in found}
    speaking = {key: config for key, config in found.items() if _DRAFTER_WORDS & set(config)}
    if flat:
        speaking["dflash_*"] = flat
    chosen = speaking or found
    name = save.path.name
    if len(chosen) == 1:
        key, config = next(iter(chosen.items()))
        class_name = f" ({top[key].class_name})" if isinstance(top.get(key), Opaque) else ""
        return config, f"{name}: {key}{class_name}"
    if chosen:
        return (
            None,
            f"{name} has several configs ({', '.join(chosen)}) and does not say which is the drafter's",
        )
    return None, f"no config in {name} ({', '.join(_CONFIG_KEYS)}) and no config.json beside it"


def _plain(value: object, done: dict[int, object]) -> object:
    """An object's attributes as a mapping; omegaconf's nodes are replaced by what they hold."""
    if id(value) in done:
        return done[id(value)]
    content = value.state if isinstance(value, Opaque) else value
    if isinstance(value, Opaque) and isinstance(content, dict):
        content = next((content[key] for key in ("_content", "_val") if key in content), content)
        content = _plain(content, done)
    elif isinstance(content, dict):
        content = {str(key): _plain(item, done) for key, item in content.items()}
    elif isinstance(content, list | tuple):
        content = [_plain(item, done) for item in content]
    done[id(value)] = content
    return content


# --- the step ------------------------------------------------------------------------------------------


def _step_within(save: _Save) -> tuple[int | None, str]:
    """The step that the file states; an empty source means that it states none."""
    top = save.value if isinstance(save.value, dict) else {}
    stated = {key: step for key in _STEP_KEYS if (step := _count(top.get(key))) is not None}
    if not stated:
        return None, ""
    if len(set(stated.values())) > 1:
        return None, f"{save.path.name} contradicts itself: {stated}"
    key, step = next(iter(stated.items()))
    return step, f"{save.path.name}: {key}"


def _count(value: object) -> int | None:
    if isinstance(value, StoredTensor) and value.numel == 1 and value.dtype in ("I64", "I32"):
        return int(np.frombuffer(b"".join(value.blocks()), "<i8" if value.dtype == "I64" else "<i4")[0])
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _step_in_name(path: Path) -> tuple[int | None, str]:
    """The step in the name of the file or of its directory, as in `step_1200/checkpoint.pt`."""
    for name in (path.name, path.parent.name):
        found = _STEP_IN_NAME.findall(name)
        if found:
            return int(found[-1]), f"the name {name}"
    return None, "stated neither in the file nor in its name"


def in_bytes(count: int) -> str:
    """A size for a reader: `in_bytes(10_400_000_000)` is `10.4 GB`."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
