"""Records a target on a prompt set: generates, observes, and writes a recording, item by item.

The references are the target's own greedy completions, or those that the prompts bring; whether they are the
target's first choice in the recorded pass is measured and stored with every item. Of a conversation every turn is
an item, and the target's own answers stand between the turns. Knows nothing of drafters.

Letters: T positions, H hidden size.
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Float
from torch import Tensor

from draftgauge.errors import CheckpointError, PromptError, RecordingError, TargetError
from draftgauge.features import as_stored, as_torch
from draftgauge.progress import Progress, silent
from draftgauge.prompts import Prompt, PromptSet
from draftgauge.recording import (
    BEFORE_NORM,
    ENDS_FILE,
    MANIFEST,
    Item,
    Recording,
    RecordingPlan,
    complete_recording,
    open_recording,
    verify_items,
)
from draftgauge.rendering import TEMPLATE_SWITCHES, TEMPLATES, render, require_template, turn_id, turns_of
from draftgauge.store import locked, publish_file, sha256_file, sha256_json
from draftgauge.target import (
    NEAR_TIE_GAP,
    Target,
    count_layers,
    generate,
    load_target,
    load_tokenizer,
    observe,
    own_dtype,
    target_record,
    until_stop,
)
from draftgauge.targetfiles import function_digests, joint_digest, tokenizer_digests
from draftgauge.tensorfile import read_safetensors, write_safetensors

_LOGIT_ROWS = 256
#: Prompts for which the layers around the taps are recorded too: enough to tell a tap that is off by one.
AROUND_ITEMS = 5


@dataclass(frozen=True)
class Request:
    """What to record. `taps` are layer outputs counted from 0; `dtype` None means the target's own.

    With `taps_around` the layers below and above every tap are kept too, for the first `AROUND_ITEMS` prompts: a
    diagnosis then tries whether the drafter was trained on those.
    """

    taps: tuple[int, ...]
    dtype: str | None = None
    max_new_tokens: int = 256
    template: str = "chat"
    portable: bool = False
    batch_size: int = 16
    taps_around: bool = False


def record_target(
    target_path: str | Path,
    prompts: PromptSet,
    *,
    request: Request,
    root: Path = Path("recordings"),
    completing: Recording | None = None,
    progress: Progress = silent,
) -> Recording:
    """Records the target on a prompt set, or returns the recording that already answers the same question.

    Resumes by item: whatever was killed completes when the same call is repeated.

    Args:
        target_path: A local Hugging Face directory.
        prompts: The prompt set; those with `completion_ids` are not generated, and these are used up to their
            first stop token, where a target's own completion ends.
        request: Taps, dtype, lengths and template.
        root: The folder that holds recordings.
        completing: Items of this recording are kept, where they are of the same prompts; the others are recorded.
        progress: Shows the work.

    Raises:
        TargetError: The target cannot be loaded, or has no such layer.
        PromptError: No prompt can be recorded.
        RecordingError: The recording is there, but damaged, or not portable although that is asked for.
        StoreError: Another process writes the same recording, or the disk refuses.
    """
    folder_path = Path(target_path)
    dtype = request.dtype or own_dtype(folder_path)
    tokenizer = load_tokenizer(folder_path)
    rendered, failed = _render(prompts, tokenizer, template=request.template)
    around = _around(request.taps, count_layers(folder_path)) if request.taps_around else ()
    files = function_digests(folder_path, progress=progress)
    texts = tokenizer_digests(folder_path)
    plan = RecordingPlan(
        target_digest=joint_digest(files),
        tokenizer_digest=joint_digest(texts),
        template=request.template,
        prompts_digest=prompts.digest,
        rendered_digest=sha256_json(rendered),
        taps=request.taps,
        dtype=dtype,
        max_new_tokens=request.max_new_tokens,
        around=around,
        source="" if completing is None else completing.digest,
    )
    folder = root / plan.digest
    if (folder / MANIFEST).is_file():
        return _complete_already(folder, portable=request.portable)
    with locked(folder):
        if (folder / MANIFEST).is_file():  # completed by another process since the first look
            return _complete_already(folder, portable=request.portable)
        target = load_target(folder_path, dtype=dtype)
        _check_taps(target, request.taps)
        record_of = target_record(target, folder, digest=plan.target_digest, portable=request.portable)
        _seed(completing, prompts, rendered, folder)
        items, late = _record_items(
            target, prompts, rendered, request, around=around, folder=folder, progress=progress
        )
        failed |= late
        if not items:
            reasons = "; ".join(f"{name}: {why}" for name, why in failed.items())
            raise PromptError(
                f"none of the {len(prompts.prompts)} prompts of {prompts.name} was recorded: {reasons}"
            )
        produced = {
            "prompts": prompts.name,
            "prompts_asked": len(prompts.prompts),
            **({} if completing is None else {"completes": str(completing.path.resolve())}),
            **_produced(target, batch_size=request.batch_size, digests=files | texts),
        }
        return complete_recording(
            folder, plan=plan, target=record_of, items=items, failed=failed, produced=produced
        )


def fill_recording(
    recording_path: str | Path,
    target_path: str | Path,
    *,
    prompts: PromptSet,
    root: Path = Path("recordings"),
    max_new_tokens: int = 256,
    batch_size: int = 16,
    progress: Progress = silent,
) -> Recording:
    """A new recording of all the prompts: the items of one that lacks some, and the others recorded now.

    Args:
        recording_path: The recording that lacks prompts; it stays as it is.
        target_path: The same target's directory.
        prompts: The whole set; an item is kept where it has the id and the tokens of one of them.
        root: The folder that holds recordings.
        max_new_tokens: Longest completion of those that are added.
        batch_size: Prompts generated at a time.
        progress: Shows the work.

    Raises:
        RecordingError: It holds the last layer after the norm, which what is recorded now would not.
        TargetError: As `record_target`.
    """
    kept = open_recording(recording_path)
    if kept.plan.last_layer != BEFORE_NORM:
        raise RecordingError(
            f"{kept.path} holds the last layer {kept.plan.last_layer}; what is recorded now would hold it "
            "before: record all prompts with `draftgauge record`"
        )
    template = kept.plan.template if kept.plan.template in TEMPLATES else "chat"
    request = Request(
        kept.plan.taps,
        kept.plan.dtype,
        max_new_tokens=max_new_tokens,
        template=template,
        batch_size=batch_size,
    )
    return record_target(target_path, prompts, request=request, root=root, completing=kept, progress=progress)


def _seed(
    kept: Recording | None, prompts: PromptSet, rendered: Mapping[str, list[int]], folder: Path
) -> None:
    """Puts the items of a recording that is to be completed where those of its prompts are looked for.

    Raises:
        RecordingError: An item was damaged.
    """
    items = {} if kept is None else {item.id: item for item in kept.items}
    for index, prompt in enumerate(prompts.prompts):
        for turn in (_Turn(prompt, index, number, ()) for number in range(1, turns_of(prompt) + 1)):
            item, path = items.get(turn.id), folder / turn.file
            if kept is None or item is None or path.is_file():
                continue
            tokens = as_torch(kept.tensors(item).tokens)[: item.prompt_len].tolist()
            if turn.number == 1 and tokens != rendered.get(turn.id):
                continue  # other tokens under the same name: it is recorded anew
            list(verify_items(kept, [item]))
            with publish_file(path) as partial:
                shutil.copyfile(kept.path / item.file, partial)


def _produced(target: Target, *, batch_size: int, digests: Mapping[str, str]) -> dict[str, Any]:
    """How the recording was made, and what else of the target may explain it one day."""
    template = str(getattr(target.tokenizer, "chat_template", None) or "")
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "batch_size": batch_size,
        "near_tie_gap": NEAR_TIE_GAP[target.dtype],
        "template_switches": [switch for switch in TEMPLATE_SWITCHES if switch in template],
        "target_files": {
            name: {"bytes": (target.path / name).stat().st_size, "sha256": digest}
            for name, digest in digests.items()
        },
    }


def _around(taps: Sequence[int], layers: int) -> tuple[int, ...]:
    """The layers beside the taps that are not tapped themselves, ascending; -1 is the embedding."""
    beside = {tap + step for tap in taps for step in (-1, 1)}
    return tuple(sorted(layer for layer in beside - set(taps) if -1 <= layer < layers))


def _complete_already(folder: Path, *, portable: bool) -> Recording:
    recording = open_recording(folder)
    in_place = [name for name, place in recording.target.ends.items() if place["file"] != ENDS_FILE]
    if portable and in_place:
        raise RecordingError(
            f"{folder} is complete, but the target's {', '.join(in_place)} are read in place; to make it "
            "portable, remove the folder and record again"
        )
    return recording


def _render(
    prompts: PromptSet, tokenizer: Any, *, template: str
) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Token ids of every prompt's first turn by its id, and the reasons of those that could not be rendered."""
    require_template(template)
    rendered: dict[str, list[int]] = {}
    failed: dict[str, str] = {}
    for prompt in prompts.prompts:
        name = turn_id(prompt, 1)
        try:
            rendered[name] = render(prompt, tokenizer, template=template)
        except PromptError as exc:
            failed[name] = str(exc)
    return rendered, failed


