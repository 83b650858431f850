"""Holds the replay beside other witnesses of the same drafter, and says where they part first.

The witnesses: an online loop of our own, a running server, a log that somebody kept. Each is laid beside the replay
under its own convention, depth by depth. On the same text greedy rounds are the same, so a difference that near-ties
do not explain is real, and where it first appears is where the fault lies: recording or wiring, instrument,
references, engine, or what the log was made of.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftgauge.acceptance import CONVENTIONS, Blocks, Policy, Walk, counts_of, walk_blocks
from draftgauge.check import quick_controls
from draftgauge.engines.counts import RequestCounts, Served, per_depth
from draftgauge.engines.kinds import connected
from draftgauge.engines.logs import read_log
from draftgauge.engines.served import fetch_served
from draftgauge.errors import InputError
from draftgauge.features import as_torch, normed
from draftgauge.measure import blocks_of, measure
from draftgauge.online import witness_online
from draftgauge.pairing import Pair, open_drafter, open_pair, require_sound
from draftgauge.progress import Progress, silent
from draftgauge.recording import AFTER_NORM, Item, Recording
from draftgauge.stated import Stated
from draftgauge.stats import Estimate, mean, paired_difference, ratio
from draftgauge.target import NEAR_TIE_GAP, load_target
from draftgauge.trust import outcome

#: On the same text the rounds are the same but for near-ties: a larger relative difference is none of chance.
TOLERANCE = 0.03
#: Where more of the served texts than this part from the references, the texts are not the same.
_OTHER_TEXTS = 0.1
_KEY = "DRAFTGAUGE_API_KEY"


@dataclass(frozen=True)
class Question:
    """What to hold beside the replay.

    `policies` are compared with the online loop, which runs where `target` is given; `engine` is a server's address;
    `log` a file of counts, of which `log_method` names one method where it holds several.
    """

    stated: Stated = field(default_factory=Stated)
    policies: tuple[Policy, ...] = (Policy("chain"), Policy("ddtree", 16))
    dtype: str = "float32"
    state_dict: str | None = None
    num_prompts: int | None = None
    target: Path | None = None
    engine: str | None = None
    model: str | None = None
    log: Path | None = None
    log_method: str | None = None


def crosscheck_checkpoint(
    checkpoint_path: str | Path,
    recording_path: str | Path,
    question: Question = Question(),
    *,
    progress: Progress = silent,
) -> dict[str, Any]:
    """What each witness says of the drafter, and where they part first.

    Raises:
        InputError: Nothing is to be held beside the replay, or what is given cannot be read.
        EngineError: The server does not speculate, or shows no counts.

    Example of the result: `{"replay": {...}, "online": {...}, "served": {...}, "log": None, "first_difference":
    {"where": "engine", "why": "...", "advice": "..."}}`.
    """
    if question.target is None and question.engine is None and question.log is None:
        raise InputError("nothing is to be held beside the replay; give --target, --engine or --log")
    pair = open_pair(
        checkpoint_path,
        recording_path,
        stated=question.stated,
        state_dict=question.state_dict,
        num_prompts=question.num_prompts,
        progress=progress,
    )
    require_sound(pair.checkpoint, pair.wiring, progress=progress)
    drafter = open_drafter(pair.checkpoint, pair.wiring, recording=pair.recording, dtype=question.dtype)
    policies = tuple(sorted({Policy("chain"), *question.policies}))
    replayed: dict[str, Blocks] = {}
    for item, drafted in measure(
        drafter, pair.recording, items=pair.items, policies=policies, progress=progress
    ):
        replayed[item.id] = blocks_of(drafted, item, policies=policies)
    walks = {policy: walks_of(policy, replayed) for policy in policies}
    controls = quick_controls(pair, drafter, blocks=sum(len(b.anchors) for b in replayed.values()))
    value: dict[str, Any] = {
        "checkpoint": str(pair.checkpoint.path),
        "recording": str(pair.recording.path),
        "replay": _replay(walks) | {"trust": outcome(controls)},
        "online": None,
        "served": None,
        "log": None,
    }
    if question.target is not None:
        target = load_target(question.target, dtype=pair.recording.plan.dtype)
        value["online"] = witness_online(target, drafter, pair.recording, walks=walks, progress=progress)
    if question.engine is not None:
        value["served"] = _served(question, pair, replayed, progress=progress)
    if question.log is not None:
        served = read_log(question.log, method=question.log_method)
        value["log"] = {"path": str(question.log), **beside_replay(served, replayed)}
    return value | {"first_difference": first_difference(value)}


def walks_of(policy: Policy, replayed: Mapping[str, Blocks]) -> dict[str, Walk]:
    """The walks of one policy over all replayed prompts."""
    return {name: walk_blocks(policy, blocks) for name, blocks in replayed.items()}


def _replay(walks: Mapping[Policy, Mapping[str, Walk]]) -> dict[str, Any]:
    """The replay's own numbers, every policy on its own walk."""
    return {
        "policies": {
            policy.slug: {
                "label": policy.label,
                "rounds": sum(len(w.anchors) for w in by_name.values()),
                "accepted": sum(int(w.streak.sum()) for w in by_name.values()),
                "committed": sum(int(w.committed.sum()) for w in by_name.values()),
                "tau_pooled": _pooled(list(by_name.values())).as_dict(),
                "survival": _survival(_histogram(list(by_name.values()))),
            }
            for policy, by_name in walks.items()
        },
        "prompts": len(next(iter(walks.values()))),
    }


