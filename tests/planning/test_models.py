"""Sizes that are counted without weights are those of what is really built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, MambaConfig, ViTConfig

from draftsmith.config import compose
from draftsmith.decoding.slot_model import SlotModel
from draftsmith.distillation.building import build_draft
from draftsmith.drafts.checkpoint import save_draft
from draftsmith.drafts.settings import RecipeConfig
from draftsmith.drafts.vocabulary import choose_tokens
from draftsmith.errors import DraftError, TargetError
from draftsmith.planning.models import (
    CacheShape,
    draft_layers,
    draft_sizes,
    meta_target,
    target_sizes,
)
from draftsmith.strict import convert
from tests.drafts.small_models import make_lineage, make_target
from tests.planning.small_plans import RECIPES, make_mixture

ROOT = Path(__file__).parents[2]
CACHE = CacheShape(rows=2, slots=40)
ROUNDED = 64  # slots of a decoder's cache
PAIRS = [
    (kind, name)
    for kind in ("llama", "qwen2", "gemma3", "gpt2")
    for name, recipe in RECIPES.items()
    if kind != "gpt2" or recipe.family != "eagle"
]


def num_parameters(tensors):
    return sum(tensor.numel() for tensor in tensors)


def num_bytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


def built(recipe, target):
    rows = len(target.get_output_embeddings().weight)
    size = recipe.vocabulary_size
    ids = choose_tokens(torch.arange(rows), size) if 0 < size < rows else None
    return build_draft(recipe, target, draft_layers(recipe, target), ids), ids


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_a_drafts_sizes_are_those_of_one_that_is_built_and_saved(config_of, tmp_path, kind, name):
    recipe, folder = RECIPES[name], config_of(kind)
    sizes = draft_sizes(recipe, meta_target(folder, "bfloat16"), CACHE)
    draft, ids = built(recipe, make_target(kind, dtype=torch.bfloat16))
    trained = [p for p in draft.parameters() if p.requires_grad]
    assert sizes.num_parameters == num_parameters(draft.parameters())
    assert sizes.num_trained == num_parameters(trained)
    assert sizes.trained == sizes.gradients == 4 * num_parameters(trained)
    saved = tmp_path / "draft"
    saved.mkdir()
    save_draft(saved, draft, ids, lineage=make_lineage(), training={})
    files = [load_file(path) for path in saved.glob("*.safetensors")]
    assert sizes.stored == sum(num_bytes(file.values()) for file in files)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3", "gpt2"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_targets_sizes_are_those_of_one_that_is_there(config_of, kind, tied):
    sizes = target_sizes(meta_target(config_of(kind, tied=tied), "bfloat16"), CACHE)
    target = make_target(kind, tied=tied, dtype=torch.bfloat16)
    assert sizes.num_parameters == num_parameters(target.parameters())
    assert sizes.weights == num_bytes(target.parameters())


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_the_cache_is_that_of_a_decoder_that_has_written_to_it(config_of, kind):
    planned = target_sizes(meta_target(config_of(kind), "bfloat16"), CACHE).cache
    model = SlotModel(make_target(kind, dtype=torch.bfloat16))
    model.reserve(rows=CACHE.rows, slots=CACHE.slots)
    tokens = torch.zeros(2, 3, dtype=torch.long)
    model.forward(tokens, torch.arange(3).expand(2, 3), span=3)
    held = [store for layer in model.cache.layers for store in (layer.keys, layer.values)]
    assert planned == num_bytes(held)
    heads, layers, width, dtype_bytes = (4 if kind == "gpt2" else 2), 3, 8, 2
    assert planned == 2 * layers * CACHE.rows * heads * ROUNDED * width * dtype_bytes


@pytest.mark.parametrize(("name", "layers", "keeps"), [("student", 2, 0), ("eagle", 1, 1)])
def test_a_drafts_cache_has_its_own_layers_and_what_it_reads_of_the_target(
    config_of, name, layers, keeps
):
    meta = meta_target(config_of(), "bfloat16")
    cache = draft_sizes(RECIPES[name], meta, CACHE).cache
    keys_and_values = 2 * layers * CACHE.rows * 2 * ROUNDED * 8 * 2
    assert cache == keys_and_values + keeps * CACHE.rows * CACHE.slots * 32 * 2


@pytest.mark.slow
def test_the_default_recipes_have_the_shapes_of_drafts_of_the_default_target(tmp_path):
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    config.save_pretrained(tmp_path)
    names = ["student", "eagle", "medusa"]
    composed = compose(ROOT / "params.yaml", ROOT / "conf", recipes=names)
    recipes = convert(composed["drafts"], dict[str, RecipeConfig], "drafts")
    target = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    target.requires_grad_(requires_grad=False)
    meta = meta_target(tmp_path, "bfloat16")
    assert target_sizes(meta, CACHE).num_parameters == target.num_parameters() == 134_515_008
    for name in names:
        sizes = draft_sizes(recipes[name], meta, CACHE)
        draft, _ = built(recipes[name], target)
        trained = [p for p in draft.parameters() if p.requires_grad]
        assert sizes.num_trained == num_parameters(trained)
        assert sizes.num_parameters == num_parameters(draft.parameters())


def test_nothing_takes_memory_for_a_target_that_no_machine_holds(tmp_path):
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=16_384,
        intermediate_size=53_248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
    )
    config.save_pretrained(tmp_path)
    meta = meta_target(tmp_path, "bfloat16")
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert target_sizes(meta, CACHE).num_parameters == 405_853_388_800
    sizes = draft_sizes(RECIPES["eagle"], meta, CACHE)
    assert sizes.num_trained > 1e9


@pytest.mark.parametrize("name", ["student", "eagle"])
def test_a_mixture_of_experts_is_counted_like_any_other(tmp_path, name):
    config = make_mixture()
    config.save_pretrained(tmp_path)
    target = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    meta = meta_target(tmp_path, "bfloat16")
    sizes = target_sizes(meta, CACHE)
    assert sizes.weights == num_bytes(target.parameters())
    assert sizes.cache == 2 * 3 * CACHE.rows * 2 * ROUNDED * 8 * 2
    draft, _ = built(RECIPES[name], target.requires_grad_(requires_grad=False))
    planned = draft_sizes(RECIPES[name], meta, CACHE)
    assert planned.num_parameters == num_parameters(draft.parameters())


def write_config(folder, config):
    config.save_pretrained(folder)
    return folder


def test_a_recurrent_model_is_refused(tmp_path):
    folder = write_config(tmp_path, MambaConfig(num_hidden_layers=2, hidden_size=16))
    with pytest.raises(TargetError, match="cannot be rolled back"):
        meta_target(folder, "float32")


def test_a_config_of_no_language_model_is_refused(tmp_path):
    with pytest.raises(TargetError, match="causal language model"):
        meta_target(write_config(tmp_path, ViTConfig()), "float32")


def test_an_architecture_that_nobody_knows_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "zebra"}), encoding="utf-8")
    with pytest.raises(TargetError, match="zebra"):
        meta_target(tmp_path, "float32")


def test_a_dtype_that_is_not_stated_has_to_be_named(config_of):
    with pytest.raises(TargetError, match="--dtype"):
        meta_target(config_of(), "auto")


def test_a_target_that_can_have_no_feature_head_is_refused_by_name(config_of):
    meta = meta_target(config_of("gpt2"), "float32")
    with pytest.raises(DraftError, match="GPT2LMHeadModel"):
        draft_sizes(RECIPES["eagle"], meta, CACHE)


def test_a_draft_whose_layer_would_be_of_another_kind_is_refused(tmp_path):
    config = make_mixture()
    config.mlp_only_layers = [2]
    config.save_pretrained(tmp_path)
    meta = meta_target(tmp_path, "float32")
    with pytest.raises(DraftError, match="layers of Qwen3MoeForCausalLM: found no"):
        draft_sizes(RECIPES["eagle"], meta, CACHE)
