"""Records a target on a prompt set: generates, observes, and writes a recording, item by item.

The references are the target's own greedy completions, or those that the prompts bring; whether they are the
target's first choice in the recorded pass is measured and stored with every item. Knows nothing of drafters.

Letters: T positions, H hidden size.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Float
from jinja2 import TemplateError
from torch import Tensor

from draftgauge.errors import CheckpointError, PromptError, RecordingError, TargetError
from draftgauge.features import as_stored
from draftgauge.progress import Progress, silent
from draftgauge.prompts import Prompt, PromptSet
from draftgauge.recording import (
    MANIFEST,
    Item,
    Recording,
    RecordingPlan,
    TargetRecord,
    complete_recording,
    open_recording,
)
from draftgauge.store import locked, publish_file, sha256_file, sha256_json
from draftgauge.target import (
    NEAR_TIE_GAP,
    Target,
    count_layers,
    generate,
    load_target,
    load_tokenizer,
    norm_weight,
    observe,
    own_dtype,
    rope_theta,
    special_tokens,
    until_stop,
)
from draftgauge.targetfiles import function_digests, joint_digest, tokenizer_digests
from draftgauge.tensorfile import StoredTensor, read_safetensors, write_safetensors

TEMPLATES = ("chat", "chat-thinking", "chat-no-thinking", "raw")
_ENDS_FILE = "ends.safetensors"
_LOGIT_ROWS = 256
#: Prompts for which the layers around the taps are recorded too: enough to tell a tap that is off by one.
AROUND_ITEMS = 5
#: Variables of a chat template that change what it renders, and that `TEMPLATES` set.
_TEMPLATE_SWITCHES = ("enable_thinking",)
#: As which dtypes a stored tensor can be loaded without a change of its values.
_LOADS_EXACTLY: Mapping[str, tuple[torch.dtype, ...]] = {
    "F32": (torch.float32,),
    "BF16": (torch.bfloat16, torch.float32),
    "F16": (torch.float16, torch.float32),
}


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
    )
    folder = root / plan.digest
    if (folder / MANIFEST).is_file():
        return _complete_already(folder, portable=request.portable)
    with locked(folder):
        if (folder / MANIFEST).is_file():  # completed by another process since the first look
            return _complete_already(folder, portable=request.portable)
        target = load_target(folder_path, dtype=dtype)
        _check_taps(target, request.taps)
        record_of = _describe(target, folder, plan=plan, portable=request.portable)
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
            **_produced(target, batch_size=request.batch_size, digests=files | texts),
        }
        return complete_recording(
            folder, plan=plan, target=record_of, items=items, failed=failed, produced=produced
        )


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
        "template_switches": [switch for switch in _TEMPLATE_SWITCHES if switch in template],
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
    in_place = [name for name, place in recording.target.ends.items() if place["file"] != _ENDS_FILE]
    if portable and in_place:
        raise RecordingError(
            f"{folder} is complete, but the target's {', '.join(in_place)} are read in place; to make it "
            "portable, remove the folder and record again"
        )
    return recording


def _render(
    prompts: PromptSet, tokenizer: Any, *, template: str
) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Token ids of every prompt by its id, and the reasons of those that could not be rendered."""
    if template not in TEMPLATES:
        raise PromptError(f"template {template!r} is unknown; expected one of {', '.join(TEMPLATES)}")
    rendered: dict[str, list[int]] = {}
    failed: dict[str, str] = {}
    thinking = {"chat-thinking": True, "chat-no-thinking": False}.get(template)
    extra = {} if thinking is None else {"enable_thinking": thinking}
    for prompt in prompts.prompts:
        if prompt.prompt_ids is not None:
            rendered[prompt.id] = list(prompt.prompt_ids)
        elif tokenizer is None:
            failed[prompt.id] = "the target has no tokenizer; give prompt_ids"
        elif template == "raw":
            assert prompt.messages is not None
            if len(prompt.messages) > 1:
                failed[prompt.id] = f"--template raw takes one message, the prompt has {len(prompt.messages)}"
            else:
                rendered[prompt.id] = list(tokenizer(prompt.messages[0][1])["input_ids"])
        elif tokenizer.chat_template is None:
            failed[prompt.id] = "the tokenizer has no chat template; use --template raw or give prompt_ids"
        else:
            assert prompt.messages is not None
            turns = [{"role": role, "content": content} for role, content in prompt.messages]
            try:
                ids = tokenizer.apply_chat_template(
                    turns, add_generation_prompt=True, return_dict=False, **extra
                )
                rendered[prompt.id] = list(ids)
            except TemplateError as exc:
                failed[prompt.id] = f"the chat template refuses the conversation: {exc}"
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
    names = {prompt.id: f"{i:05d}.safetensors" for i, prompt in enumerate(prompts.prompts)}
    given = [prompt for prompt in prompts.prompts if prompt.id in rendered]
    problems = {p.id: _problem(target, p, rendered[p.id], request) for p in given}
    failed = {name: problem for name, problem in problems.items() if problem is not None}
    fit = [prompt for prompt in given if prompt.id not in failed]
    paths = {prompt.id: folder / names[prompt.id] for prompt in fit}
    wider = {prompt.id for prompt in fit[:AROUND_ITEMS]}
    done = {name: _stored_item(path) for name, path in paths.items() if path.is_file()}
    work = _completed(target, fit, rendered, request, done=frozenset(done))
    for prompt, completion in progress(work, label="record", total=len(fit) - len(done), unit="prompt"):
        if len(completion) < 2:
            failed[prompt.id] = f"the completion has {len(completion)} token(s); a round needs at least 2"
            continue
        layers = (request.taps, around if prompt.id in wider else ())
        tokens, path = rendered[prompt.id] + completion, paths[prompt.id]
        _write_item(target, prompt, tokens, len(rendered[prompt.id]), layers=layers, path=path)
        done[prompt.id] = _stored_item(path)
    return [done[prompt.id] for prompt in prompts.prompts if prompt.id in done], failed