def _record_items(
    target: Target,
    prompts: PromptSet,
    rendered: Mapping[str, list[int]],
    request: Request,
    *,
    around: tuple[int, ...],
    folder: Path,
    progress: Progress,
) -> tuple[list[Item], dict[str, str]]:
    """Every item that is on disk in the end, in the prompts' order, and the reasons of those that are not."""
    first = [_Turn(p, i, 1, tuple(rendered.get(turn_id(p, 1), ()))) for i, p in enumerate(prompts.prompts)]
    turns = [turn for turn in first if turn.id in rendered]
    items: dict[tuple[int, int], Item] = {}
    failed: dict[str, str] = {}
    while turns:
        problems = {turn: _problem(target, turn, request) for turn in turns}
        failed |= {turn.id: problem for turn, problem in problems.items() if problem is not None}
        fit = [turn for turn in turns if problems[turn] is None]
        wider = frozenset(turn for turn in fit[:AROUND_ITEMS] if turn.number == 1)
        done, late = _record_turns(
            target, fit, request, around=(around, wider), folder=folder, progress=progress
        )
        failed |= late
        items |= {(turn.index, turn.number): item for turn, item in done.items()}
        turns, unasked = _next_turns(target, done, request, folder=folder)
        failed |= unasked
    return [items[place] for place in sorted(items)], failed


