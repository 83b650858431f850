"""Where the time of one `eval` goes, stage by stage, from timers that stand around functions of the package.

    python bench/stages.py CHECKPOINT RECORDING RUNS        prints JSON

To be run in a process of its own: importing what is needed is a stage too. The package itself carries no timers; they
are put around the functions of `TIMED` here, and each counts its own time without that of the stages inside it.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()

#: The stages and what each does, in the order of an evaluation.
WORDS: Mapping[str, str] = {
    "start": "importing the package and the libraries that it needs",
    "open": "opening and verifying the checkpoint, its wiring and the recording; bringing the drafter into torch",
    "read": "hashing the recorded items and joining their taps into features",
    "context": "keys and values of the context in every layer, once a sequence",
    "attention": "the blocks' rows attend to the context below their anchor and to their own block; with projections",
    "mlp": "the blocks' feed-forward layers",
    "block": "the rest of the network: embedding, norms, sums",
    "head": "logits of the vocabulary, slice by slice",
    "ranking": "rank and log-probability of every reference token, the best tokens of every row",
    "tree": "where the reference stands in the draft tree of every anchor",
    "counting": "streaks, walks, estimates with intervals, caveats",
    "controls": "whether the number can be trusted: a look at the recording, and a few blocks drafted again",
    "writing": "blocks and summary as files",
    "rest": "everything between: references, conversions, publishing the run",
}
#: The arithmetic that the drafter itself asks for.
ARITHMETIC = ("context", "attention", "mlp", "block", "head")
#: Around which functions timers stand: the module or class that they are called from, and their name there.
TIMED: Mapping[str, tuple[str, ...]] = {
    "open": ("evaluate.open_pair", "evaluate.require_sound", "evaluate.open_drafter"),
    "read": ("measure.verify_items", "measure.read_item"),
    "context": ("drafters.dflash.DFlash.context",),
    "attention": ("drafters.dflash.Attention.forward",),
    "mlp": ("drafters.dflash.MLP.forward",),
    "block": ("drafters.dflash.DFlash.draft",),
    "head": ("drafters.dflash.DFlash.logits",),
    "ranking": ("replay.rank_slices",),
    "tree": ("replay.reference_order",),
    "counting": ("shards.columns_of", "shards.blocks_of", "evaluate.summarise", "evaluate.caveats"),
    "controls": ("evaluate.quick_controls", "evaluate.block_size_effect"),
    "writing": ("shards.packed", "parts.Parts.add", "runs.BlockWriter.write_rows", "evaluate.write_json"),
}
#: Stages whose inside is theirs, whatever is called there.
WHOLE = ("controls",)


def place_of(name: str) -> tuple[Any, str]:
    """The module or class of a timed function, and the function's name there.

    Raises:
        AttributeError: The package has no such function any more.
    """
    *owners, last = name.split(".")
    for count in range(len(owners), 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(("draftgauge", *owners[:count])))
        except ModuleNotFoundError:
            continue
        for inner in owners[count:]:
            owner = getattr(owner, inner)
        getattr(owner, last)
        return owner, last
    raise AttributeError(f"draftgauge has no {name}")


class Clock:
    """Whose turn it is: the time since the last change of stage belongs to the stage on top of the stack."""

    def __init__(self, now: Callable[[], float] = time.perf_counter, *, stage: str = "rest") -> None:
        self.spent: dict[str, float] = {}
        self._now, self._stack, self._since = now, [stage], now()

    def _turn(self) -> None:
        now = self._now()
        self.spent[self._stack[-1]] = self.spent.get(self._stack[-1], 0.0) + now - self._since
        self._since = now

    def enter(self, stage: str) -> None:
        """From now on the time is this stage's; inside a whole stage it stays that one's."""
        self._turn()
        self._stack.append(self._stack[-1] if self._stack[-1] in WHOLE else stage)

    def leave(self) -> None:
        """The time is the outer stage's again."""
        self._turn()
        self._stack.pop()

    def around(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        """The function, timed; where it gives an iterator, that is timed as well."""

        @functools.wraps(function)
        def timed(*args: Any, **named: Any) -> Any:
            self.enter(stage)
            try:
                value = function(*args, **named)
            finally:
                self.leave()
            return self._each(value, stage) if isinstance(value, Iterator) else value

        return timed

    def _each(self, values: Iterator[Any], stage: str) -> Iterator[Any]:
        while True:
            self.enter(stage)
            try:
                value = next(values)
            except StopIteration:
                return
            finally:
                self.leave()
            yield value


def main() -> int:
    """Evaluates with timers around, prints what every stage took."""
    checkpoint, recording, runs = map(Path, sys.argv[1:])
    places = [(stage, *place_of(name)) for stage, names in TIMED.items() for name in names]
    from draftgauge.evaluate import evaluate_checkpoint

    clock = Clock()
    imported = time.perf_counter() - STARTED
    for stage, owner, name in places:
        setattr(owner, name, clock.around(getattr(owner, name), stage))
    run = evaluate_checkpoint(checkpoint, recording, root=runs)
    clock.enter("rest")  # what the last stage took is counted when another begins
    spent = {"start": imported, **clock.spent}
    blocks = run.blocks(["anchor"]).num_rows
    print(json.dumps({"spent": spent, "prompts": len(run.summary["prompts"]), "anchors": blocks}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
