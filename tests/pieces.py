"""Pieces of work for the tests of workers: what other processes, and Ray's, can import.

A piece names a folder, in which it notes every try.

    python -m tests.pieces CHECKPOINT RECORDING FOLDER

runs the conformance cases on a Ray cluster of a head and two nodes, then a whole evaluation of which one node is
taken away in the middle, and prints what came of them as JSON.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from draftgauge.errors import RecordingError


def piece(folder: Path, name: str) -> str:
    """A piece: what happens to it stands in its name."""
    return str(folder / name)


def work(path: str) -> bytes:
    """Notes the try, then does what the name says; a well piece answers with its name."""
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    first = not place.exists()
    with place.open("a") as log:
        log.write("tried\n")
    kind = place.name.partition("-")[0]
    if kind == "killed" or (kind == "killedonce" and first):
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "raises" or (kind == "raisesonce" and first):
        raise MemoryError("no room")
    if kind == "hangsonce" and first:
        time.sleep(3600)
    if kind == "refuses":
        raise RecordingError(f"{place.name} is damaged; record it again")
    return place.name.encode()


def tries(path: str) -> int:
    """How often a piece was tried."""
    return len(Path(path).read_text().splitlines()) if Path(path).exists() else 0


def outcomes(names: Iterable[str], folder: Path, *, workers: Any, **how: Any) -> dict[str, Any]:
    """By name: what came of a piece, and how often it was tried; or the error that ended it all."""
    from draftgauge.workers import Lost, run_pieces

    pieces = [piece(folder, name) for name in names]
    try:
        found = dict(run_pieces(work, pieces, workers=workers, **how))
    except RecordingError as exc:
        return {"error": str(exc)}
    return {
        Path(path).name: [
            f"lost: {found[place].reason}" if isinstance(found[place], Lost) else found[place].decode(),
            tries(path),
        ]
        for place, path in enumerate(pieces)
    }


def on_two_nodes(checkpoint: Path, recording: Path, folder: Path) -> dict[str, Any]:
    """The cases, and an evaluation during which a node dies, on a cluster of this machine."""
    import ray
    from ray.cluster_utils import Cluster

    from draftgauge.evaluate import evaluate_checkpoint
    from draftgauge.workers import Workers

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    cluster.wait_for_nodes()
    found: dict[str, Any] = {}
    try:
        for case, (names, how) in CASES.items():
            found[case] = outcomes(names, folder / case, workers=Workers(ray=True), **how)

        def losing_a_node(items: Iterable[Any], *, label: str, **_: Any) -> Iterator[Any]:
            for count, item in enumerate(items):
                if label == "evaluate" and count == 1:
                    cluster.remove_node(nodes[1], allow_graceful=False)
                yield item

        run = evaluate_checkpoint(
            checkpoint, recording, root=folder / "runs", workers=Workers(ray=True), progress=losing_a_node
        )
        found["run"] = str(run.path)
        deadline = time.monotonic() + 60  # the head hears of a dead node after a while
        while sum(node["Alive"] for node in ray.nodes()) > 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        found["nodes"] = sum(node["Alive"] for node in ray.nodes())
    finally:
        ray.shutdown()
        cluster.shutdown()
    return found


#: Names of pieces, and how `run_pieces` is called.
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "well": ([f"well-{i}" for i in range(7)], {}),
    "lost once": (["well-0", "killedonce-1", "raisesonce-2", "well-3"], {}),
    "lost twice": (["well-0", "raises-1", "well-2", "killed-3", "well-4"], {}),
    "overdue": (["well-0", "well-1", "hangsonce-2"], {"least_patience_s": 1.0}),
    "refused": (["well-0", "refuses-1"], {}),
    "nothing": ([], {}),
}


if __name__ == "__main__":
    print(json.dumps(on_two_nodes(*map(Path, sys.argv[1:]))))
