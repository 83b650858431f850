"""Made the folders beside it, with the projects' own code; the tests need none of it.

    python tests/peer_saves/make.py      on CPU, in an environment that holds dflash 0.1.0, transformers 5.19.0,
                                         specforge 0.2.0 and DeepSpec

SpecForge asks for sglang and for a torch of its own, which this needs nothing of: install it alone, with
`pip install --no-deps --target FOLDER specforge==0.2.0`, and name FOLDER in PYTHONPATH. DeepSpec is on no package
index: name a checkout of github.com/deepseek-ai/DeepSpec in PYTHONPATH (commit afdfa7c was used).

Every folder holds a small random DFlash drafter as its project saves it, and beside it `blocks.npz`: the target's
ends (zeros where the drafter has its own), features of the target, anchors with their tokens, and the draft logits
of the project's own forward pass. The weights are stored in bfloat16 and computed with in float32, in a model that
was built in float32: `model.to(torch.bfloat16)` would round the rotary frequencies as well, and `.float()` does not
bring them back.
"""

import random
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from dflash.model import DFlashDraftModel as ZlabDrafter
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
from specforge.algorithms.dflash.providers import algorithm_providers
from specforge.export.to_hf import export_to_hf
from specforge.modeling.draft.dflash import DFlashDraftModel as SpecforgeDrafter
from specforge.optimizer import BF16Optimizer
from specforge.runtime.contracts import TrainBatch
from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
from specforge.training.controller import TrainerController, TrainerCore
from specforge.training.strategies.base import DFlashTrainStrategy
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, Qwen3Config
from transformers.cache_utils import DFlashCache

HERE = Path(__file__).parent
HIDDEN, VOCABULARY, LENGTH, BLOCK, MASK = 16, 64, 30, 6, 63
TAPS, TARGET_LAYERS, WINDOW = [1, 4], 6, 5
ANCHORS = (3, 11, 22)  # one with less context than the window, two with more
MIXED = ["sliding_attention", "full_attention"]
FULL = ["full_attention", "full_attention"]

Tensors = dict[str, torch.Tensor]


def config(**said: object) -> Qwen3Config:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000.0,
        "num_target_layers": TARGET_LAYERS,
    }
    return Qwen3Config(**(sizes | said))