def _problem(target: Target, prompt: Prompt, ids: Sequence[int], request: Request) -> str | None:
    """Why a prompt cannot be recorded; None if it can."""
    if not ids:
        return "the prompt is empty"
    vocabulary = target.model.get_input_embeddings().weight.shape[0]
    if max((*ids, *(prompt.completion_ids or ()))) >= vocabulary:
        return f"a token id is outside the target's vocabulary of {vocabulary}"
    limit = getattr(target.model.config.get_text_config(), "max_position_embeddings", None)
    completion = len(prompt.completion_ids) if prompt.completion_ids else request.max_new_tokens
    if limit is not None and len(ids) + completion > limit:
        return f"{len(ids)} prompt tokens and {completion} new ones exceed the target's {limit} positions"
    return None


def _completed(
    target: Target,
    prompts: Sequence[Prompt],
    rendered: Mapping[str, list[int]],
    request: Request,
    *,
    done: frozenset[str],
) -> Iterator[tuple[Prompt, list[int]]]:
    """Every prompt that is not done with its completion; similar lengths are generated together.

    A batch of which a part is done is generated whole: other company would change the last bits, and with
    them, in bfloat16, the text.
    """
    for prompt in prompts:
        if prompt.completion_ids is not None and prompt.id not in done:
            yield prompt, until_stop(list(prompt.completion_ids), target.stop_token_ids)
    free = [prompt for prompt in prompts if prompt.completion_ids is None]
    free.sort(key=lambda prompt: len(rendered[prompt.id]))
    for start in range(0, len(free), request.batch_size):
        batch = free[start : start + request.batch_size]
        if done.issuperset(prompt.id for prompt in batch):
            continue
        texts = generate(target, [rendered[p.id] for p in batch], max_new_tokens=request.max_new_tokens)
        yield from ((p, text) for p, text in zip(batch, texts, strict=True) if p.id not in done)


def _write_item(
    target: Target,
    prompt: Prompt,
    tokens: list[int],
    prompt_len: int,
    *,
    layers: tuple[tuple[int, ...], tuple[int, ...]],
    path: Path,
) -> None:
    """Observes the target on `tokens` and writes the item; `layers` are the taps, and those around them."""
    taps, around = layers
    seen = observe(target, tokens, taps=taps + around)
    if not bool(seen.taps.isfinite().all() and seen.normed.isfinite().all()):
        raise TargetError(
            f"the target's hidden states on prompt {prompt.id} are not finite ({target.dtype}); record with "
            "--dtype float32"
        )
    agreed, gaps = _agreement(target, seen.normed, tokens, prompt_len)
    text = "" if target.tokenizer is None else target.tokenizer.decode(tokens[prompt_len:])
    facts = {
        "id": prompt.id,
        "category": prompt.category,
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
    if around:  # left out otherwise, so that the bytes are those of before it could be asked for
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


def _describe(target: Target, folder: Path, *, plan: RecordingPlan, portable: bool) -> TargetRecord:
    """The target's identity and where its ends can be read without loading it."""
    model = target.model
    parts = {
        "embedding": model.get_input_embeddings().weight,
        "head": model.get_output_embeddings().weight,
        "norm": norm_weight(target),
    }
    files = _stored_weights(target.path)
    places = {name: None if portable else _place(model, part, files) for name, part in parts.items()}
    copied = {name: parts[name] for name, place in places.items() if place is None}
    (folder / _ENDS_FILE).unlink(missing_ok=True)  # of an unfinished attempt, perhaps with other ends
    if copied:
        with publish_file(folder / _ENDS_FILE) as partial:
            write_safetensors(partial, {name: as_stored(part) for name, part in copied.items()})
    stored = read_safetensors(folder / _ENDS_FILE)[0] if copied else {}
    ends = {}
    for name, place in places.items():
        tensor = place or stored[name]
        file = str(tensor.path.resolve()) if place else _ENDS_FILE
        ends[name] = {"file": file, "name": tensor.name, "sha256": tensor.sha256()}
    config = model.config.get_text_config()
    return TargetRecord(
        path=str(target.path.resolve()),
        digest=plan.target_digest,
        architecture=type(model).__name__,
        num_layers=len(target.decoder.layers),
        hidden_size=int(parts["norm"].shape[0]),
        vocab_size=int(parts["head"].shape[0]),
        norm_eps=float(config.rms_norm_eps),
        stop_token_ids=target.stop_token_ids,
        ends=ends,
        rope_theta=rope_theta(target),
        special_tokens=special_tokens(target.tokenizer),
    )


def _stored_weights(folder: Path) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored |= read_safetensors(path)[0]
    return stored


def _place(model: Any, part: Tensor, files: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """Where the target's own files hold a parameter's values; None where they do not under a known name."""
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if p is part]
    for stored in (files[name] for name in names if name in files):
        if stored.shape == tuple(part.shape) and part.dtype in _LOADS_EXACTLY.get(stored.dtype, ()):
            return stored
    return None
