"""Running a target: what is observed equals what transformers says, and completions are greedy and its own."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from draftgauge.drafters import as_torch
from draftgauge.errors import TargetError
from draftgauge.target import (
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
from draftgauge.tensorfile import write_safetensors
from tests.golden import tensors_of

TinyTarget = Callable[..., Path]
E2E = Path(__file__).parent / "golden_e2e"


def greedy(case: str) -> tuple[list[int], list[int]]:
    """A golden prompt, and the 40 tokens that full forward passes chose after it."""
    golden = json.loads((E2E / f"{case}.json").read_text())
    prompt = golden["prompt_ids"]
    return prompt, golden["target_greedy_ids"][len(prompt) :]


def config_changed(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))
    return folder


def tokenizer_in(folder: Path, *, chat_template: str | None = None) -> None:
    """A word-level tokenizer of the words w3, w4, ...; its end of text is w2."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(3, 256)} | {"<unk>": 0, "<s>": 1, "w2": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="w2")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)


# --- observing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layers"), [("targetA", 6), ("targetB", 5)])
def test_taps_are_transformers_hidden_states(name: str, layers: int, tiny_target: TinyTarget) -> None:
    target = load_target(tiny_target(name))
    tokens = [5, 9, 200, 3, 3, 77, 12]
    taps = (layers - 1, -1, 0, 2)
    seen = observe(target, tokens, taps=taps)
    with torch.inference_mode():
        out = target.model(torch.tensor([tokens]), output_hidden_states=True)
    states = out.hidden_states  # [0] the embedding, [L + 1] the output of layer L, the last after the norm
    assert seen.taps.shape == (4, 7, 64)
    for row, tap in enumerate(taps):
        if tap < layers - 1:
            torch.testing.assert_close(seen.taps[row], states[tap + 1][0], rtol=0, atol=1e-6)
    torch.testing.assert_close(seen.normed, states[-1][0], rtol=0, atol=1e-6)
    # The last layer is taken before the norm, as tap and as final state.
    assert torch.equal(seen.taps[0], seen.final)
    assert not torch.allclose(seen.final, seen.normed, atol=1e-2)
    torch.testing.assert_close(target.decoder.norm(seen.final), seen.normed, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        target.model.get_output_embeddings()(seen.normed), out.logits[0], rtol=0, atol=1e-5
    )


def test_the_embedding_is_tap_minus_one(tiny_target: TinyTarget) -> None:
    target = load_target(tiny_target("targetA"))
    table = as_torch(tensors_of("targetA")["model.embed_tokens.weight"])
    assert torch.equal(observe(target, [7, 7, 200], taps=[-1]).taps[0], table[[7, 7, 200]])


def test_observing_leaves_no_hook_behind(tiny_target: TinyTarget) -> None:
    target = load_target(tiny_target("targetA"))
    observe(target, [1, 2, 3], taps=[0, -1])
    with pytest.raises(IndexError):
        observe(target, [1, 999], taps=[0])  # a token that the embedding does not have
    assert not any(module._forward_hooks for module in target.model.modules())


def test_the_recorded_pass_is_the_golden_one(tiny_target: TinyTarget) -> None:
    import numpy as np

    with np.load(Path(__file__).parent / "golden_blocks" / "draftA8.npz") as golden:
        tokens, final = golden["token_ids"].tolist(), torch.from_numpy(golden["target_last_hidden_prenorm"])
        features = torch.from_numpy(golden["context_feature"])
    seen = observe(load_target(tiny_target("targetA")), tokens, taps=(1, 3))
    torch.testing.assert_close(seen.final, final, rtol=0, atol=2e-5)
    torch.testing.assert_close(seen.taps.permute(1, 0, 2).flatten(1), features, rtol=0, atol=2e-5)


# --- generating ----------------------------------------------------------------------------------------