def filled(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """The same model with random weights as a trainer leaves them: in bfloat16, norms around one."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.25 if parameter.ndim > 1 else 0.1))
            if parameter.ndim == 1:
                parameter.add_(1.0)
    return model.to(torch.bfloat16).eval()


def in_float32(model: torch.nn.Module) -> torch.nn.Module:
    exact = type(model)(model.config)
    exact.load_state_dict(model.state_dict())
    return exact.float().eval()


def given(seed: int) -> Tensors:
    """What the target gives: its ends, its states at the taps, and its tokens."""
    torch.manual_seed(seed)
    return {
        "embedding": torch.randn(VOCABULARY, HIDDEN),
        "head": torch.randn(VOCABULARY, HIDDEN) / 4,
        "features": torch.randn(LENGTH, len(TAPS) * HIDDEN),
        "tokens": torch.randint(0, VOCABULARY - 1, (LENGTH,)),
    }


def keep(folder: Path, seen: Tensors, **logits: torch.Tensor) -> None:
    anchors = {"anchors": torch.tensor(ANCHORS), "anchor_tokens": seen["tokens"][list(ANCHORS)]}
    whole = {name: tensor for name, tensor in seen.items() if name != "tokens"} | anchors | logits
    np.savez_compressed(folder / "blocks.npz", **{name: tensor.numpy() for name, tensor in whole.items()})


def noise(seen: Tensors, anchor: int) -> torch.Tensor:
    ids = torch.full((1, BLOCK), MASK)
    ids[0, 0] = seen["tokens"][anchor]
    return seen["embedding"][ids]


# --- z-lab ---------------------------------------------------------------------------------------------


def zlab(name: str, *, seed: int, block_size_at_top: bool, **said: object) -> None:
    """Saves one drafter of `dflash` 0.1.0; `logits_april` are those of a mask that hides nothing."""
    inner: dict[str, object] = {"target_layer_ids": TAPS, "mask_token_id": MASK}
    if block_size_at_top:
        said["block_size"] = BLOCK
    else:
        inner["block_size"] = BLOCK
    model = filled(ZlabDrafter(config(dflash_config=inner, **said)), seed)
    folder = HERE / "zlab" / name
    model.save_pretrained(folder)
    model, seen = in_float32(model), given(seed + 100)
    found: dict[str, list[torch.Tensor]] = {"logits": [], "logits_april": []}
    for anchor in ANCHORS:
        everything = torch.ones(1, 1, BLOCK, anchor + BLOCK, dtype=torch.bool)
        for key, mask in (("logits", None), ("logits_april", everything)):
            hidden = model(
                position_ids=torch.arange(anchor + BLOCK)[None],
                noise_embedding=noise(seen, anchor),
                target_hidden=seen["features"][None, :anchor],
                attention_mask=mask,
            )
            found[key].append(hidden[0] @ seen["head"].T)
    keep(folder, seen, **{key: torch.stack(logits) for key, logits in found.items()})


# --- SpecForge -----------------------------------------------------------------------------------------


def specforge(name: str, *, seed: int, trains: bool, **said: object) -> None:
    """A run of SpecForge that stops after two steps, its last save, and its export."""
    said |= {"block_size": BLOCK, "dflash_config": {"target_layer_ids": TAPS, "mask_token_id": MASK}}
    draft_config = config(architectures=["DFlashDraftModel"], **said)
    draft = filled(SpecforgeDrafter(draft_config), seed)
    seen = given(seed + 100)
    embedding = torch.nn.Embedding.from_pretrained(seen["embedding"].clone())
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
    head.weight = torch.nn.Parameter(seen["head"].clone(), requires_grad=False)
    model = OnlineDFlashModel(
        draft, head, embedding, mask_token_id=MASK, block_size=BLOCK, attention_backend="sdpa", num_anchors=8
    ).to(torch.bfloat16)
    whole = lambda target: BF16Optimizer(target, lr=1e-3, total_steps=10)  # noqa: E731
    backend = FSDPTrainingBackend(ParallelConfig(), optimizer_factory=whole if trains else None)
    backend.prepare_model(model, wrap=False, optimizer_target=draft)
    steps = algorithm_providers().step.bind_runtime(
        None, draft, model, model_provenance={"target_model": ("reference", "some/target")}
    )
    folder = HERE / "specforge" / name
    controller = TrainerController(
        TrainerCore(DFlashTrainStrategy(model), backend),
        run_id="run",
        output_dir=str(folder),
        max_steps=2,
        checkpoint_extra={"dataset_size": 1, "batch_size": 1, "tp_size": 1, **steps.resume_contract},
    )
    loss_mask = torch.zeros(1, LENGTH)
    for anchor in ANCHORS:  # SpecForge drafts from every supervised token that another one follows
        loss_mask[0, anchor : anchor + 2] = 1
    inputs = {"input_ids": seen["tokens"][None], "loss_mask": loss_mask}
    states = seen["features"][None]
    if trains:
        batch = inputs | {"hidden_states": states.bfloat16()}
        controller.fit([TrainBatch(sample_ids=["a"], tensors=batch, strategy="dflash", metadata={})] * 2)
    controller.save_checkpoint(2)

    written = folder / "draft_config.json"
    draft_config.to_json_file(written, use_diff=False)
    export_to_hf(str(folder), str(written), str(folder / "export"))
    written.unlink()

    embedding.weight.data, head.weight.data = seen["embedding"], seen["head"]
    exact = OnlineDFlashModel(
        in_float32(draft), head, embedding, mask_token_id=MASK, block_size=BLOCK, attention_backend="sdpa"
    )
    anchors, kept, hidden = exact._forward_draft_blocks(**inputs, hidden_states=states)
    assert anchors[0].tolist() == list(ANCHORS)
    assert kept.all()
    logits = exact.lm_head(hidden).reshape(len(ANCHORS), BLOCK, VOCABULARY)
    keep(folder, seen, logits=logits.detach())


# --- transformers --------------------------------------------------------------------------------------


def own_dflash(name: str, *, seed: int, layer_types: list[str]) -> None:
    """The drafter that transformers holds itself, called as its DFlashTokenCandidateGenerator calls it."""
    sizes = {key: value for key, value in config().to_dict().items() if key in CONFIG_KEYS}
    said = MuseGlimmerAssistantConfig(
        **sizes,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        sliding_window=WINDOW,
        layer_types=layer_types,
        block_size=BLOCK,
        mask_token_id=MASK,
        target_layer_ids=TAPS,
    )
    said._attn_implementation = "sdpa"
    model = filled(MuseGlimmerAssistantModel(said), seed)
    folder = HERE / "transformers" / name
    model.save_pretrained(folder)
    model, seen = in_float32(model), given(seed + 100)
    logits = []
    for anchor in ANCHORS:
        cache = DFlashCache(config=said)
        cache.activate_past_recording()
        cache.set_previous_accepted_tokens(anchor)
        hidden = model(
            noise_embeds=noise(seen, anchor),
            context_hidden_states=seen["features"][None, :anchor],
            position_ids=torch.arange(anchor + BLOCK)[None],
            attention_mask=torch.ones(1, anchor + BLOCK, dtype=torch.long),
            past_key_values=cache,
        ).last_hidden_state
        logits.append(hidden[0] @ seen["head"].T)
    keep(folder, seen, logits=torch.stack(logits))


CONFIG_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "rms_norm_eps"),
)


# --- DeepSpec ------------------------------------------------------------------------------------------


SETTINGS = f"""model = {{
    "block_size": {BLOCK},
    "num_draft_layers": 2,
    "target_layer_ids": {TAPS},
    "mask_token_id": {MASK},
    "num_anchors": 8,
    "markov_rank": 0,
    "confidence_head_alpha": 0.0,
}}
"""


def deepspec(*, seed: int) -> None:
    """A DFlash drafter of DeepSpec, which is its DSpark without the two heads, saved by its checkpoint manager.

    Its trainers want tensorboard and triton, its state wants a GPU's generator: neither matters here.
    """
    import deepspec as package

    trainers = ModuleType("deepspec.trainer")  # without what its __init__ imports
    trainers.__path__ = [str(Path(package.__file__).with_name("trainer"))]
    sys.modules["deepspec.trainer"] = trainers
    torch.cuda.get_rng_state = torch.get_rng_state
    from deepspec.modeling.dspark.qwen3.config import build_draft_config
    from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel
    from deepspec.trainer.ckpt_manager import save_checkpoint
    from deepspec.utils import BF16Optimizer as Optimizer
    from deepspec.utils.config import load_config
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    run = HERE / "deepspec"
    run.mkdir()
    with tempfile.TemporaryDirectory() as temporary:
        settings = Path(temporary) / "settings.py"
        settings.write_text(SETTINGS)
        said = load_config(settings)
        target = config(num_hidden_layers=TARGET_LAYERS, layer_types=["full_attention"] * TARGET_LAYERS)
        del target.num_target_layers
        draft_config = build_draft_config(target, said.model)
        draft_config._attn_implementation = "sdpa"
        model = filled(Qwen3DSparkModel(draft_config), seed)
        model.set_embedding_head_trainable(False)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        random.seed(seed)
        np.random.seed(seed)
        save_checkpoint(
            model=FullyShardedDataParallel(
                model,
                use_orig_params=True,
                sharding_strategy=ShardingStrategy.NO_SHARD,
                device_id=torch.device("cpu"),
            ),
            draft_model=model,
            optimizer=Optimizer(model.fc, lr=1e-3, total_steps=10, warmup_ratio=0.1),
            checkpoint_dir_root=str(run),
            train_config=SimpleNamespace(_origin_config_path=str(settings), _origin_opts=[]),
            next_micro_step=40,
            gradient_accumulation_steps=1,
            global_rank=0,
            world_size=1,
            local_batch_size=1,
        )
        dist.destroy_process_group()
    (run / "step_latest").unlink()  # it names an absolute path, which is another one in every copy
    (run / "step_latest").symlink_to("step_40")

    exact, seen = (
        in_float32(Qwen3DSparkModel.from_pretrained(run / "step_40", dtype=torch.bfloat16)),
        given(seed + 100),
    )
    logits = []
    for anchor in ANCHORS:
        ids = torch.full((1, BLOCK), MASK)
        ids[0, 0] = seen["tokens"][anchor]
        with torch.no_grad():
            hidden = exact._forward_backbone(
                position_ids=torch.arange(anchor + BLOCK)[None],
                noise_embedding=exact.embed_tokens(ids),
                target_hidden_states=seen["features"][None, :anchor],
                is_causal=False,
            )
            logits.append(exact.compute_logits(hidden)[0])
    seen["embedding"], seen["head"] = torch.zeros(VOCABULARY, HIDDEN), torch.zeros(VOCABULARY, HIDDEN)
    keep(run, seen, logits=torch.stack(logits))


if __name__ == "__main__":
    for project in ("zlab", "specforge", "transformers", "deepspec"):
        shutil.rmtree(HERE / project, ignore_errors=True)
    slides = {"layer_types": MIXED, "use_sliding_window": True, "sliding_window": WINDOW}
    with torch.no_grad():
        zlab("full", seed=1, block_size_at_top=True, layer_types=FULL)
        zlab("sliding", seed=2, block_size_at_top=False, **slides)
        zlab("non_causal", seed=3, block_size_at_top=False, is_causal=False, **slides)
        zlab("causal", seed=4, block_size_at_top=True, is_causal=True, layer_types=FULL)
        own_dflash("full", seed=5, layer_types=FULL)
        own_dflash("sliding", seed=6, layer_types=MIXED)
    specforge("full", seed=7, trains=True, layer_types=FULL)
    specforge("sliding", seed=8, trains=False, **slides)
    deepspec(seed=9)
