"""The benches on the demo's target, prompts and drafter: replay, record, read, stages, and a report's page.

They share one recording, which is made once in a temporary folder. Needs what `make target` unpacks.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.page import bench_page as bench_page_of
from bench.records import ROOT, Record, found, seconds_of
from demo import run as demo

CHECKPOINT, TARGET = ROOT / demo.LATE, ROOT / demo.TARGET


@functools.cache
def workshop() -> Path:
    """A folder that lasts as long as this process."""
    folder = Path(tempfile.mkdtemp(prefix="draftgauge-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def recording(prompts: int | None = None) -> Any:
    """What the demo records; of its first prompts only, where a number is given."""
    import draftgauge as dg
    from draftgauge.stated import wiring_of

    taps = wiring_of(dg.open_checkpoint(CHECKPOINT)).taps
    return dg.record_target(
        TARGET,
        dg.read_prompts("builtin:coding10").first(prompts),
        request=dg.Request(taps=taps, max_new_tokens=int(demo.NEW_TOKENS)),
        root=workshop() / "recordings",
    )


def bench_replay(prompts: int) -> Iterator[Record]:
    """Evaluating against decoding online: wall time of both, on the demo's target, prompts and drafter."""
    import torch

    import draftgauge as dg
    from draftgauge.decode import decode
    from draftgauge.measure import DEFAULT_POLICIES
    from draftgauge.pairing import open_drafter
    from draftgauge.stated import wiring_of
    from draftgauge.target import load_target

    recorded = recording()
    items = recorded.items[:prompts]
    checkpoint = dg.open_checkpoint(CHECKPOINT)
    replay_s = seconds_of(
        lambda: dg.evaluate_checkpoint(
            CHECKPOINT, recorded.path, dg.Options(num_prompts=prompts), root=workshop() / "replay"
        )
    )
    target = load_target(TARGET, dtype="float32")
    drafter = open_drafter(checkpoint, wiring_of(checkpoint), recording=recorded, dtype="float32")
    online_s = {}
    for policy in DEFAULT_POLICIES:
        started = time.perf_counter()
        for item in items:
            tokens = torch.from_numpy(np.array(recorded.tensors(item).tokens.mapped()).view(np.int32))
            decode(
                target,
                drafter,
                prompt_ids=tokens[: item.prompt_len].tolist(),
                policy=policy,
                max_new_tokens=item.completion_len,
            )
        online_s[policy.label] = time.perf_counter() - started
    raw = {"prompts": len(items), "replay_s": replay_s, "online_s": online_s}
    yield found("replay", sum(online_s.values()) / replay_s, **raw)
    yield found("replay-chain", online_s["chain"] / replay_s, **raw)


def bench_record(prompts: int | None = None, rounds: int = 3) -> Iterator[Record]:
    """Recording what was recorded before, now with given completions, against the target's bare forward pass."""
    import torch

    import draftgauge as dg
    from draftgauge.prompts import Prompt, PromptSet
    from draftgauge.target import load_target

    recorded = recording(prompts)
    texts = {
        item.id: np.array(recorded.tensors(item).tokens.mapped()).view(np.int32).tolist()
        for item in recorded.items
    }
    given = PromptSet(
        "given",
        tuple(
            Prompt(
                item.id,
                prompt_ids=tuple(texts[item.id][: item.prompt_len]),
                completion_ids=tuple(texts[item.id][item.prompt_len :]),
            )
            for item in recorded.items
        ),
    )
    request = dg.Request(taps=recorded.plan.taps, dtype=recorded.plan.dtype)
    target = load_target(TARGET, dtype=recorded.plan.dtype)
    ours, bare = [], []

    @torch.inference_mode()
    def forward() -> None:
        for tokens in texts.values():
            target.model(torch.tensor([tokens]), use_cache=False)

    def timing(
        items: Iterable[Any], *, label: str, total: int | None = None, unit: str = "it"
    ) -> Iterator[Any]:
        """The time of the items themselves: hashing the target and loading it are once, however many there are."""
        started = time.perf_counter()
        yield from items
        if label == "record":
            ours.append(time.perf_counter() - started)

    forward()
    for i in range(rounds):
        bare.append(seconds_of(forward))
        dg.record_target(TARGET, given, request=request, root=workshop() / f"given{i}", progress=timing)
    record_s, bare_s = min(ours), min(bare)
    tokens = sum(map(len, texts.values()))
    yield found(
        "record",
        bare_s / record_s,
        tokens=tokens,
        dtype=recorded.plan.dtype,
        record_s=ours,
        bare_s=bare,
        tokens_per_s=tokens / record_s,
    )


def bench_read(prompts: int | None = None, rounds: int = 9) -> Iterator[Record]:
    """A recording's taps as features, against its files' bytes; both out of the page cache, medians."""
    import torch

    import draftgauge as dg
    from draftgauge.features import read_item
    from draftgauge.stated import wiring_of

    recorded, wiring = recording(prompts), wiring_of(dg.open_checkpoint(CHECKPOINT))
    files = [recorded.path / item.file for item in recorded.items]
    tap_bytes = sum(
        stored.nbytes
        for item in recorded.items
        for tap, stored in recorded.tensors(item).outputs.items()
        if tap in wiring.taps
    )
    file_bytes = sum(file.stat().st_size for file in files)

    def rate(count: int, work: Any) -> float:
        work()
        return count / statistics.median(seconds_of(work) for _ in range(rounds))

    bare = rate(file_bytes, lambda: [np.fromfile(file, np.uint8) for file in files])
    own = getattr(torch, recorded.plan.dtype)
    for name, dtype in (("read", own), ("read-bfloat16", torch.bfloat16)):
        ours = rate(
            tap_bytes,
            lambda dtype=dtype: [
                read_item(recorded, item, wiring=wiring, dtype=dtype) for item in recorded.items
            ],
        )
        yield found(
            name, ours / bare, taps_gb_per_s=ours / 1e9, bare_gb_per_s=bare / 1e9, stored=recorded.plan.dtype
        )


def bench_stages(prompts: int | None = None) -> Iterator[Record]:
    """Where the time of one evaluation goes, in a process of its own."""
    from bench.stages import ARITHMETIC

    words = [ROOT / "bench" / "stages.py", CHECKPOINT, recording(prompts).path, workshop() / "stages"]
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, check=True)
    value = json.loads(done.stdout)
    total = sum(value["spent"].values())
    shares = {stage: seconds / total for stage, seconds in value["spent"].items()}
    yield found(
        "stages",
        sum(shares.get(stage, 0.0) for stage in ARITHMETIC),
        shares=shares,
        seconds=total,
        prompts=value["prompts"],
        anchors=value["anchors"],
    )


def bench_page(prompts: int | None = None) -> Iterator[Record]:
    """A report of the demo's run, and of one with 100,000 anchors."""
    import draftgauge as dg

    run = dg.evaluate_checkpoint(CHECKPOINT, recording(prompts).path, root=workshop() / "page")
    yield from bench_page_of(run.path)