def _pooled(walks: Sequence[Walk]) -> Estimate:
    return ratio([int(w.committed.sum()) for w in walks], [len(w.anchors) for w in walks])


def _histogram(walks: Sequence[Walk]) -> list[int]:
    return [int(n) for n in np.sum([counts_of(walk).accepted_histogram for walk in walks], axis=0)]


def _survival(histogram: Sequence[int]) -> list[float]:
    """The share of rounds that accepted the token at each depth."""
    rounds = sum(histogram)
    return [count / rounds for count in per_depth(histogram)] if rounds else []


# --- a server -------------------------------------------------------------------------------------------


def _served(
    question: Question, pair: Pair, replayed: Mapping[str, Blocks], *, progress: Progress
) -> dict[str, Any]:
    """What a running server counts on the recorded prompts, given as token ids."""
    assert question.engine is not None
    references = {i.id: as_torch(pair.recording.tensors(i).tokens).tolist() for i in pair.items}
    prompts = {item.id: references[item.id][: item.prompt_len] for item in pair.items}
    longest = max(item.completion_len for item in pair.items)
    with connected(question.engine, key=os.environ.get(_KEY), model=question.model) as engine:
        served = fetch_served(engine, prompts, max_new_tokens=longest, progress=progress)
        facts = {"url": engine.url, "kind": engine.kind}
    texts = _texts(served.rows, pair.recording, pair.items, references)
    return facts | beside_replay(served, replayed) | {"texts": texts}


def beside_replay(served: Served, replayed: Mapping[str, Blocks]) -> dict[str, Any]:
    """A witness's numbers under its own convention, and the replay's under the same, of what it verifies."""
    policy = _verified(served, depth=next(iter(replayed.values())).depth)
    by_name = walks_of(policy, replayed)
    rows = {row.id: row for row in served.rows if row.id is not None and row.id in by_name and row.rounds}
    shared = {name: by_name[name] for name in rows} if rows else by_name
    depths = None if served.accepted_per_depth is None else len(served.accepted_per_depth)
    theirs, ours = _value(served, rows), _under(served.convention, list(shared.values()))
    value: dict[str, Any] = {
        "convention": served.convention,
        "source": served.source,
        "policy": policy.slug,
        "prompts": len(shared) if rows else served.requests,
        "theirs": None if theirs is None else theirs.as_dict(),
        "replay": ours.as_dict(),
        "difference": None,
        "relative": None,
        "survival": None,
        "replay_survival": _survival(_histogram(list(shared.values())))[:depths],
        "counts": {k: v for k, v in asdict(served).items() if k not in ("rows", "doubts")},
        "doubts": list(served.doubts),
    }
    if served.accepted_per_depth is not None and served.rounds:
        value["survival"] = [count / served.rounds for count in served.accepted_per_depth]
    if theirs is not None and theirs.value is not None and ours.value is not None:
        value["relative"] = theirs.value / ours.value - 1
        if rows:
            pairs = [(_own(served.convention, rows[n]), _of_walk(served.convention, shared[n])) for n in rows]
            known = [(a, b) for a, b in pairs if a is not None and b is not None]
            if known:
                value["difference"] = paired_difference(
                    [a for a, _ in known], [b for _, b in known]
                ).as_dict()
    return value


def _verified(served: Served, *, depth: int) -> Policy:
    """The policy whose rounds a witness counted: the tree that it names, or a chain as long as it verifies."""
    tree = re.search(r"ddtree\D*(\d+)", served.source, re.IGNORECASE)
    if tree is not None:
        return Policy("ddtree", int(tree[1]))
    verified = served.drafted_tokens / served.rounds if served.drafted_tokens and served.rounds else depth
    length = round(verified)
    return Policy("chain", length) if 0 < length < depth and length == verified else Policy("chain")


