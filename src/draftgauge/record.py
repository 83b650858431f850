"""Records a target on a prompt set: generates, observes, and writes a recording, item by item.

The references are the target's own greedy completions, or those that the prompts bring; whether they are the
target's first choice in the recorded pass is measured and stored with every item. Knows nothing of drafters.

Letters: T positions, H hidden size.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Float
from torch import Tensor

from draftgauge.errors import PromptError, TargetError
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
    generate,
    load_target,
    load_tokenizer,
    norm_weight,
    observe,
)
from draftgauge.tensorfile import StoredTensor, read_safetensors, write_safetensors

TEMPLATES = ("chat", "chat-thinking", "chat-no-thinking", "raw")
_ENDS_FILE = "ends.safetensors"
_LOGIT_ROWS = 256


@dataclass(frozen=True)
class Request:
    """What to record. `taps` are layer outputs counted from 0; `dtype` None means the target's own."""

    taps: tuple[int, ...]
    dtype: str | None = None
    max_new_tokens: int = 256
    template: str = "chat"
    portable: bool = False
    batch_size: int = 16


def record(
    target_path: str | Path,
    prompts: PromptSet,
    request: Request,
    *,
    root: Path = Path("recordings"),
    progress: Progress = silent,
) -> Recording:
    """Records the target on a prompt set, or returns the recording that already answers the same question.

    Resumes by item: whatever was killed completes when the same call is repeated.

    Args:
        target_path: A local Hugging Face directory.
        prompts: The prompt set; those with `completion_ids` are not generated.
        request: Taps, dtype, lengths and template.
        root: The folder that holds recordings.
        progress: Shows the work.

    Raises:
        TargetError: The target cannot be loaded, or has no such layer.
        PromptError: No prompt can be recorded.
        StoreError: Another process writes the same recording, or the disk refuses.
    """
    folder_path = Path(target_path)
    tokenizer = load_tokenizer(folder_path)
    rendered, failed = _render(prompts, tokenizer, template=request.template)
    target: Target | None = None
    if request.dtype is None:
        target = load_target(folder_path)
        request = dataclasses.replace(request, dtype=target.dtype)
    plan = RecordingPlan(
        target_digest=_weights_digest(folder_path, progress=progress),
        tokenizer_digest=_tokenizer_digest(folder_path),
        template=request.template,
        prompts_digest=prompts.digest,
        rendered_digest=sha256_json(rendered),
        taps=request.taps,
        dtype=str(request.dtype),
        max_new_tokens=request.max_new_tokens,
    )
    folder = root / plan.digest
    if (folder / MANIFEST).is_file():
        return open_recording(folder)
    with locked(folder):
        target = target or load_target(folder_path, dtype=request.dtype)
        _check_taps(target, request.taps)
        record_of = _describe(target, folder, plan=plan, portable=request.portable)
        items, late = _record_items(target, prompts, rendered, request, folder=folder, progress=progress)
        failed |= late
        if not items:
            reasons = "; ".join(f"{name}: {why}" for name, why in failed.items())
            raise PromptError(
                f"none of the {len(prompts.prompts)} prompts of {prompts.name} was recorded: {reasons}"
            )
        produced = {
            "prompts": prompts.name,
            "prompts_asked": len(prompts.prompts),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "batch_size": request.batch_size,
            "near_tie_gap": NEAR_TIE_GAP[target.dtype],
        }
        return complete_recording(
            folder, plan=plan, target=record_of, items=items, failed=failed, produced=produced
        )


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
            rendered[prompt.id] = list(tokenizer(prompt.messages[-1][1])["input_ids"])
        elif tokenizer.chat_template is None:
            failed[prompt.id] = "the tokenizer has no chat template; use --template raw or give prompt_ids"
        else:
            assert prompt.messages is not None
            turns = [{"role": role, "content": content} for role, content in prompt.messages]
            rendered[prompt.id] = list(
                tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False, **extra)
            )
    return rendered, failed