@dataclass(frozen=True)
class _Turn:
    """One turn of a prompt, counted from 1, whose tokens are known; `index` is the prompt's place in its set."""

    prompt: Prompt
    index: int
    number: int
    prompt_ids: tuple[int, ...]
    answers: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return turn_id(self.prompt, self.number)

    @property
    def file(self) -> str:
        return f"{self.index:05d}{f'-{self.number}' if self.number > 1 else ''}.safetensors"

    @property
    def conversation(self) -> str | None:
        """The conversation that it is one turn of; None for a prompt that stands alone."""
        return self.prompt.id if self.prompt.follow_ups else self.prompt.conversation


def _record_turns(
    target: Target,
    turns: Sequence[_Turn],
    request: Request,
    *,
    around: tuple[tuple[int, ...], frozenset[_Turn]],
    folder: Path,
    progress: Progress,
) -> tuple[dict[_Turn, Item], dict[str, str]]:
    """The items of turns that stand side by side; those on disk already are taken as they are."""
    layers, wider = around
    failed: dict[str, str] = {}
    done = {t: _stored_item(folder / t.file) for t in turns if (folder / t.file).is_file()}
    work = _completed(target, turns, request, done=frozenset(done))
    for turn, completion in progress(work, label="record", total=len(turns) - len(done), unit="prompt"):
        if len(completion) < 2:
            failed[turn.id] = f"the completion has {len(completion)} token(s); a round needs at least 2"
            continue
        held = (request.taps, layers if turn in wider else ())
        _write_item(target, turn, completion, layers=held, path=folder / turn.file)
        done[turn] = _stored_item(folder / turn.file)
    return done, failed


def _next_turns(
    target: Target, done: Mapping[_Turn, Item], request: Request, *, folder: Path
) -> tuple[list[_Turn], dict[str, str]]:
    """What the user says next to the target's answers, rendered; and why some cannot be."""
    turns: list[_Turn] = []
    failed: dict[str, str] = {}
    for turn, item in done.items():
        if turn.number == turns_of(turn.prompt):
            continue
        tokens = as_torch(read_safetensors(folder / item.file)[0]["tokens"])[item.prompt_len :]
        said = target.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
        answers, number = (*turn.answers, said), turn.number + 1
        try:
            ids = render(turn.prompt, target.tokenizer, template=request.template, answers=answers)
            turns.append(_Turn(turn.prompt, turn.index, number, tuple(ids), answers))
        except PromptError as exc:
            failed[turn_id(turn.prompt, number)] = str(exc)
    return turns, failed


def _problem(target: Target, turn: _Turn, request: Request) -> str | None:
    """Why a turn cannot be recorded; None if it can."""
    ids, given = turn.prompt_ids, turn.prompt.completion_ids
    if not ids:
        return "the prompt is empty"
    vocabulary = target.model.get_input_embeddings().weight.shape[0]
    if max((*ids, *(given or ()))) >= vocabulary:
        return f"a token id is outside the target's vocabulary of {vocabulary}"
    limit = getattr(target.model.config.get_text_config(), "max_position_embeddings", None)
    completion = len(given) if given else request.max_new_tokens
    if limit is not None and len(ids) + completion > limit:
        return f"{len(ids)} prompt tokens and {completion} new ones exceed the target's {limit} positions"
    return None


