"""The DFlash network: a block of masked rows that read the target's features, driven by the wiring alone.

A block-diffusion drafter: row 0 holds the anchor token, the other rows the mask, and one pass of a few
transformer layers turns them into D guesses. The keys and values of the context come straight from the fused
tap features in every layer; the context itself is never transformed. So the context of a whole sequence is
computed once, and any number of blocks is drafted against it, each seeing what lies below its own anchor.
Contexts of several sequences may stand one after the other: a block is told where its own begins.

Knows nothing of checkpoints, recordings or ranks.

Letters: T positions, A anchors, B block rows, D depth, H hidden size, K key heads, G query heads per key
head, C head dimensions, V vocabulary entries, F features per position (taps x H).

Source: DFlash (z-lab, 2026); docs/formats.md lists where implementations of the same weights differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from draftgauge.wiring import LayerAttention, RopeScaling, Wiring


class Context(NamedTuple):
    """Keys and values of the context in every layer, rotated: what incremental decoding would cache."""

    keys: tuple[Float[Tensor, "K T C"], ...]
    values: tuple[Float[Tensor, "K T C"], ...]

    @property
    def length(self) -> int:
        """Positions covered, from 0."""
        return int(self.keys[0].shape[1])

    def upto(self, length: int) -> Context:
        """The first `length` positions, as views."""
        return Context(tuple(k[:, :length] for k in self.keys), tuple(v[:, :length] for v in self.values))

    def extended(self, *later: Context) -> Context:
        """This context followed by the positions of the later ones."""
        parts = (self, *later)
        keys = (torch.cat(layer, dim=1) for layer in zip(*(part.keys for part in parts), strict=True))
        values = (torch.cat(layer, dim=1) for layer in zip(*(part.values for part in parts), strict=True))
        return Context(tuple(keys), tuple(values))


@dataclass(frozen=True)
class Ends:
    """The two ends of the network that a DFlash drafter borrows from its target (or brings itself).

    `embedding` is [V, H]; `head` is [V', H], where V' is smaller than V for a pruned vocabulary, and then
    `target_ids` [V'], ascending, names the target's token of every row.
    """

    embedding: Tensor
    head: Tensor
    target_ids: Tensor | None = None


class RMSNorm(nn.Module):
    """Root mean square norm in float32, as the Qwen3 and Llama families compute it."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., size] scaled to unit mean square, times the weight."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rope_frequencies(wiring: Wiring) -> tuple[Tensor, float]:
    """Angular frequency of every rotated pair [rope_dims / 2], and the factor on cosine and sine.

    Source: RoPE (Su et al. 2021); scaling as in `RopeScaling`.
    """
    dims = wiring.rope_dims
    frequencies = wiring.rope_theta ** (-torch.arange(0, dims, 2, dtype=torch.float64, device="cpu") / dims)
    scaling = wiring.rope_scaling
    if scaling is None:
        return frequencies.float(), 1.0
    if scaling.kind == "linear":
        return (frequencies / scaling.factor).float(), 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling).float(), 1.0
    return _yarn(frequencies, scaling, base=wiring.rope_theta).float(), _yarn_factor(scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    assert scaling.original_max_position is not None
    assert scaling.low_freq_factor is not None
    assert scaling.high_freq_factor is not None
    turns = frequencies * scaling.original_max_position / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def _yarn(frequencies: Tensor, scaling: RopeScaling, *, base: float) -> Tensor:
    assert scaling.original_max_position
    dims = 2 * len(frequencies)

    def pair_with(turns: float) -> float:
        wavelength = scaling.original_max_position or 0
        return dims * math.log(wavelength / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_with(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_with(scaling.beta_slow)), dims - 1)
    index = torch.arange(len(frequencies), dtype=torch.float64, device="cpu")
    interpolate = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
    return interpolate * frequencies / scaling.factor + (1 - interpolate) * frequencies


def _yarn_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


class Rope:
    """Rotary positions with the wiring's base, rotated dimensions, layout and scaling."""

    def __init__(self, wiring: Wiring) -> None:
        self.frequencies, self.factor = rope_frequencies(wiring)
        self.dims = wiring.rope_dims
        self.interleaved = wiring.rope_layout == "interleaved"

    def __call__(
        self, x: Float[Tensor, "*lead C"], positions: Int[Tensor, "*lead_or_1"]
    ) -> Float[Tensor, "*lead C"]:
        """Rotates the first `dims` dimensions of every vector by its position; `positions` broadcasts."""
        angles = positions.unsqueeze(-1).float() * self.frequencies.to(x.device)
        cos, sin = (angles.cos() * self.factor).to(x.dtype), (angles.sin() * self.factor).to(x.dtype)
        rotated, rest = x[..., : self.dims], x[..., self.dims :]
        if self.interleaved:
            first, second = rotated[..., 0::2], rotated[..., 1::2]
            turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
        else:
            first, second = rotated.chunk(2, dim=-1)
            turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return torch.cat((turned, rest), dim=-1)


def context_mask(
    layer: LayerAttention,
    *,
    anchors: Int[Tensor, " A"],
    starts: Int[Tensor, " A"],
    rows: int,
    length: int,
) -> Bool[Tensor, "A B T"]:
    """True where a row may see a context position: of its own sequence, below its anchor, in the window."""
    key = torch.arange(length, device=anchors.device) - starts[:, None, None]
    visible = (key >= 0) & (key < anchors[:, None, None])
    if layer.reach is None:
        return visible.expand(-1, rows, -1)
    origin = anchors[:, None].expand(-1, rows)
    if layer.window_from == "row":
        origin = origin + torch.arange(rows, device=anchors.device)
    return visible & (key >= origin[:, :, None] - layer.reach)


def block_mask(layer: LayerAttention, *, rows: int) -> Bool[Tensor, "B B"]:
    """True where a row of the block may see a row of its own block."""
    row, other = torch.arange(rows)[:, None], torch.arange(rows)[None, :]
    visible = torch.ones(rows, rows, dtype=torch.bool)
    if layer.block_causal:
        visible &= other <= row
    if layer.block_window and layer.reach is not None:
        visible &= (row - other).abs() <= layer.reach
    return visible


class Attention(nn.Module):
    """Grouped-query attention of block rows over the context and their own block."""

    def __init__(self, wiring: Wiring, layer: LayerAttention) -> None:
        super().__init__()
        w = wiring
        self.layer, self.shape = layer, (w.num_kv_heads, w.num_heads // w.num_kv_heads, w.head_dim)
        self.q_proj = nn.Linear(w.hidden_size, w.num_heads * w.head_dim, bias=False)
        self.k_proj = nn.Linear(w.hidden_size, w.num_kv_heads * w.head_dim, bias=False)
        self.v_proj = nn.Linear(w.hidden_size, w.num_kv_heads * w.head_dim, bias=False)
        self.o_proj = nn.Linear(w.num_heads * w.head_dim, w.hidden_size, bias=False)
        self.q_norm = RMSNorm(w.head_dim, eps=w.rms_norm_eps)
        self.k_norm = RMSNorm(w.head_dim, eps=w.rms_norm_eps)

    def keys_values(
        self, x: Float[Tensor, "*lead H"], positions: Int[Tensor, "*lead"], *, rope: Rope
    ) -> tuple[Float[Tensor, "*lead K C"], Float[Tensor, "*lead K C"]]:
        """Rotated keys and plain values of context positions or block rows."""
        heads, _, dims = self.shape
        keys = self.k_norm(self.k_proj(x).unflatten(-1, (heads, dims)))
        values = self.v_proj(x).unflatten(-1, (heads, dims))
        return rope(keys, positions.unsqueeze(-1)), values

    def forward(
        self,
        x: Float[Tensor, "A B H"],
        *,
        context: tuple[Float[Tensor, "K T C"], Float[Tensor, "K T C"]],
        anchors: Int[Tensor, " A"],
        starts: Int[Tensor, " A"],
        rope: Rope,
    ) -> Float[Tensor, "A B H"]:
        """Every row attends jointly to the context below its anchor and to its own block."""
        heads, group, dims = self.shape
        count, rows, _ = x.shape
        positions = anchors[:, None] + torch.arange(rows, device=x.device)
        query = self.q_norm(self.q_proj(x).unflatten(-1, (heads * group, dims)))
        query = rope(query, positions.unsqueeze(-1)).unflatten(2, (heads, group))
        query = query.permute(2, 0, 1, 3, 4) / math.sqrt(dims)  # K A B G C
        keys, values = self.keys_values(x, positions, rope=rope)
        keys, values = keys.permute(2, 0, 3, 1), values.permute(2, 0, 1, 3)  # K A C B, K A B C
        ctx_keys, ctx_values = context
        length = ctx_keys.shape[1]

        far = query.reshape(heads, -1, dims) @ ctx_keys.transpose(1, 2)
        far = far.view(heads, count, rows, group, length)
        near = (query.reshape(heads, count, rows * group, dims) @ keys).view(heads, count, rows, group, rows)
        seen_far = context_mask(self.layer, anchors=anchors, starts=starts, rows=rows, length=length)
        seen_near = block_mask(self.layer, rows=rows).to(x.device)
        far = far.masked_fill(~seen_far[:, :, None], -torch.inf)
        near = near.masked_fill(~seen_near[:, None], -torch.inf)
        weights = torch.cat((far, near), dim=-1).softmax(dim=-1, dtype=torch.float32).to(x.dtype)

        out = weights[..., :length].reshape(heads, -1, length) @ ctx_values
        out = out.view(heads, count, rows * group, dims)
        out = out + weights[..., length:].reshape(heads, count, rows * group, rows) @ values
        out = out.view(heads, count, rows, group, dims).permute(1, 2, 0, 3, 4).flatten(2)
        mixed: Float[Tensor, "A B H"] = self.o_proj(out)
        return mixed


class MLP(nn.Module):
    """Gated SiLU feed-forward."""

    def __init__(self, wiring: Wiring) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(wiring.hidden_size, wiring.intermediate_size, bias=False)
        self.up_proj = nn.Linear(wiring.hidden_size, wiring.intermediate_size, bias=False)
        self.down_proj = nn.Linear(wiring.intermediate_size, wiring.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., H] -> [..., H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm transformer layer of the drafter."""

    def __init__(self, wiring: Wiring, layer: LayerAttention) -> None:
        super().__init__()
        self.self_attn = Attention(wiring, layer)
        self.mlp = MLP(wiring)
        self.input_layernorm = RMSNorm(wiring.hidden_size, eps=wiring.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(wiring.hidden_size, eps=wiring.rms_norm_eps)


class DFlash(nn.Module):
    """A DFlash drafter: weights under z-lab's names, wired by `wiring`, with the ends it borrows."""

    def __init__(self, wiring: Wiring, ends: Ends) -> None:
        super().__init__()
        self.wiring, self.ends = wiring, ends
        self.fc = nn.Linear(len(wiring.taps) * wiring.hidden_size, wiring.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(wiring.hidden_size, eps=wiring.rms_norm_eps)
        self.stack = [Layer(wiring, layer) for layer in wiring.attention]
        self.layers = nn.ModuleList(self.stack)
        self.norm = RMSNorm(wiring.hidden_size, eps=wiring.rms_norm_eps)
        if wiring.mask_embedding:
            self.mask_embedding = nn.Parameter(torch.zeros(wiring.hidden_size))
        self.rope = Rope(wiring)

    def context(self, features: Float[Tensor, "T F"], *, first_position: int = 0) -> Context:
        """The context's keys and values from tap features of consecutive positions."""
        fused = self.hidden_norm(self.fc(features))
        positions = torch.arange(first_position, first_position + len(fused), device=fused.device)
        pairs = [layer.self_attn.keys_values(fused, positions, rope=self.rope) for layer in self.stack]
        return Context(
            tuple(keys.transpose(0, 1) for keys, _ in pairs),
            tuple(values.transpose(0, 1) for _, values in pairs),
        )

    def draft(
        self,
        context: Context,
        *,
        anchors: Int[Tensor, " A"],
        anchor_tokens: Int[Tensor, " A"],
        starts: Int[Tensor, " A"] | None = None,
    ) -> Float[Tensor, "A D H"]:
        """Final hidden states of the predicting rows of one block per anchor, after the output norm.

        `starts[i]` is where the sequence of anchor i begins in `context`; all 0 when None.
        """
        w = self.wiring
        starts = torch.zeros_like(anchors) if starts is None else starts
        assert int((starts + anchors).max()) <= context.length, "an anchor's context ends before the anchor"
        x = self._block_rows(anchor_tokens).to(context.keys[0].dtype)
        for layer, *pair in zip(self.stack, context.keys, context.values, strict=True):
            x = x + layer.self_attn(
                layer.input_layernorm(x),
                context=(pair[0], pair[1]),
                anchors=anchors,
                starts=starts,
                rope=self.rope,
            )
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        out: Tensor = self.norm(x[:, w.first_row :])
        return out

    def logits(
        self, hidden: Float[Tensor, "*lead H"], *, rows: Int[Tensor, " V"] | slice = slice(None)
    ) -> Float[Tensor, "*lead V"]:
        """Scores of the head's vocabulary, or of some of its rows alone."""
        logits = F.linear(hidden, self.ends.head[rows])
        scale, cap = self.wiring.logit_scale, self.wiring.logit_softcap
        logits = logits if scale == 1 else logits * scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _block_rows(self, anchor_tokens: Int[Tensor, " A"]) -> Float[Tensor, "A B H"]:
        """Row 0 is the anchor's embedding, every other row the mask's: a token's, or a vector as stored."""
        w, table = self.wiring, self.ends.embedding
        first = F.embedding(anchor_tokens, table) * w.embedding_scale
        mask = self.mask_embedding if w.mask_embedding else table[w.mask_token_id] * w.embedding_scale
        rest = mask.expand(len(anchor_tokens), w.block_size - 1, -1)
        return torch.cat((first[:, None], rest.to(first.dtype)), dim=1)