def _record_items(
    target: Target,
    prompts: PromptSet,
    rendered: Mapping[str, list[int]],
    request: Request,
    *,
    folder: Path,
    progress: Progress,
) -> tuple[list[Item], dict[str, str]]:
    """Every item that is on disk in the end, in the prompts' order, and the reasons of those that are not."""
    names = {prompt.id: f"{i:05d}.safetensors" for i, prompt in enumerate(prompts.prompts)}
    done: dict[str, Item] = {}
    failed: dict[str, str] = {}
    todo: list[Prompt] = []
    for prompt in prompts.prompts:
        path = folder / names[prompt.id]
        if path.is_file():
            done[prompt.id] = _stored_item(path)
        elif prompt.id in rendered:
            problem = _problem(target, prompt, rendered[prompt.id], request)
            if problem is None:
                todo.append(prompt)
            else:
                failed[prompt.id] = problem
    work = _completed(target, todo, rendered, request)
    for prompt, completion in progress(work, label="record", total=len(todo), unit="prompt"):
        if len(completion) < 2:
            failed[prompt.id] = f"the completion has {len(completion)} token(s); a round needs at least 2"
            continue
        tokens = rendered[prompt.id] + completion
        path = folder / names[prompt.id]
        _write_item(target, prompt, tokens, len(rendered[prompt.id]), request=request, path=path)
        done[prompt.id] = _stored_item(path)
    return [done[prompt.id] for prompt in prompts.prompts if prompt.id in done], failed


def _problem(target: Target, prompt: Prompt, ids: Sequence[int], request: Request) -> str | None:
    """Why a prompt cannot be recorded; None if it can."""
    if not ids:
        return "the prompt is empty"
    vocabulary = target.model.get_input_embeddings().weight.shape[0]
    if max((*ids, *(prompt.completion_ids or ()))) >= vocabulary:
        return f"a token id is outside the target's vocabulary of {vocabulary}"
    limit = getattr(target.model.config, "max_position_embeddings", None)
    completion = len(prompt.completion_ids) if prompt.completion_ids else request.max_new_tokens
    if limit is not None and len(ids) + completion > limit:
        return f"{len(ids)} prompt tokens and {completion} new ones exceed the target's {limit} positions"
    return None


def _completed(
    target: Target, prompts: Sequence[Prompt], rendered: Mapping[str, list[int]], request: Request
) -> Iterator[tuple[Prompt, list[int]]]:
    """Every prompt with its completion, batches generated as they are reached, similar lengths together."""
    given = [prompt for prompt in prompts if prompt.completion_ids is not None]
    yield from ((prompt, list(prompt.completion_ids or ())) for prompt in given)
    free = [prompt for prompt in prompts if prompt.completion_ids is None]
    free.sort(key=lambda prompt: len(rendered[prompt.id]))
    for start in range(0, len(free), request.batch_size):
        batch = free[start : start + request.batch_size]
        texts = generate(target, [rendered[p.id] for p in batch], max_new_tokens=request.max_new_tokens)
        yield from zip(batch, texts, strict=True)


def _write_item(
    target: Target, prompt: Prompt, tokens: list[int], prompt_len: int, *, request: Request, path: Path
) -> None:
    seen = observe(target, tokens, taps=request.taps)
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
        "tokens": _raw(torch.tensor(tokens, dtype=torch.int32)),
        "taps": _raw(seen.taps),
        "final": _raw(seen.final),
    }
    with publish_file(path) as partial:
        write_safetensors(partial, tensors, {"item": json.dumps(facts)})


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
    _, metadata = read_safetensors(path)
    facts = json.loads(metadata["item"])
    return Item(file=path.name, sha256=sha256_file(path), **facts)


def _check_taps(target: Target, taps: Sequence[int]) -> None:
    layers = len(target.decoder.layers)
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
    if copied:
        with publish_file(folder / _ENDS_FILE) as partial:
            write_safetensors(partial, {name: _raw(part) for name, part in copied.items()}, {})
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
    )


def _stored_weights(folder: Path) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored |= read_safetensors(path)[0]
    return stored


def _place(model: Any, part: Tensor, files: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """Where the target's own files hold a parameter; None where they do not under a name that is known."""
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if p is part]
    found = [files[n] for n in names if n in files and files[n].shape == tuple(part.shape)]
    return found[0] if found else None


def _weights_digest(folder: Path, *, progress: Progress) -> str:
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    if not files:
        raise TargetError(f"target {folder} holds no weights (*.safetensors or *.bin)")
    shown = progress(files, label="hash target", total=len(files), unit="file")
    return sha256_json([[path.name, sha256_file(path)] for path in shown])


def _tokenizer_digest(folder: Path) -> str:
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
    return sha256_json([[name, sha256_file(folder / name)] for name in names if (folder / name).is_file()])


def _raw(tensor: Tensor) -> Any:
    """A tensor as `write_safetensors` takes it; bfloat16 has no numpy type and goes as its bits."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return "BF16", tensor.view(torch.uint16).numpy()
    return tensor.numpy()
