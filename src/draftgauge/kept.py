"""Whether the checkpoint that a run keeps is still the one that it measured.

A run keeps hard links: whoever edits the original in place edits the kept file too.
"""

from __future__ import annotations

from draftgauge.caveats import Caveat
from draftgauge.checkpoint import digest, open_checkpoint
from draftgauge.errors import CheckpointError
from draftgauge.runs import CHECKPOINT, Run, changed_files


def checkpoint_caveat(run: Run) -> Caveat | None:
    """A caveat where the kept checkpoint is not what was measured any more; None where it is, or none is kept.

    Reads the weights only where size, time or inode of a kept file differ from those noted.
    """
    changed = changed_files(run)
    if not changed:
        return None
    said = run.manifest["checkpoint"]
    try:
        kept = open_checkpoint(run.path / CHECKPOINT, state_dict=said.get("state_dict") or None)
        found = digest(kept)
    except CheckpointError as exc:
        found = f"unreadable: {exc}"
    if found == run.plan.checkpoint_digest:
        return None
    return Caveat(
        "checkpoint-changed",
        "warning",
        f"The kept checkpoint ({', '.join(changed)}) was edited since it was measured: its digest is {found[:16]}, "
        f"measured was {run.plan.checkpoint_digest[:16]}. The numbers are those of the weights before.",
    )
