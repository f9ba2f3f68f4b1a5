"""Heads from elsewhere: the inverse of the export, or refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from draftsmith.drafts.eagle3_folder import is_head, read_stored
from draftsmith.drafts.eagle3_join import join_stored
from draftsmith.drafts.eagle3_layout import CONFIG, LAYER_IDS, WEIGHTS
from draftsmith.drafts.student import has_own_head, own_parameter_names
from draftsmith.errors import DraftError, DraftMisfitError
from draftsmith.serving.eagle3 import write_head
from draftsmith.serving.eagle3_reference import compared_logits
from tests.drafts.small_models import VOCAB_SIZE, make_target, some_tokens
from tests.serving.test_eagle3 import TARGETS, TOKEN_IDS, noisy_head, target_of

LAYERS = (0, 2, 3)


@pytest.fixture
def llama():
    return target_of("llama")


@pytest.fixture
def folder(llama, tmp_path):
    """A head of `llama` with a trimmed vocabulary, as it is exported."""
    write_head(noisy_head(llama, LAYERS), TOKEN_IDS, tmp_path / "head")
    return tmp_path / "head"


def imported(folder, target):
    return join_stored(read_stored(folder), target)


def own_state(head):
    state = head.state_dict()
    return {name: state[name] for name in own_parameter_names(head)}


def change_config(folder, **changes):
    config = json.loads((folder / CONFIG).read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not ...}
    (folder / CONFIG).write_text(json.dumps(kept))


def change_tensors(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


@torch.no_grad()
def drafted(head, width=9):
    """Logits over the head's own rows for a text and made-up features."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(1, width, len(head.feature_layers) * 32, generator=generator)
    tokens = some_tokens(rows=1, width=width)
    return head.logits(head.run(tokens, head.fuse(features), use_cache=False))


@pytest.mark.parametrize("own_head", [False, True], ids=["shared rows", "own rows"])
@pytest.mark.parametrize("token_ids", [TOKEN_IDS, None], ids=["trimmed", "whole"])
@pytest.mark.parametrize("name", TARGETS)
def test_export_and_import_are_each_others_inverse(name, token_ids, own_head, tmp_path):
    target = target_of(name)
    head = noisy_head(target, LAYERS, token_ids, own_head=own_head)
    write_head(head, token_ids, tmp_path / "once")
    found, ids = imported(tmp_path / "once", target)
    assert (ids is None) if token_ids is None else torch.equal(ids, token_ids)
    assert (found.feature_layers, has_own_head(found)) == (LAYERS, own_head)
    assert found.get_input_embeddings() is target.get_input_embeddings()
    before, after = own_state(head), own_state(found)
    for weight, values in before.items():
        assert torch.equal(after.pop(weight), values), weight
    assert not any(values.any() for values in after.values())
    assert {weight.rpartition(".")[2] for weight in after} <= {"bias"}
    if name == "qwen2":
        torch.testing.assert_close(drafted(found), drafted(head))
    else:
        assert torch.equal(drafted(found), drafted(head))
    write_head(found, ids, tmp_path / "twice")
    once, twice = (load_file(tmp_path / name / WEIGHTS) for name in ("once", "twice"))
    assert once.keys() == twice.keys()
    assert all(torch.equal(once[weight], twice[weight]) for weight in once)
    assert (tmp_path / "once" / CONFIG).read_text() == (tmp_path / "twice" / CONFIG).read_text()


def test_layers_that_were_read_in_another_order_are_read_ascending(llama, tmp_path):
    head = noisy_head(llama, (3, 0, 2))
    write_head(head, TOKEN_IDS, tmp_path / "head")
    found, ids = imported(tmp_path / "head", llama)
    assert found.feature_layers == (0, 2, 3)
    text = some_tokens(rows=1, width=12)
    logits = [
        compared_logits(one, ids, llama, tmp_path / "head", text=text)[0] for one in (head, found)
    ]
    torch.testing.assert_close(*logits)


def test_it_takes_the_dtype_of_its_target(folder):
    target = target_of("llama").to(torch.bfloat16)
    found, _ = imported(folder, target)
    assert {values.dtype for values in own_state(found).values()} == {torch.bfloat16}
    assert not has_own_head(found)


