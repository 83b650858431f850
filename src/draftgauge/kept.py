"""Whether the checkpoint that a run keeps is still the one that it measured.

A run keeps hard links: whoever edits the original in place edits the kept file too. Knows nothing of how a
checkpoint is measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from draftgauge.caveats import Caveat
from draftgauge.checkpoint import digest, open_checkpoint
from draftgauge.errors import CheckpointError
from draftgauge.runs import CHECKPOINT, Run, changed_files
from draftgauge.store import sha256_file


def checkpoint_caveat(run: Run) -> Caveat | None:
    """A caveat where the kept checkpoint is not what was measured any more; None where it is, or none is kept.

    Reads the weights only where something about a kept file differs from what was noted of it.
    """
    suspects = changed_files(run)
    complaint = _complaint(run, suspects) if suspects else None
    if complaint is None:
        return None
    return Caveat(
        "checkpoint-changed",
        "warning",
        f"The checkpoint that this run keeps is not the one that it measured: {complaint}. The numbers are those of "
        "the weights before; a hard link follows every edit in place.",
    )


def _complaint(run: Run, suspects: list[str]) -> str | None:
    """What is wrong with the kept files, of which `suspects` may have changed; None where they hold what they did."""
    kept = run.path / CHECKPOINT
    missing = [name for name in suspects if kept.is_dir() and not (kept / name).is_file()]
    if missing or not kept.exists():
        return f"{', '.join(missing or suspects)} was removed from it"
    said = run.manifest.get("checkpoint_files") or {}
    contents = {name: said[name]["sha256"] for name in suspects if "sha256" in said.get(name, {})}
    if edited := [name for name, content in contents.items() if sha256_file(kept / name) != content]:
        return f"{', '.join(edited)} was edited"
    if contents.keys() == set(suspects):
        return None
    measured = run.plan.checkpoint_digest
    try:
        with _named(kept, run.manifest["checkpoint"]["files"][0]) as path:
            found = digest(
                open_checkpoint(path, state_dict=run.manifest["checkpoint"].get("state_dict") or None)
            )
    except CheckpointError as exc:
        return f"{', '.join(suspects)} was edited and cannot be read ({exc})"
    if found == measured:
        return None
    return f"{', '.join(suspects)} was edited, its weights have digest {found[:16]}, measured was {measured[:16]}"


@contextlib.contextmanager
def _named(kept: Path, name: str) -> Iterator[Path]:
    """Where the kept weights lie under their own name; the link of an older run is one file and has none."""
    if kept.is_dir():
        yield kept / name
        return
    with TemporaryDirectory() as folder:
        (Path(folder) / name).symlink_to(kept.resolve())
        yield Path(folder)
