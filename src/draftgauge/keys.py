"""The names of a drafter's tensors: one spelling for all, why some are unused, and whose family they show.

The canonical names are z-lab's: `fc.weight`, `hidden_norm.weight`, `norm.weight`, `layers.{i}...`, and,
where the drafter has its own, `embed_tokens.weight`, `lm_head.weight`, `d2t`, `mask_embedding`. This module
works on strings alone and knows neither files nor shapes.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_WRAPPERS = re.compile(r"(^|\.)(?:(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.)+")
_PREFIXES = ("module.", "model.", "draft_model.")
_RENAMES = {
    "midlayer.": "layers.0.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
}
_DRAFTER_TENSOR = re.compile(
    r"(?:fc|hidden_norm|norm|embed_tokens|lm_head)\.weight|d2t|mask_embedding"
    r"|layers\.(?:0|[1-9]\d*)\.(?:self_attn\.(?:[qkvo]_proj|[qk]_norm)|mlp\.(?:gate|up|down)_proj"
    r"|(?:input|post_attention)_layernorm)\.weight"
)
_UNUSED_REASONS = {
    r"verifier_(?:norm|lm_head)\.weight": "not part of the drafter's function: the verifier's own",
    r"(?:.*\.)?rotary_emb\.inv_freq": "computed from the wiring",
    r"t2d": "only the inverse of d2t",
}
_NOT_A_DRAFTER_TENSOR = "not a tensor of a DFlash drafter"


@dataclass(frozen=True)
class Family:
    """A kind of drafter that is refused by name: what its tensors are called, and what helps."""

    name: str
    pattern: str
    help: str = "Give the checkpoint of a DFlash drafter"


_WITHIN = r"(?:layers\.\d+\.(?:\w+\.)*)?"  # at the top or anywhere in a layer, never in another model's part
EAGLE3 = Family("EAGLE-3", r"layers\.\d+\.hidden_norm\..*")
FAMILIES: tuple[Family, ...] = (
    Family("DFlash 2", _WITHIN + r"(?:\w*_conv\.base_kernel|candidate_selector\..*)"),
    Family("DSpark", _WITHIN + r"(?:markov_head|confidence_head)\..*"),
    Family("Domino", _WITHIN + r"(?:prefix_gru|embed_proj)\..*"),
    Family("Laguna", _WITHIN + r"(?:qkv_proj|g_proj|aux_hidden_norms)\..*"),
    Family("DFlash with attention sinks", _WITHIN + r"(?:attention_sink_bias|sinks)"),
    Family(
        "DFlash with Gemma's layers",
        r"layers\.\d+\.(?:(?:pre|post)_feedforward_layernorm\.weight|layer_scalar)",
    ),
    EAGLE3,
    Family("MTP", _WITHIN + r"(?:mtp|eh_proj|enorm|hnorm|shared_head|pre_fc_norm_\w+)\..*"),
    Family("Medusa", r"medusa_heads?\..*"),
    Family("DFlash with a mixture of experts", r"layers\.\d+\.mlp\.(?:experts\..*|gate\.weight)"),
    Family("DFlash with biases", r"(?:fc|layers\.\d+\.(?:\w+\.)*\w+)\.bias"),
    Family(
        "quantised",
        r"(?:fc|lm_head|embed_tokens|layers\.\d+\.(?:\w+\.)*\w+)\.(?:weight_(?:packed|scale\w*|zero_point|shape)"
        r"|qweight|qzeros|scales|g_idx|absmax|SCB|quant_map|input_scale)",
        "Give the unquantised weights",
    ),
    Family(
        "an adapter",
        r"(?:fc|layers\.\d+\.(?:\w+\.)*\w+)\.lora_\w+(?:\..*)?",
        "Merge the adapter into the weights first",
    ),
)


def canonical_name(stored: str) -> str:
    """The canonical spelling of a stored name; a name that needs no change is returned as it is.

    Example:
        `canonical_name("module._orig_mod.midlayer.mlp.up_proj.weight")` is
        `"layers.0.mlp.up_proj.weight"`.
    """
    name = _WRAPPERS.sub(r"\1", stored)
    while prefix := next((p for p in _PREFIXES if name.startswith(p)), None):
        name = name.removeprefix(prefix)
    for old, new in _RENAMES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def unused_reason(canonical: str) -> str | None:
    """Why a tensor of this name takes no part in the drafter's function; None if it does take part."""
    if _DRAFTER_TENSOR.fullmatch(canonical):
        return None
    for pattern, reason in _UNUSED_REASONS.items():
        if re.fullmatch(pattern, canonical):
            return reason
    return _NOT_A_DRAFTER_TENSOR


def foreign_family(stored_names: Iterable[str]) -> tuple[Family, str] | None:
    """The family that the names show if it is not plain DFlash, with the stored name that shows it.

    Example:
        `foreign_family(["fc.weight", "markov_head.w1.weight"])` is DSpark and `"markov_head.w1.weight"`.
    """
    names: Mapping[str, str] = {stored: canonical_name(stored) for stored in stored_names}
    for family in FAMILIES:
        for stored, canonical in names.items():
            if re.fullmatch(family.pattern, canonical):
                return family, stored
    if "hidden_norm.weight" not in names.values():
        # One-layer DFlash is also stored as `midlayer`; EAGLE-3 has no norm behind its fusion of the taps.
        for stored in names:
            if "midlayer" in stored.split("."):
                return EAGLE3, stored
    return None