def as_speculators(folder):
    """The same head as that trainer writes it."""
    config = json.loads((folder / CONFIG).read_text())
    outside = ("architectures", "draft_vocab_size", LAYER_IDS, "norm_before_residual")
    stated = {key: config.pop(key) for key in outside}
    stated |= {"architectures": ["Eagle3Speculator"], "model_type": "speculator_model"}
    stated |= {"auto_map": {"": "eagle3.Eagle3SpeculatorConfig"}, "target_hidden_size": None}
    stated |= {"speculators_model_type": "eagle3", "transformer_layer_config": config}
    (folder / CONFIG).write_text(json.dumps(stated))
    tensors = load_file(folder / WEIGHTS)
    renamed = {name.replace("midlayer.", "layers.0."): one for name, one in tensors.items()}
    save_file(renamed, folder / WEIGHTS)


def test_the_layout_of_speculators_holds_the_same_head(folder, llama):
    expected, _ = imported(folder, llama)
    as_speculators(folder)
    assert is_head(folder)
    found, ids = imported(folder, llama)
    assert torch.equal(ids, TOKEN_IDS)
    assert found.feature_layers == LAYERS
    assert torch.equal(drafted(found), drafted(expected))


def test_layers_that_are_counted_by_outputs_are_the_inputs_of_those_behind(llama, tmp_path):
    write_head(noisy_head(llama, (2, 3)), TOKEN_IDS, tmp_path / "head")
    nested = {"eagle_config": {LAYER_IDS: [1, 2]}}
    change_config(tmp_path / "head", **nested, **{LAYER_IDS: ...})
    assert imported(tmp_path / "head", llama)[0].feature_layers == (2, 3)
    change_config(tmp_path / "head", **{LAYER_IDS: [2, 3]})
    assert imported(tmp_path / "head", llama)[0].feature_layers == (2, 3)


def test_a_head_that_names_no_layers_reads_the_usual_ones(tmp_path):
    target = make_target(num_layers=8)
    write_head(noisy_head(target, (2, 4, 5)), TOKEN_IDS, tmp_path / "head")
    change_config(tmp_path / "head", **{LAYER_IDS: ...})
    assert imported(tmp_path / "head", target)[0].feature_layers == (2, 4, 5)


def test_a_whole_vocabulary_needs_no_map(llama, tmp_path):
    write_head(noisy_head(llama, LAYERS, None), None, tmp_path / "head")

    def without_map(tensors):
        del tensors["d2t"], tensors["t2d"]

    change_tensors(tmp_path / "head", without_map)
    change_config(tmp_path / "head", draft_vocab_size=None)
    assert imported(tmp_path / "head", llama)[1] is None


def test_settings_that_are_left_out_have_the_defaults_of_llama(folder, llama):
    assert llama.config.rms_norm_eps == 1e-6
    change_config(folder, rms_norm_eps=..., attention_bias=..., mlp_bias=..., rope_scaling=None)
    assert imported(folder, llama)[0].config.rms_norm_eps == 1e-6


def test_embeddings_that_are_the_targets_are_shared(folder, llama):
    table = llama.get_input_embeddings().weight

    def with_table(tensors):
        tensors["embed_tokens.weight"] = table.detach().clone()

    change_tensors(folder, with_table)
    head, _ = imported(folder, llama)
    assert head.get_input_embeddings().weight is table


def test_it_drafts_as_far_as_its_target_reads(folder, llama):
    change_config(folder, max_position_embeddings=16, sliding_window=8, use_sliding_window=False)
    head, _ = imported(folder, llama)
    assert head.config.max_position_embeddings == llama.config.max_position_embeddings == 64