def _completed(
    target: Target, turns: Sequence[_Turn], request: Request, *, done: frozenset[_Turn]
) -> Iterator[tuple[_Turn, list[int]]]:
    """Every turn that is not done with its completion; similar lengths are generated together.

    A batch of which a part is done is generated whole: other company would change the last bits, and with
    them, in bfloat16, the text.
    """
    for turn in turns:
        if turn.prompt.completion_ids is not None and turn not in done:
            yield turn, until_stop(list(turn.prompt.completion_ids), target.stop_token_ids)
    free = [turn for turn in turns if turn.prompt.completion_ids is None]
    free.sort(key=lambda turn: len(turn.prompt_ids))
    for start in range(0, len(free), request.batch_size):
        batch = free[start : start + request.batch_size]
        if done.issuperset(batch):
            continue
        texts = generate(target, [t.prompt_ids for t in batch], max_new_tokens=request.max_new_tokens)
        yield from ((t, text) for t, text in zip(batch, texts, strict=True) if t not in done)


def _write_item(
    target: Target,
    turn: _Turn,
    completion: Sequence[int],
    *,
    layers: tuple[tuple[int, ...], tuple[int, ...]],
    path: Path,
) -> None:
    """Observes the target on a turn and writes the item; `layers` are the taps, and those around them."""
    taps, around = layers
    tokens, prompt_len = [*turn.prompt_ids, *completion], len(turn.prompt_ids)
    seen = observe(target, tokens, taps=taps + around)
    if not bool(seen.taps.isfinite().all() and seen.normed.isfinite().all()):
        raise TargetError(
            f"the target's hidden states on prompt {turn.id} are not finite ({target.dtype}); record with "
            "--dtype float32"
        )
    agreed, gaps = _agreement(target, seen.normed, tokens, prompt_len)
    text = "" if target.tokenizer is None else target.tokenizer.decode(tokens[prompt_len:])
    facts = {
        "id": turn.id,
        "category": turn.prompt.category,
        "prompt_len": prompt_len,
        "length": len(tokens),
        "stopped": tokens[-1] in target.stop_token_ids,
        "agreed": agreed,
        "near_ties": sum(gap < NEAR_TIE_GAP[target.dtype] for gap in gaps),
        "worst_gap": max(gaps, default=0.0),
        "text": text,
    }
    tensors = {
        "tokens": as_stored(torch.tensor(tokens, dtype=torch.int32)),
        "taps": as_stored(seen.taps[: len(taps)]),
        "final": as_stored(seen.final),
    }
    # What is not asked for is left out, so that the bytes are those of before it could be.
    if turn.conversation is not None:
        facts["conversation"] = turn.conversation
    if around:
        facts["around"] = around
        tensors["around"] = as_stored(seen.taps[len(taps) :])
    with publish_file(path) as partial:
        write_safetensors(partial, tensors, metadata={"item": json.dumps(facts)})


def _agreement(
    target: Target, normed: Float[Tensor, "T H"], tokens: Sequence[int], prompt_len: int
) -> tuple[int, list[float]]:
    """How many reference tokens are the target's argmax, and the logit gap of each that is not."""
    agreed, gaps = 0, []
    head = target.model.get_output_embeddings()
    for start in range(prompt_len, len(tokens), _LOGIT_ROWS):
        stop = min(start + _LOGIT_ROWS, len(tokens))
        logits = head(normed[start - 1 : stop - 1]).float()
        reference = logits.gather(1, torch.tensor(tokens[start:stop])[:, None])[:, 0]
        gap = logits.max(dim=1).values - reference
        agreed += int((gap == 0).sum())
        gaps += [float(value) for value in gap[gap > 0]]
    return agreed, gaps


def _stored_item(path: Path) -> Item:
    try:
        facts = json.loads(read_safetensors(path)[1]["item"])
        facts["around"] = tuple(facts.get("around", ()))
        return Item(file=path.name, sha256=sha256_file(path), **facts)
    except (CheckpointError, KeyError, ValueError, TypeError) as exc:
        raise RecordingError(f"{path} is damaged: {exc}; remove it and repeat the command") from exc


def _check_taps(target: Target, taps: Sequence[int]) -> None:
    layers = len(target.decoder.layers)
    if not taps or len(set(taps)) < len(taps):
        raise TargetError(f"taps {list(taps)} must name at least one layer, and none twice; see --taps")
    wrong = [tap for tap in taps if not -1 <= tap < layers]
    if wrong:
        raise TargetError(
            f"taps {wrong} do not exist: {target.path} has layer outputs 0 to {layers - 1}, and -1 for the embedding"
        )
