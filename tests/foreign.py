"""Features as other projects store them, made of what was recorded: the same numbers in other shapes."""

import gzip
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from draftgauge.features import as_stored, as_torch, normed
from draftgauge.recording import Item, Recording
from draftgauge.tensorfile import write_safetensors

#: Writes one item below a folder: (folder, name, tokens [T], mask [T], taps [K, T, H], last [T, H]).
Writer = Callable[[Path, str, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def stack(taps: torch.Tensor) -> torch.Tensor:
    """[K, T, H] as [T, K*H], the states of a position side by side."""
    return taps.permute(1, 0, 2).flatten(1).contiguous()


def specforge(folder: Path, name: str, tokens, mask, taps, last) -> None:
    (folder / "rows_0").mkdir(exist_ok=True)
    value = {"input_ids": tokens, "loss_mask": mask, "hidden_states": stack(taps)[None]}
    torch.save(value | {"target_last_hidden_states": last[None]}, folder / "rows_0" / f"{name}.ckpt")


def specforge_gz(folder: Path, name: str, tokens, mask, taps, last) -> None:
    value = {"input_ids": tokens, "loss_mask": mask, "hidden_states": stack(taps)[None]}
    with gzip.open(folder / f"{name}.ckpt.gz", "wb") as packed:
        torch.save(value, packed)


def vllm(folder: Path, name: str, tokens, mask, taps, last) -> None:
    states = torch.cat((taps, last[None])).permute(1, 0, 2).contiguous()
    tensors = {"hidden_states": as_stored(states), "token_ids": as_stored(tokens)}
    write_safetensors(folder / f"hs_{name}.safetensors", tensors)


def modelopt(folder: Path, name: str, tokens, mask, taps, last) -> None:
    value = {"input_ids": tokens, "loss_mask": mask, "aux_hidden_states": stack(taps), "hidden_states": last}
    torch.save(value | {"conversation_id": name}, folder / f"{name}.pt")


def loose(folder: Path, name: str, tokens, mask, taps, last) -> None:
    """All taps but the last in one tensor, that one in another; the last layer's state in a third."""
    value = {"aux_hidden": stack(taps[:-1])[None], "tap_hidden": taps[-1][None], "last_hidden": last[None]}
    torch.save(value | {"input_ids": tokens[None]}, folder / f"{name}.pt")


def deepspec(folder: Path, items: Sequence[tuple], *, layers: Sequence[int]) -> None:
    """A cache of all items in two shards: a manifest, an index, raw arrays."""
    entries, shards = [], {0: bytearray(), 1: bytearray()}
    for sample, (_, tokens, mask, taps, last) in enumerate(items):
        shard = shards[sample % 2]
        offsets = []
        for array in (
            tokens.int().numpy().tobytes(),
            torch.ones_like(mask).to(torch.uint8).numpy().tobytes(),
            mask.to(torch.uint8).numpy().tobytes(),
            stack(taps).view(torch.uint16).numpy().tobytes(),
            last.contiguous().view(torch.uint16).numpy().tobytes(),
        ):
            offsets.append(len(shard))
            shard += array
        entries.append(struct.pack("<QIIQQQQQ", sample, sample % 2, len(tokens), *offsets))
    (folder / "samples.idx").write_bytes(b"".join(entries))
    for number, content in shards.items():
        (folder / f"shard-{number}.bin").write_bytes(content)
    manifest = {
        "version": 2,
        "hidden_size": items[0][4].shape[1],
        "target_layer_ids": list(layers),
        "num_samples": len(entries),
        "shards": [{"shard_id": i, "file_name": f"shard-{i}.bin"} for i in shards],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


WRITERS: dict[str, Writer] = {
    "specforge": specforge,
    "specforge_gz": specforge_gz,
    "vllm": vllm,
    "modelopt": modelopt,
    "loose": loose,
}


def parts(recording: Recording, item: Item, taps: Sequence[int], *, after_norm: bool = False) -> tuple:
    """(name, tokens, mask, taps, last) of a recorded item."""
    stored = recording.tensors(item)
    tokens = as_torch(stored.tokens).long()
    mask = (torch.arange(item.length) >= item.prompt_len).long()
    states = torch.stack([as_torch(stored.outputs[tap]) for tap in taps])
    assert stored.final is not None
    last = as_torch(stored.final).clone()
    if after_norm:
        last = normed(last, as_torch(recording.end("norm")), eps=recording.target.norm_eps)
    return item.id, tokens, mask, states, last


def stored(
    form: str,
    folder: Path,
    recording: Recording,
    *,
    taps: Sequence[int] = (1, 3),
    after_norm: bool = False,
    names: Sequence[str] | None = None,
) -> Path:
    """The recording's items in another project's form."""
    folder.mkdir(parents=True)
    items = [item for item in recording.items if names is None or item.id in names]
    found = [parts(recording, item, taps, after_norm=after_norm) for item in items]
    if form == "deepspec":
        deepspec(folder, found, layers=taps)
    else:
        for each in found:
            WRITERS[form](folder, *each)
    return folder
