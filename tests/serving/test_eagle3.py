"""A feature head in the layout that vLLM loads: what is written, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig

from draftsmith.drafts.eagle3_layout import CONFIG, WEIGHTS
from draftsmith.drafts.eagle_start import build_head
from draftsmith.drafts.joined import LoadedDraft
from draftsmith.drafts.manifest import DraftManifest
from draftsmith.drafts.student import own_parameter_names
from draftsmith.errors import ArtifactError, DraftError
from draftsmith.serving.eagle3 import write_head
from draftsmith.serving.eagle3_reference import compared_logits
from draftsmith.serving.export import export_pair
from tests.decoding.conftest import _build as build_family
from tests.drafts.small_models import VOCAB_SIZE, make_target, some_tokens

LAYERS = (3, 0, 2)  # vLLM hands them over in ascending order
TOKEN_IDS = torch.tensor([5, 0, 40, 7, 21, 13])
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
TARGETS = {
    "llama": ("llama", {}),
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "heads of another width": ("llama", {"head_dim": 16}),
    "scaled rotary embedding": ("llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", {}),
}


def noisy_head(target, layers=LAYERS, token_ids=TOKEN_IDS, *, own_head=False):
    """A head of which every weight matters."""
    head = build_head(target, layers, token_ids, own_head=own_head)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in own_parameter_names(head):
            weight = head.get_parameter(name)
            drawn = torch.randn(weight.shape, generator=generator)
            weight.add_((drawn * 0.1).to(weight.dtype))
    return head


def target_of(name="llama", **more):
    kind, options = TARGETS[name]
    return make_target(kind, num_layers=4, **options, **more)


@pytest.fixture
def llama():
    return target_of()


@pytest.fixture
def written(llama, tmp_path):
    """A head and the folder that it was written to."""
    head = noisy_head(llama)
    write_head(head, TOKEN_IDS, tmp_path / "head")
    return head, tmp_path / "head"


def logits(head, target, folder, token_ids=TOKEN_IDS):
    return compared_logits(head, token_ids, target, folder, text=some_tokens(rows=1, width=12))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TARGETS)
def test_what_is_written_computes_what_the_head_computes(name, dtype, tmp_path):
    target = target_of(name, dtype=dtype)
    head = noisy_head(target)
    write_head(head, TOKEN_IDS, tmp_path / "head")
    expected, found = logits(head, target, tmp_path / "head")
    assert expected.shape == (1, 12, VOCAB_SIZE)
    rows = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    rows[TOKEN_IDS] = True
    for side in (expected, found):
        assert torch.equal(side.isfinite(), rows.expand_as(side))
    scale = float(expected[..., rows].abs().max())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    difference = float((expected - found)[..., rows].abs().max())
    assert difference <= tolerance * scale
    assert float(expected[..., rows].std()) > 0.05 * scale


@pytest.mark.parametrize("layers", [(1,), (0, 3), (2, 1, 0, 3)])
def test_any_number_of_layers_is_read_in_ascending_order(llama, tmp_path, layers):
    head = noisy_head(llama, layers)
    write_head(head, TOKEN_IDS, tmp_path / "head")
    config = json.loads((tmp_path / "head" / CONFIG).read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == sorted(layers)
    assert config["num_aux_hidden_states"] == len(layers)
    torch.testing.assert_close(*logits(head, llama, tmp_path / "head"))


def test_the_names_and_shapes_are_those_that_the_loader_maps(written):
    _, folder = written
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(folder / WEIGHTS).items()}
    assert shapes == {
        "fc.weight": (32, 96),
        "midlayer.input_layernorm.weight": (32,),
        "midlayer.hidden_norm.weight": (32,),
        "midlayer.self_attn.q_proj.weight": (32, 64),
        "midlayer.self_attn.k_proj.weight": (16, 64),
        "midlayer.self_attn.v_proj.weight": (16, 64),
        "midlayer.self_attn.o_proj.weight": (32, 32),
        "midlayer.post_attention_layernorm.weight": (32,),
        "midlayer.mlp.gate_proj.weight": (48, 32),
        "midlayer.mlp.up_proj.weight": (48, 32),
        "midlayer.mlp.down_proj.weight": (32, 48),
        "norm.weight": (32,),
        "lm_head.weight": (6, 32),
        "d2t": (6,),
        "t2d": (VOCAB_SIZE,),
    }


def test_the_configuration_is_that_of_a_llama_layer(written, llama):
    _, folder = written
    stated = json.loads((folder / CONFIG).read_text())
    assert stated["architectures"] == ["LlamaForCausalLMEagle3"]
    expected = {
        "model_type": "llama",
        "dtype": "float32",
        "num_hidden_layers": 1,
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": 6,
        "hidden_size": 32,
        "target_hidden_size": 32,
        "head_dim": 8,
        "eagle_aux_hidden_state_layer_ids": [0, 2, 3],
        "num_aux_hidden_states": 3,
        "norm_before_residual": False,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_scaling": None,
        "rms_norm_eps": llama.config.rms_norm_eps,
        "max_position_embeddings": llama.config.max_position_embeddings,
    }
    assert {name: stated[name] for name in expected} == expected


@pytest.mark.parametrize("name", TARGETS)
def test_the_rotary_embedding_is_read_back_as_the_targets(name, tmp_path):
    target = target_of(name)
    write_head(noisy_head(target), TOKEN_IDS, tmp_path / "head")
    config = LlamaConfig.from_pretrained(tmp_path / "head")
    assert config.rope_parameters == target.config.rope_parameters


def test_projections_without_a_bias_get_zeros_where_others_have_one(tmp_path):
    target = target_of("qwen2")
    head = noisy_head(target)
    write_head(head, TOKEN_IDS, tmp_path / "head")
    tensors = load_file(tmp_path / "head" / WEIGHTS)
    config = json.loads((tmp_path / "head" / CONFIG).read_text())
    assert (config["attention_bias"], config["mlp_bias"]) == (True, False)
    ours = head.body.layers[0].self_attn
    assert torch.equal(tensors["midlayer.self_attn.q_proj.bias"], ours.q_proj.bias)
    assert ours.q_proj.bias.abs().min() > 0
    assert not tensors["midlayer.self_attn.o_proj.bias"].any()
    assert not [name for name in tensors if name.startswith("midlayer.mlp") and "bias" in name]


@pytest.mark.parametrize("token_ids", [TOKEN_IDS, torch.arange(VOCAB_SIZE), None])
def test_the_vocabulary_comes_back_from_offsets_and_from_the_mask(llama, tmp_path, token_ids):
    head = noisy_head(llama, token_ids=token_ids)
    write_head(head, token_ids, tmp_path / "head")
    tensors = load_file(tmp_path / "head" / WEIGHTS)
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    assert (d2t.dtype, t2d.dtype) == (torch.int64, torch.bool)
    ids = torch.arange(VOCAB_SIZE) if token_ids is None else token_ids
    assert torch.equal(d2t + torch.arange(len(d2t)), ids)
    assert torch.equal(t2d.nonzero().squeeze(1), ids.sort().values)
    rows = llama.get_output_embeddings().weight
    assert torch.equal(tensors["lm_head.weight"], rows[ids])
    torch.testing.assert_close(*logits(head, llama, tmp_path / "head", token_ids))


def swap_halves(tensors):
    name = "midlayer.self_attn.k_proj.weight"
    tensors[name] = tensors[name].roll(32, 1)


def swap_norms(tensors):
    first, second = "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"
    tensors[first], tensors[second] = tensors[second], tensors[first]


def order_as_asked(tensors):
    tensors["fc.weight"] = tensors["fc.weight"].roll(32, 1)


def next_ids(tensors):
    tensors["d2t"] += 1


def other_rows(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, 0)


@pytest.mark.parametrize(
    "fault",
    [swap_halves, swap_norms, order_as_asked, next_ids, other_rows],
    ids=lambda fault: fault.__name__,
)
def test_a_fault_in_the_weights_changes_the_logits(written, llama, fault):
    head, folder = written
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    fault(tensors)
    save_file(tensors, folder / WEIGHTS)
    assert differs(*logits(head, llama, folder))


@pytest.mark.parametrize(
    "fault",
    [
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        {"rope_theta": 77.0},
        {"rms_norm_eps": 0.5},
        {"num_key_value_heads": 2, "head_dim": 4},
    ],
    ids=lambda fault: next(iter(fault)),
)
def test_a_fault_in_the_configuration_changes_the_logits(written, llama, fault):
    head, folder = written
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | fault))
    assert differs(*logits(head, llama, folder))


def differs(expected, found):
    return bool(((expected - found).abs() > 0.05).any() | (expected.isinf() != found.isinf()).any())


@pytest.mark.parametrize(
    ("make", "layers", "words"),
    [
        (lambda: build_family("qwen3").reference, (0, 1), "k_norm"),
        (lambda: build_family("gemma3").reference, (0, 1), "weights differ from Llama's"),
        (lambda: build_family("mistral").reference, (0, 1), "sliding window"),
        (lambda: make_target(num_layers=4, hidden_act="gelu"), LAYERS, "activation gelu"),
        (
            lambda: make_target(
                num_layers=4,
                rope_parameters={"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0},
            ),
            LAYERS,
            "type yarn",
        ),
        (make_target, (1, 2, 2), r"layers \[1, 2, 2\]"),
    ],
    ids=["qk-norm", "other norms", "window", "activation", "rotary", "a layer twice"],
)
def test_what_vllm_cannot_compute_is_refused_by_name(make, layers, words, tmp_path):
    head = noisy_head(make(), layers, None)
    with pytest.raises(DraftError, match=words) as caught:
        write_head(head, None, tmp_path / "head")
    assert "family student" in str(caught.value)
    assert not (tmp_path / "head").exists()


def test_the_comparison_notices_a_class_whose_names_are_llamas_and_whose_numbers_are_not(tmp_path):
    target = build_family("granite").reference
    head = noisy_head(target, (0, 1), None)
    write_head(head, None, tmp_path / "head")
    assert differs(*logits(head, target, tmp_path / "head", None))


def test_output_rows_with_a_bias_are_refused(llama, tmp_path):
    head = noisy_head(llama)
    head.lm_head = nn.Linear(32, 6)
    with pytest.raises(DraftError, match="bias"):
        write_head(head, TOKEN_IDS, tmp_path / "head")


def test_windows_of_other_layers_are_no_obstacle(tmp_path):
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    more = {"use_sliding_window": True, "sliding_window": 4, "layer_types": kinds}
    target = make_target("qwen2", num_layers=4, **more)
    head = noisy_head(target)
    write_head(head, TOKEN_IDS, tmp_path / "head")
    torch.testing.assert_close(*logits(head, target, tmp_path / "head"))


@pytest.fixture
def headed(pair, monkeypatch):
    """The pair of this folder's tests with a head in the place of its draft."""
    head = noisy_head(pair.target.model, (2, 1, 3))
    manifest = DraftManifest(**{**vars(pair.draft.manifest), "family": "eagle"})
    monkeypatch.setattr(pair, "draft", LoadedDraft(head, TOKEN_IDS, manifest))
    return pair


