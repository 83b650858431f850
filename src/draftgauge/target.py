"""Runs the target: loads it, completes prompts greedily, and observes what a drafter may see of it.

Taps are the outputs of decoder layers, taken by hooks in one teacher-forced pass; the final state is the last
layer's output before the norm. Of recordings it knows how they name a target; of drafters nothing.

Letters: N taps, T positions, H hidden size.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from draftgauge.errors import CheckpointError, TargetError
from draftgauge.features import as_stored
from draftgauge.recording import ENDS_FILE, TargetRecord
from draftgauge.store import publish_file
from draftgauge.targetfiles import VOCABULARY_FILES
from draftgauge.tensorfile import StoredTensor, read_safetensors, write_safetensors

#: Logit gaps below which two tokens may swap between batched and single decoding, by compute dtype.
NEAR_TIE_GAP: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.03}
#: What transformers raises at a config whose fields have wrong types or values, beside what a damaged file does.
_REFUSALS = (
    *(OSError, ValueError, KeyError, ImportError, RuntimeError),
    *(TypeError, AttributeError, ArithmeticError, StrictDataclassError),
)
#: As which dtypes a stored tensor can be loaded without a change of its values.
_LOADS_EXACTLY: Mapping[str, tuple[torch.dtype, ...]] = {
    "F32": (torch.float32,),
    "BF16": (torch.bfloat16, torch.float32),
    "F16": (torch.float16, torch.float32),
}
_STORED_DTYPES: Mapping[str, str] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


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


def own_dtype(path: str | Path) -> str:
    """The dtype that the target's config names, or else the one that all its weights are stored in.

    Raises:
        TargetError: The path is no Hugging Face directory, its weights are damaged, or neither says one.
    """
    config, stored = _described(Path(path))
    inner = config.get("text_config")
    for section in (config, inner if isinstance(inner, dict) else {}):
        named = section.get("dtype") or section.get("torch_dtype")
        if named is not None:
            return str(named).removeprefix("torch.")
    if len(stored) == 1 and stored <= set(_STORED_DTYPES):
        return _STORED_DTYPES[stored.pop()]
    raise TargetError(f"target {path} does not say its dtype; state it with --dtype")


def count_layers(path: str | Path) -> int:
    """How many decoder layers the target's config says it has.

    Raises:
        TargetError: The path is no Hugging Face directory, or its config does not say.
    """
    folder = Path(path)
    _described(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        return int(config.get_text_config().num_hidden_layers)
    except _REFUSALS as exc:
        raise TargetError(
            f"the config of target {folder} is not understood by transformers: {_line(exc)}"
        ) from exc


def _described(folder: Path) -> tuple[dict[str, Any], set[str]]:
    """The config, and the element types of the stored weights, whose files are whole."""
    if not (folder / "config.json").is_file():
        raise TargetError(
            f"target {folder} is not a Hugging Face directory with a config.json; give a local path"
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise TargetError(f"{folder / 'config.json'} holds no JSON object; copy the target again")
        files = sorted(folder.glob("*.safetensors"))
        return config, {stored.dtype for file in files for stored in read_safetensors(file)[0].values()}
    except (OSError, ValueError, CheckpointError) as exc:
        raise TargetError(f"target {folder} cannot be read: {exc}") from exc


def load_target(path: str | Path, *, dtype: str | None = None) -> Target:
    """The target in a local Hugging Face directory, ready to observe; in its own dtype unless one is given.

    Raises:
        TargetError: The path is no such directory, its weights are damaged or incomplete, the dtype is not
            known here, or the architecture is not laid out as layers and a final norm.
    """
    folder = Path(path)
    _described(folder)
    dtype = dtype or own_dtype(folder)
    if dtype not in NEAR_TIE_GAP:
        raise TargetError(
            f"dtype {dtype!r} of target {path} is not computed with; expected --dtype "
            f"{', '.join(NEAR_TIE_GAP)}"
        )
    model = _load_model(folder, dtype)
    decoder = model.get_decoder()
    if getattr(decoder, "layers", None) is None or getattr(decoder, "norm", None) is None:
        raise TargetError(
            f"target {path} is a {type(model).__name__}, whose decoder has no `layers` and `norm`; such targets "
            "cannot be recorded yet"
        )
    # What a target's makers recommend for sampling (penalties above all) would also change greedy completions.
    stops = model.generation_config.eos_token_id
    if not all(type(stop) is int for stop in (stops if isinstance(stops, list) else [stops or 0])):
        raise TargetError(
            f"target {path} says eos_token_id {stops!r}; expected token ids, in generation_config.json"
        )
    model.generation_config = transformers.GenerationConfig(eos_token_id=stops)
    model.requires_grad_(False)
    model.train(False)
    return Target(folder, model, load_tokenizer(folder), dtype)


def _load_model(folder: Path, dtype: str) -> Any:
    loader: Any = transformers.AutoModelForCausalLM
    try:
        with _no_bars():
            model, report = loader.from_pretrained(
                folder, dtype=getattr(torch, dtype), local_files_only=True, output_loading_info=True
            )
    except _REFUSALS as exc:
        raise TargetError(f"target {folder} could not be loaded by transformers: {_line(exc)}") from exc
    missing = sorted(report["missing_keys"])
    if missing:
        raise TargetError(
            f"target {folder} lacks {len(missing)} weights ({', '.join(missing[:3])} ...), which transformers "
            "fills at random; copy the target again"
        )
    return model


def _line(exc: Exception) -> str:
    """What an error of another library says, on one line."""
    return " ".join(str(exc).split())


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Keeps transformers' progress bars off stderr for as long as the context is open."""
    switch: Any = transformers.utils.logging
    shown = switch.is_progress_bar_enabled()
    if shown:
        switch.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            switch.enable_progress_bar()


