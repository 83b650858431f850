"""Made the folders beside it, with speculators 0.9.0 and transformers 5.19.0, which the tests do not need.

    python tests/speculators_saves/make.py      in an environment that holds both, on CPU

Each is a small random DFlash drafter that speculators saved, and `blocks.npz`: a context, an anchor, what the
verifier owns (embedding, and the head where the file has none), and the draft logits of speculators' own forward.
"""

from pathlib import Path

import numpy as np
import torch
from speculators.models.dflash.config import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from transformers import Qwen3Config

HERE = Path(__file__).parent
HIDDEN, VOCABULARY, LENGTH, ANCHOR = 32, 128, 40, 29
KINDS = {
    "pruned": {"draft_vocab_size": 48, "layer_types": ["sliding_attention", "full_attention"]},
    "non_causal": {
        "draft_vocab_size": VOCABULARY,
        "layer_types": ["sliding_attention", "sliding_attention"],
        "sliding_window_non_causal": True,
    },
    "from_anchor": {
        "draft_vocab_size": VOCABULARY,
        "layer_types": ["full_attention", "full_attention"],
        "sample_from_anchor": True,
    },
}


def made(name: str, *, layer_types: list[str], draft_vocab_size: int, **said: bool) -> None:
    """Saves one drafter and what it computes."""
    torch.manual_seed(sorted(KINDS).index(name))
    slides = "sliding_attention" in layer_types
    layers = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=5000.0,
        layer_types=layer_types,
        use_sliding_window=slides,
        sliding_window=8 if slides else None,
    )
    layers._attn_implementation = "sdpa"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=draft_vocab_size,
        block_size=6,
        aux_hidden_state_layer_ids=[2, 4, 5],
        mask_token_id=127,
        **said,
    )
    model = DFlashDraftModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.1 if parameter.ndim > 1 else 0.05))
            if parameter.ndim == 1:
                parameter.add_(1.0)
    if draft_vocab_size < VOCABULARY:
        kept = torch.sort(torch.randperm(VOCABULARY)[:draft_vocab_size]).values
        t2d = torch.zeros(VOCABULARY, dtype=torch.bool)
        t2d[kept] = True
        model.load_vocab_mappings(t2d, kept - torch.arange(draft_vocab_size))
    features = torch.randn(1, LENGTH, 3 * HIDDEN)
    tokens = torch.randint(0, VOCABULARY - 1, (1, LENGTH))
    only = torch.zeros(1, LENGTH)
    only[0, ANCHOR] = 1
    with torch.no_grad():
        _, logits, *_ = model._backbone_forward(
            features,
            tokens,
            only,
            torch.zeros(1, LENGTH, HIDDEN),
            torch.zeros(1, LENGTH, dtype=torch.long),
            max_anchors=1,
        )
    model.save_pretrained(HERE / name)
    (HERE / name / "config.py").unlink()  # the project's own code, which it puts beside
    np.savez(
        HERE / name / "blocks.npz",
        features=features[0, :ANCHOR].numpy(),
        anchor=ANCHOR,
        anchor_token=int(tokens[0, ANCHOR]),
        embedding=model.embed_tokens.weight.detach().numpy(),
        head=model.lm_head.weight.detach().numpy(),
        logits=logits[0].numpy(),
    )


for kind, choices in KINDS.items():
    made(kind, **choices)