CASES = {"targetA": ["draftA8_P1", "draftA8_P33", "draftA8_P5"], "targetB": ["draftB8_P1", "draftB8_P33"]}


@pytest.mark.parametrize("name", CASES)
def test_completions_are_greedy_alone_and_side_by_side(name: str, tiny_target: TinyTarget) -> None:
    target = load_target(tiny_target(name))
    prompts, expected = zip(*map(greedy, CASES[name]), strict=True)
    assert len({len(prompt) for prompt in prompts}) > 1  # so that shorter ones are padded
    alone = [generate(target, [prompt], max_new_tokens=40)[0] for prompt in prompts]
    assert alone == list(expected)
    assert generate(target, prompts, max_new_tokens=40) == alone


def test_what_is_recommended_for_sampling_is_not_followed(tiny_target: TinyTarget) -> None:
    folder = tiny_target("targetA")
    recommended = {
        "do_sample": True,
        "temperature": 1.5,
        "top_k": 50,
        "repetition_penalty": 5.0,
        "no_repeat_ngram_size": 1,
    }
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    prompt, expected = greedy("draftA8_P5")
    assert len(set(expected)) < len(expected)  # the greedy text repeats tokens, which those settings forbid
    assert generate(load_target(folder), [prompt], max_new_tokens=40) == [expected]


# Where the golden completions of draftA8_P1, _P33 and _P5 first hold token 23, or 9.
@pytest.mark.parametrize(
    ("stops", "ends"), [([23], (16, 24, 20)), ([23, 9], (5, 24, 9)), ([9, 23], (5, 24, 9))]
)
def test_a_completion_ends_with_its_first_stop_token(
    stops: list[int], ends: tuple[int, ...], tiny_target: TinyTarget
) -> None:
    target = load_target(tiny_target("targetA", stops=stops))
    assert target.stop_token_ids == tuple(stops)
    prompts, expected = zip(*map(greedy, CASES["targetA"]), strict=True)
    completions = generate(target, prompts, max_new_tokens=40)
    assert completions == [text[: end + 1] for text, end in zip(expected, ends, strict=True)]


@pytest.mark.parametrize(
    ("tokens", "stops", "kept"),
    [
        ([5, 2, 7], [2], [5, 2]),
        ([5, 2, 7, 3], [3, 2], [5, 2]),
        ([5, 7], [2], [5, 7]),
        ([5, 7], [], [5, 7]),
        ([2, 2], [2], [2]),
        ([], [2], []),
    ],
)
def test_up_to_the_first_stop_token(tokens: list[int], stops: list[int], kept: list[int]) -> None:
    assert until_stop(tokens, stops) == kept


# --- loading -------------------------------------------------------------------------------------------


def test_loading_shows_no_bar_and_leaves_the_bars_as_they_were(
    tiny_target: TinyTarget, capfd: pytest.CaptureFixture[str]
) -> None:
    bars = transformers.utils.logging
    before = bars.is_progress_bar_enabled()
    load_target(tiny_target("targetA"))
    assert capfd.readouterr().err == ""
    assert bars.is_progress_bar_enabled() is before


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ({}, "float32"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "absent", "torch_dtype": "float16"}, "float16"),
        ({"dtype": "absent", "text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": "absent"}, "float32"),  # as all weights are stored
    ],
)
def test_the_targets_own_dtype(words: dict[str, Any], dtype: str, tiny_target: TinyTarget) -> None:
    assert own_dtype(config_changed(tiny_target("targetA"), **words)) == dtype


@pytest.mark.parametrize(
    ("asked", "dtype"), [(None, "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")]
)
def test_the_dtype_that_is_asked_for_is_computed_in(
    asked: str | None, dtype: str, tiny_target: TinyTarget
) -> None:
    target = load_target(tiny_target("targetA"), dtype=asked)
    assert target.dtype == dtype
    assert {str(p.dtype) for p in target.model.parameters()} == {f"torch.{dtype}"}
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not target.model.training