def load_tokenizer(folder: Path) -> Any | None:
    """The target's tokenizer; None for a target without one, which serves prompts that are token ids.

    Raises:
        TargetError: There is a tokenizer, but it cannot be loaded.
    """
    if not any((folder / name).is_file() for name in VOCABULARY_FILES):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except _REFUSALS as exc:
        raise TargetError(f"the tokenizer of target {folder} could not be loaded: {_line(exc)}") from exc


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
    return [until_stop(completion, stops) for completion in completions]


def until_stop(tokens: list[int], stops: Sequence[int]) -> list[int]:
    """The tokens up to and including the first stop token.

    Example:
        `until_stop([5, 2, 7], [2])` is `[5, 2]`.
    """
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
    """The factor by which the final norm scales: the stored weight, or one more than it (Gemma).

    Raises:
        TargetError: The norm computes something else.
    """
    norm = target.decoder.norm
    eps = getattr(target.model.config.get_text_config(), "rms_norm_eps", None)
    stored: Tensor = norm.weight
    if eps is not None:
        # Its mean is not zero, so that a norm that subtracts the mean is told apart.
        probe = torch.linspace(-1, 2, stored.shape[0], dtype=stored.dtype)[None]
        wide = probe.float()
        unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        expected = norm(probe).float()
        for weight in (stored, stored + 1):
            if torch.allclose(unit * weight.float(), expected, rtol=2e-2, atol=1e-4):
                return weight
    raise TargetError(
        f"the final norm of {target.path} ({type(norm).__name__}) is not a root mean square norm; such targets "
        "cannot be recorded yet"
    )


def rope_theta(target: Target) -> float | None:
    """The base of the target's rotary embedding; None without one, or where its layers differ in it."""
    config = target.model.config.get_text_config()
    said = getattr(config, "rope_parameters", None) or {}
    # Either one set of parameters, or one for each kind of layer; before transformers 5, a field of its own.
    sections = [said, *(section for section in said.values() if isinstance(section, Mapping))]
    bases = {section["rope_theta"] for section in sections if "rope_theta" in section}
    if not bases and (base := getattr(config, "rope_theta", None)) is not None:
        bases = {base}
    return float(bases.pop()) if len(bases) == 1 else None


def special_tokens(tokenizer: Any | None) -> dict[str, int]:
    """The id of every token that no plain text has, by its name; none without a tokenizer.

    Example:
        `{"<|im_start|>": 1, "<|im_end|>": 2}`.
    """
    if tokenizer is None:
        return {}
    named = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    added = {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return named | added


def target_record(target: Target, folder: Path, *, digest: str, portable: bool) -> TargetRecord:
    """The target's identity, and where its ends can be read without loading it.

    Args:
        target: The target.
        folder: The recording's: ends that the target's own files do not hold as they are used are copied there.
        digest: Of the target's files.
        portable: Whether all ends are copied.

    Raises:
        TargetError: The final norm is none that is known here.
    """
    model = target.model
    parts = {
        "embedding": model.get_input_embeddings().weight,
        "head": model.get_output_embeddings().weight,
        "norm": norm_weight(target),
    }
    files = _stored_weights(target.path)
    places = {name: None if portable else _place(model, part, files) for name, part in parts.items()}
    copied = {name: parts[name] for name, place in places.items() if place is None}
    (folder / ENDS_FILE).unlink(missing_ok=True)  # of an unfinished attempt, perhaps with other ends
    if copied:
        with publish_file(folder / ENDS_FILE) as partial:
            write_safetensors(partial, {name: as_stored(part) for name, part in copied.items()})
    stored = read_safetensors(folder / ENDS_FILE)[0] if copied else {}
    ends = {}
    for name, place in places.items():
        tensor = place or stored[name]
        file = str(tensor.path.resolve()) if place else ENDS_FILE
        ends[name] = {"file": file, "name": tensor.name, "sha256": tensor.sha256()}
    config = model.config.get_text_config()
    return TargetRecord(
        path=str(target.path.resolve()),
        digest=digest,
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