def _value(served: Served, rows: Mapping[str, RequestCounts]) -> Estimate | None:
    """The witness's acceptance length under its own convention."""
    if rows:
        owns = [own for row in rows.values() if (own := _own(served.convention, row)) is not None]
        if CONVENTIONS[served.convention].averaged == "response mean":
            return mean(owns) if owns else None
        counted = [
            (r.rounds, r.accepted_tokens) for r in rows.values() if r.rounds and r.accepted_tokens is not None
        ]
        if counted:
            return ratio(
                [rounds + accepted for rounds, accepted in counted], [rounds for rounds, _ in counted]
            )
    if served.rounds and served.accepted_tokens is not None:
        tau = 1 + served.accepted_tokens / served.rounds
        reason = "only counts over all requests are known"
        return Estimate(tau, None, None, served.requests or 0, "pooled ratio", reason=reason)
    return None


def _own(convention: str, row: RequestCounts) -> float | None:
    """One request's acceptance length."""
    if not row.rounds:
        return None
    if convention == "sglang_request":
        return None if row.completion_tokens is None else row.completion_tokens / row.rounds
    return None if row.accepted_tokens is None else 1 + row.accepted_tokens / row.rounds


def _of_walk(convention: str, walk: Walk) -> float | None:
    rounds = len(walk.anchors)
    return CONVENTIONS[convention].tokens(walk) / rounds if rounds else None


def _under(convention: str, walks: Sequence[Walk]) -> Estimate:
    """The replay's number under a convention."""
    rule = CONVENTIONS[convention]
    counted = [walk for walk in walks if len(walk.anchors)]
    if rule.averaged == "response mean":
        return mean([rule.tokens(walk) / len(walk.anchors) for walk in counted])
    return ratio([rule.tokens(walk) for walk in counted], [len(walk.anchors) for walk in counted])


# --- the texts ------------------------------------------------------------------------------------------


def _texts(
    rows: Sequence[RequestCounts],
    recording: Recording,
    items: Sequence[Item],
    references: Mapping[str, list[int]],
) -> dict[str, Any]:
    """Where served completions part from the references, and whether a near-tie explains it."""
    by_id = {row.id: row.completion_ids for row in rows if row.completion_ids is not None}
    parted = []
    for item in items:
        served = by_id.get(item.id)
        reference = references[item.id][item.prompt_len :]
        if served is None or list(served[: len(reference)]) == reference:
            continue
        at = next((i for i, (a, b) in enumerate(zip(served, reference, strict=False)) if a != b), None)
        at = min(len(served), len(reference)) if at is None else at
        gap = _gap(recording, item, at, served)
        near = NEAR_TIE_GAP[recording.plan.dtype]
        parted.append(
            {
                "prompt": item.id,
                "token": at,
                "gap": gap,
                "near_tie": None if gap is None else gap < near,
            }
        )
    return {"prompts": len(by_id), "same": len(by_id) - len(parted), "parted": parted}


def _gap(recording: Recording, item: Item, at: int, served: Sequence[int]) -> float | None:
    """By how much the served token's logit is below the reference's in the recorded state; None where unknown."""
    final = recording.tensors(item).final
    if final is None or at >= len(served) or at >= item.completion_len:
        return None
    head = as_torch(recording.end("head"))
    position = item.prompt_len + at - 1
    state = as_torch(final)[position : position + 1]
    if recording.plan.last_layer != AFTER_NORM:
        state = normed(state, as_torch(recording.end("norm")), eps=recording.target.norm_eps)
    logits = (state.to(head.dtype) @ head.T).float()[0]
    if not 0 <= served[at] < len(logits):
        return None
    reference = int(as_torch(recording.tensors(item).tokens)[item.prompt_len + at])
    return float(torch.abs(logits[reference] - logits[served[at]]))


# --- where they part ------------------------------------------------------------------------------------