def test_a_dtype_that_nobody_says_is_asked_for(tiny_target: TinyTarget) -> None:
    folder = config_changed(tiny_target("targetA"), dtype="absent")
    arrays = {name: stored.to_float32() for name, stored in tensors_of("targetA").items()}
    arrays["model.norm.weight"] = arrays["model.norm.weight"].astype("float16")
    write_safetensors(folder / "model.safetensors", arrays)
    with pytest.raises(TargetError, match="does not say its dtype; state it with --dtype"):
        load_target(folder)
    assert load_target(folder, dtype="float32").dtype == "float32"


def lacking(folder: Path) -> None:
    arrays = {name: stored.to_float32() for name, stored in tensors_of("targetA").items()}
    del arrays["model.layers.2.mlp.up_proj.weight"]
    write_safetensors(folder / "model.safetensors", arrays)


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: (f / "config.json").unlink(),
            "is not a Hugging Face directory with a config.json; give a local",
        ),
        (lambda f: (f / "config.json").write_text("{"), "target cannot be read: "),
        (lambda f: (f / "model.safetensors").unlink(), "could not be loaded by transformers: "),
        (lambda f: config_changed(f, model_type="unheard"), "could not be loaded by transformers: "),
        (
            lambda f: config_changed(f, dtype="float64"),
            "dtype 'float64' of target .* is not computed with; expected",
        ),
        (lambda f: config_changed(f, hidden_size=32), "could not be loaded by transformers: "),
        (
            lambda f: config_changed(f, num_hidden_layers="six"),
            "could not be loaded by transformers: .*expected int",
        ),
        (lambda f: config_changed(f, rope_theta="1e6"), "could not be loaded by transformers: "),
        (lambda f: config_changed(f, num_attention_heads=0), "could not be loaded by transformers: "),
        (lambda f: config_changed(f, text_config=[]), "could not be loaded by transformers: "),
        (lambda f: config_changed(f, dtype=[16]), "dtype .* of target .* is not computed with"),
        (
            lambda f: (f / "config.json").write_text("[]"),
            r"config.json holds no JSON object; copy the target again",
        ),
        (lambda f: (f / "generation_config.json").write_text("[]"), "could not be loaded by transformers: "),
        (
            lambda f: (f / "generation_config.json").write_text('{"eos_token_id": ["2"]}'),
            r"says eos_token_id \['2'\]; expected token ids, in generation_config.json",
        ),
        (truncated, "target cannot be read: .*truncated or still being written"),
        (
            lacking,
            r"lacks 1 weights \(model.layers.2.mlp.up_proj.weight ...\), which transformers fills at random",
        ),
    ],
)
def test_targets_that_cannot_be_run(
    damage: Callable[[Path], Any], message: str, tiny_target: TinyTarget
) -> None:
    folder = tiny_target("targetA")
    damage(folder)
    with pytest.raises(TargetError, match=message):
        load_target(folder)


def test_the_layers_are_counted_without_loading_them(tiny_target: TinyTarget) -> None:
    folder = tiny_target("targetB")
    assert count_layers(folder) == 5 == len(load_target(folder).decoder.layers)
    (folder / "model.safetensors").unlink()
    assert count_layers(folder) == 5
    with pytest.raises(TargetError, match=r"is not understood by transformers: .*expected int"):
        count_layers(config_changed(folder, num_hidden_layers="five"))
    with pytest.raises(TargetError, match="is not a Hugging Face directory"):
        count_layers(folder.parent / "nowhere")


