"""Runs the target: loads it, completes prompts greedily, and observes what a drafter may see of it.

Taps are the outputs of decoder layers, taken by hooks in one teacher-forced pass; the final state is the last
layer's output before the norm. Knows nothing of recordings or drafters.

Letters: N taps, T positions, H hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from draftgauge.errors import TargetError

#: Logit gaps below which two tokens may swap between batched and single decoding, by compute dtype.
NEAR_TIE_GAP: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.03}


@dataclass(frozen=True)
class Target:
    """A loaded target: the model in evaluation mode, its tokenizer, and the parts that are observed."""

    path: Path
    model: Any
    tokenizer: Any
    dtype: str

    @property
    def decoder(self) -> Any:
        """The stack of decoder layers with the final norm."""
        return self.model.get_decoder()

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids at which generation ends, from the target's generation config or its tokenizer."""
        ids = self.model.generation_config.eos_token_id
        if ids is None:
            ids = self.tokenizer.eos_token_id if self.tokenizer is not None else None
        if ids is None:
            return ()
        return tuple(ids) if isinstance(ids, list) else (int(ids),)


@dataclass(frozen=True)
class Observation:
    """One teacher-forced pass: `taps` [N, T, H], `final` [T, H] before the norm, `normed` [T, H] after it."""

    taps: Tensor
    final: Tensor
    normed: Tensor


def load_target(path: str | Path, *, dtype: str | None = None) -> Target:
    """The target in a local Hugging Face directory, ready to observe.

    Raises:
        TargetError: The path is no such directory, or the dtype is unknown.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise TargetError(
            f"target {path} is not a Hugging Face directory with a config.json; give a local path"
        )
    if dtype is not None and dtype not in NEAR_TIE_GAP:
        raise TargetError(f"dtype {dtype!r} is unknown; expected one of {', '.join(NEAR_TIE_GAP)}")
    chosen = getattr(torch, dtype) if dtype else "auto"
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=chosen, local_files_only=True)
    except (OSError, ValueError, KeyError) as exc:
        raise TargetError(f"target {path} could not be loaded by transformers: {exc}") from exc
    model.requires_grad_(False)
    model.train(False)
    return Target(folder, model, load_tokenizer(folder), str(model.dtype).removeprefix("torch."))


def load_tokenizer(folder: Path) -> Any | None:
    """The target's tokenizer; None for a target without one, which serves prompts that are token ids."""
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


@torch.inference_mode()
def generate(target: Target, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[list[int]]:
    """The target's greedy completions of a batch, each up to and including its first stop token."""
    stops = target.stop_token_ids
    width = max(len(ids) for ids in prompts)
    pad = stops[0] if stops else 0
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=pad, eos_token_id=list(stops) or None
    )
    out = target.model.generate(ids, attention_mask=mask, generation_config=config)
    completions = out[:, width:].tolist()
    return [_until_stop(completion, stops) for completion in completions]


def _until_stop(tokens: list[int], stops: Sequence[int]) -> list[int]:
    ends = [tokens.index(stop) for stop in stops if stop in tokens]
    return tokens[: min(ends) + 1] if ends else tokens


@torch.inference_mode()
def observe(target: Target, tokens: Sequence[int], *, taps: Sequence[int]) -> Observation:
    """One pass over `tokens`, with the outputs of the tapped layers taken by hooks."""
    last = len(target.decoder.layers) - 1
    with tapped(target, {*taps, last}) as caught:
        ids = torch.tensor([list(tokens)])
        normed = target.decoder(input_ids=ids, use_cache=False).last_hidden_state[0]
    return Observation(taps=torch.stack([caught[tap] for tap in taps]), final=caught[last], normed=normed)


@contextlib.contextmanager
def tapped(target: Target, taps: Iterable[int]) -> Iterator[Mapping[int, Tensor]]:
    """The tapped layers' outputs [T, H] of the latest pass, by tap, for as long as the context is open."""
    caught: dict[int, Tensor] = {}
    with contextlib.ExitStack() as stack:
        for tap in set(taps):
            stack.enter_context(_hook(target.decoder, tap, caught))
        yield caught


@contextlib.contextmanager
def _hook(decoder: Any, tap: int, caught: dict[int, Tensor]) -> Iterator[None]:
    def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
        caught[tap] = (output[0] if isinstance(output, tuple) else output)[0]

    module = decoder.layers[tap] if tap >= 0 else decoder.get_input_embeddings()
    handle = module.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


@torch.inference_mode()
def norm_weight(target: Target) -> Tensor:
    """The factor by which the final norm scales: the stored weight, or one more than it (Gemma)."""
    norm = target.decoder.norm
    probe = torch.linspace(-1, 1, norm.weight.shape[0], dtype=norm.weight.dtype)[None]
    wide = probe.float()
    unit = wide * torch.rsqrt(
        wide.pow(2).mean(-1, keepdim=True) + target.model.config.get_text_config().rms_norm_eps
    )
    expected = norm(probe).float()
    for weight in (norm.weight, norm.weight + 1):
        if torch.allclose(unit * weight.float(), expected, rtol=2e-2, atol=1e-4):
            return Tensor(weight) if weight is norm.weight else weight
    raise TargetError(
        f"the final norm of {target.path} ({type(norm).__name__}) is not a root mean square norm"
    )