def first_difference(value: Mapping[str, Any]) -> dict[str, Any]:
    """Where the witnesses part first, in the order in which one rests on the other; `where` is None if nowhere.

    The order: recording and wiring (the replay's own controls), instrument or target (the online loop), references
    (the served texts), engine (acceptance on the same texts), traffic (a log). `drafter` is said where all agree
    that it wins next to nothing.
    """
    for look in (_in_the_replay, _online, _in_the_texts, _in_the_engine, _in_the_log):
        found = look(value)
        if found is not None:
            where, why, advice = found
            return {"where": where, "why": why, "advice": advice}
    chain = value["replay"]["policies"]["chain"]["tau_pooled"]["value"]
    if chain is not None and chain < 1.2:
        why = f"all agree, and the chain commits {chain:.3f} tokens a round: the drafter is weak, or wired wrongly"
        return {"where": "drafter", "why": why, "advice": "`draftgauge diagnose` searches the wirings nearby"}
    return {"where": None, "why": "the witnesses agree", "advice": None}


_Found = tuple[str, str, str] | None


def _in_the_replay(value: Mapping[str, Any]) -> _Found:
    trust = value["replay"]["trust"]
    if trust["trusted"]:
        return None
    first = next(control for control in trust["controls"] if control["verdict"] == "failed")
    return (
        "recording or wiring",
        f"control {first['slug']} failed: {first['measured']}",
        first["advice"] or "`draftgauge check` says more",
    )


def _online(value: Mapping[str, Any]) -> _Found:
    online = value["online"]
    real = [] if online is None else [d for d in online["divergences"] if not d["near_tie"]]
    if not real:
        return None
    first = real[0]
    told = f"{first['prompt']}, {first['policy']}, anchor {first['anchor']}, decided by {first['gap']:.3g}"
    if first["what"] == "text":
        return (
            "references",
            f"the target at hand decodes another text than was recorded ({told})",
            "the target changed since, or the references are not its own: record it again",
        )
    return (
        "instrument",
        f"online decoding accepts {first['online']} where the replay accepts {first['replay']} ({told})",
        "that is an error of ours: please report it with the run",
    )


def _in_the_texts(value: Mapping[str, Any]) -> _Found:
    served = value["served"]
    if served is None or not served["texts"]["prompts"]:
        return None
    texts = served["texts"]
    real = [parted for parted in texts["parted"] if not parted["near_tie"]]
    if len(real) <= _OTHER_TEXTS * texts["prompts"]:
        return None
    first = real[0]
    gap = "" if first["gap"] is None else f", a logit gap of {first['gap']:.3g}"
    return (
        "references",
        f"{len(real)} of {texts['prompts']} served texts are not the references and no near-tie explains it (first: "
        f"{first['prompt']} at token {first['token']}{gap})",
        "the server runs another target, revision or quantisation, or does not decode greedily; take the references "
        "from it with `draftgauge references`, or compare what it serves with the recorded target",
    )


def _in_the_engine(value: Mapping[str, Any]) -> _Found:
    served = value["served"]
    if served is None or _agrees(served):
        return None
    return (
        "engine",
        f"on the same texts {_told(served)}: the engine computes another drafter than its file says",
        "compare what it was started with to `draftgauge export`, which lists what a format leaves to the engine; "
        "`draftgauge diagnose` shows which wiring gives the engine's number",
    )


def _in_the_log(value: Mapping[str, Any]) -> _Found:
    log = value["log"]
    if log is None or _agrees(log):
        return None
    if value["served"] is not None:
        return (
            "template or traffic",
            f"the server agrees on these prompts, given as token ids; in the log {_told(log)}",
            "what was served there is rendered otherwise (template, thinking mode, system prompt) or is other text; "
            "record prompts of that kind",
        )
    return (
        "engine, template or traffic",
        f"in the log {_told(log)}",
        "the log does not say its texts: hold the server itself beside the replay with --engine",
    )


def _agrees(witness: Mapping[str, Any]) -> bool:
    """Whether a witness's number is the replay's: within the tolerance, or not resolved from it by its interval."""
    if witness["relative"] is None or abs(witness["relative"]) <= TOLERANCE:
        return True
    difference = witness["difference"]
    if difference is None or difference["low"] is None:
        return False
    return bool(difference["low"] <= 0 <= difference["high"])


def _told(witness: Mapping[str, Any]) -> str:
    theirs, ours = witness["theirs"]["value"], witness["replay"]["value"]
    text = f"acceptance is {theirs:.3f} where the replay gives {ours:.3f} ({witness['convention']})"
    depths = [
        (depth, a, b)
        for depth, (a, b) in enumerate(
            zip(witness["survival"] or (), witness["replay_survival"], strict=False), start=1
        )
        if abs(a - b) > TOLERANCE
    ]
    if depths:
        depth, a, b = depths[0]
        text += f", from depth {depth} on ({a:.1%} against {b:.1%} of the rounds get there)"
    return text