@pytest.mark.parametrize(
    ("words", "base"),
    [
        ({"rope_theta": 1e6}, 1e6),
        ({"rope_theta": "absent", "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5),
    ],
)
def test_the_base_of_the_rotary_embedding_under_both_names(
    words: dict[str, Any], base: float, tiny_target: TinyTarget
) -> None:
    assert rope_theta(load_target(config_changed(tiny_target("targetA"), **words))) == base


@pytest.mark.parametrize(
    ("said", "base"),
    [
        ({"rope_theta": 500}, 500.0),
        ({"rope_parameters": None, "rope_theta": 500}, 500.0),
        ({"rope_parameters": {"full": {"rope_theta": 1e6}, "sliding": {"rope_theta": 1e4}}}, None),
        ({"rope_parameters": {"full": {"rope_theta": 1e6}, "sliding": {"rope_theta": 1e6}}}, 1e6),
        ({}, None),
    ],
)
def test_the_base_where_layers_may_differ_or_none_rotates(said: dict[str, Any], base: float | None) -> None:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**said))
    target = Target(Path(), SimpleNamespace(config=config), None, "float32")
    assert rope_theta(target) == base


def test_special_tokens_are_those_that_no_text_has(tiny_target: TinyTarget) -> None:
    folder = tiny_target("targetA")
    tokenizer_in(folder)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.add_tokens(["plain"])
    assert special_tokens(tokenizer) == {"<unk>": 0, "w2": 2, "<pad>": 256}
    assert special_tokens(None) == {}


def test_an_architecture_of_another_layout_is_refused(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16, n_positions=16)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(TargetError, match="is a GPT2LMHeadModel, whose decoder has no `layers` and `norm`"):
        load_target(tmp_path, dtype="float32")


def test_a_target_without_vocabulary_files_has_no_tokenizer(tiny_target: TinyTarget) -> None:
    folder = tiny_target("targetA")
    assert load_tokenizer(folder) is None
    # And so no end of text that such a made-up tokenizer would bring.
    assert load_target(folder).stop_token_ids == ()


def test_a_tokenizer_is_loaded_and_names_the_stop_token(tiny_target: TinyTarget) -> None:
    folder = tiny_target("targetA")
    tokenizer_in(folder)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    assert tokenizer("w5 w7")["input_ids"] == [5, 7]
    assert load_target(folder).stop_token_ids == (2,)


def test_a_tokenizer_that_is_there_but_damaged_is_named(tiny_target: TinyTarget) -> None:
    folder = tiny_target("targetA")
    tokenizer_in(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(TargetError, match=r"the tokenizer of target .* could not be loaded: "):
        load_tokenizer(folder)


# --- the final norm ------------------------------------------------------------------------------------


def with_norm(target: Target, norm: torch.nn.Module) -> Target:
    """The target with another final norm."""
    target.decoder.norm = norm
    return target


def test_the_norms_weight_is_the_stored_one(tiny_target: TinyTarget) -> None:
    target = load_target(tiny_target("targetA"))
    assert norm_weight(target) is target.decoder.norm.weight
    narrow = load_target(tiny_target("targetA", folder="narrow"), dtype="bfloat16")
    assert norm_weight(narrow) is narrow.decoder.norm.weight


def test_a_norm_that_adds_one_to_its_weight_is_seen(tiny_target: TinyTarget) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    norm = GemmaRMSNorm(64, eps=1e-6)
    norm.weight.data = torch.linspace(-0.5, 0.5, 64)
    weight = norm_weight(with_norm(load_target(tiny_target("targetA")), norm))
    torch.testing.assert_close(weight, torch.linspace(0.5, 1.5, 64))


@pytest.mark.parametrize(
    "norm",
    [
        torch.nn.LayerNorm(64, eps=1e-6, bias=False),
        torch.nn.RMSNorm(64, eps=1.0),  # of another epsilon than the config says
    ],
)
def test_a_norm_that_is_no_root_mean_square_is_refused(
    norm: torch.nn.Module, tiny_target: TinyTarget
) -> None:
    target = with_norm(load_target(tiny_target("targetA")), norm)
    with pytest.raises(
        TargetError, match="is not a root mean square norm; such targets cannot be recorded yet"
    ):
        norm_weight(target)