def test_a_head_is_exported_with_the_command_that_serves_it(headed, tmp_path):
    folder = tmp_path / "out"
    told = export_pair(headed, folder, to="vllm")
    assert told["largest_difference"] < 1e-3
    place = str(folder.resolve() / "draft")
    speculation = json.loads((folder / "speculative_config.json").read_text())
    assert speculation == {
        "method": "eagle3",
        "model": place,
        "num_speculative_tokens": headed.draft_length,
    }
    readme = (folder / "README.md").read_text()
    assert f"vllm serve {told['target']['directory']}" in readme
    assert json.dumps(speculation) in readme
    assert sorted(path.name for path in (folder / "draft").iterdir()) == [CONFIG, WEIGHTS]
    modes = {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}
    assert modes == {0o644}
    with pytest.raises(ArtifactError, match="remove it"):
        export_pair(headed, folder, to="vllm")


def test_a_head_whose_layer_computes_otherwise_leaves_nothing_behind(headed, tmp_path):
    headed.draft.model.body.layers[0].self_attn.scaling = 0.01
    with pytest.raises(DraftError, match="otherwise than Llama's"):
        export_pair(headed, tmp_path / "out", to="vllm")
    assert list(tmp_path.iterdir()) == []


def test_transformers_cannot_draft_with_a_head(headed, tmp_path):
    with pytest.raises(DraftError, match="family eagle"):
        export_pair(headed, tmp_path / "out", to="transformers")
    assert list(tmp_path.iterdir()) == []