def test_its_layer_stays_llamas_under_a_target_of_another_class(folder):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        eos_token_id=1,
    )
    target = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    head, ids = imported(folder, target)
    assert has_own_head(head)
    text = some_tokens(rows=1, width=12)
    expected, found = compared_logits(head, ids, target, folder, text=text)
    torch.testing.assert_close(expected, found)
    assert expected[..., TOKEN_IDS].std() > 0.01


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_before_residual": True}, "norm_before_residual: true"),
        ({"fc_norm": True}, "fc_norm: true"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state: false"),
        ({"num_hidden_layers": 2}, "num_hidden_layers: 2"),
        ({"hidden_act": "gelu"}, 'hidden_act: "gelu"'),
        ({"model_type": "qwen3"}, 'model_type: "qwen3"'),
        ({"sliding_window": 16}, "sliding window"),
        ({"speculators_model_type": "dflash"}, "of the kind dflash"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary embeddings of type yarn"),
        ({"hidden_size": 30}, "Transformers does not take"),
        ({"draft_vocab_size": 7}, "6 output rows where draft_vocab_size is 7"),
        ({LAYER_IDS: [0, "two"]}, LAYER_IDS),
        ({LAYER_IDS: ..., "eagle_config": {LAYER_IDS: [0, 2, 3]}}, "others by its output"),
        ({"eagle_config": {LAYER_IDS: [1, 2, 3]}}, "others by its output"),
        ({"attention_bias": True}, "no tensor midlayer.self_attn.k_proj.bias"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_settings_that_change_what_is_computed_are_refused_by_name(folder, changes, words):
    change_config(folder, **changes)
    with pytest.raises(DraftError) as refused:
        read_stored(folder)
    assert words in str(refused.value)
    assert str(folder) in str(refused.value)


def test_an_unstated_residual_of_speculators_is_refused(folder):
    as_speculators(folder)
    change_config(folder, norm_before_residual=...)
    with pytest.raises(DraftError, match="no norm_before_residual"):
        read_stored(folder)


def without(name):
    return lambda tensors: tensors.pop(name)


def extra(name, *shape):
    return lambda tensors: tensors.update({name: torch.ones(*shape)})


def moved(name, by):
    return lambda tensors: tensors.update({name: tensors[name] + by})


def replaced(name, values):
    return lambda tensors: tensors.update({name: values})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("midlayer.mlp.up_proj.weight"), "no tensor midlayer.mlp.up_proj.weight"),
        (without("lm_head.weight"), "no tensor lm_head.weight"),
        (extra("midlayer.self_attn.q_norm.weight", 8), "midlayer.self_attn.q_norm.weight"),
        (extra("midlayer.self_attn.q_proj.bias", 32), "midlayer.self_attn.q_proj.bias"),
        (extra("layers.1.mlp.up_proj.weight", 48, 32), "layers.1.mlp.up_proj.weight"),
        (extra("input_norm.weight", 96), "input_norm.weight"),
        (without("d2t"), "no d2t"),
        (moved("d2t", 8), "outside the vocabulary of 48"),
        (moved("d2t", -6), "outside the vocabulary of 48"),
        (replaced("d2t", torch.zeros(4, dtype=torch.int64)), "a d2t of shape [4]"),
        (replaced("d2t", -torch.arange(6) % 5), "names an id twice"),
        (replaced("t2d", torch.ones(VOCAB_SIZE, dtype=torch.bool)), "a t2d that marks other ids"),
    ],
)
def test_tensors_that_are_not_those_of_such_a_head_are_refused_by_name(folder, change, words):
    change_tensors(folder, change)
    with pytest.raises(DraftError) as refused:
        read_stored(folder)
    assert words in str(refused.value)


def test_a_damaged_file_is_refused(folder):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-64])
    with pytest.raises(DraftError, match="damaged"):
        read_stored(folder)


@pytest.mark.parametrize(
    ("changes", "change", "words"),
    [
        ({LAYER_IDS: [2, 0, 3]}, None, "no ascending inputs of the target's 4 layers"),
        ({LAYER_IDS: [0, 2, 4]}, None, "no ascending inputs of the target's 4 layers"),
        ({LAYER_IDS: [0, 2]}, None, "fc.weight over 96 numbers, not over 2 layers of 32"),
        ({LAYER_IDS: ...}, None, "[2, 2, 1]"),
        ({"intermediate_size": 40}, None, "gate_proj.weight of shape [48, 32]"),
        ({}, extra("embed_tokens.weight", VOCAB_SIZE, 32), "not the target's embedding"),
        ({}, replaced("norm.weight", torch.ones(8)), "norm.weight of shape [8]"),
    ],
)
def test_what_does_not_fit_its_target_is_refused_by_name(folder, llama, changes, change, words):
    change_config(folder, **changes)
    if change is not None:
        change_tensors(folder, change)
    stored = read_stored(folder)
    with pytest.raises(DraftMisfitError) as refused:
        join_stored(stored, llama)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("llama", {"hidden_size": 48}, "a hidden size of 32, the target's is 48"),
        ("llama", {"vocab_size": 50}, "a vocabulary of 48, the target's is 50"),
        ("gemma3", {}, "scales its embeddings"),
    ],
)
def test_a_target_of_another_shape_is_refused_by_name(folder, kind, options, words):
    with pytest.raises(DraftMisfitError, match=words):
        join_stored(read_stored(folder), make_target(kind, **options))


def test_other_folders_are_no_heads(tmp_path, llama):
    llama.save_pretrained(tmp_path / "whole")
    assert not is_head(tmp_path / "whole")
    assert not is_head(tmp_path / "nowhere")
