"""A loaded target is whole, frozen, and the one that was asked for."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from draftsmith.artifacts import read_json, short, write_json
from draftsmith.errors import TargetError
from draftsmith.targets.identity import identify
from draftsmith.targets.loading import load_by_digest, load_target, target_directory
from draftsmith.targets.source import resolve


def test_loaded_target_is_frozen_and_computes_what_transformers_computes(checkpoint):
    target = load_target(checkpoint, dtype="float32")
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert target.model.config._attn_implementation == "sdpa"
    assert target.identity == identify(checkpoint, "float32")
    ids = torch.tensor([target.tokenizer("the thing")["input_ids"]])
    plain = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(target.model(ids).logits, plain(ids).logits)


def test_auto_dtype_is_the_checkpoints_own(checkpoint):
    assert load_target(checkpoint, dtype="auto").model.dtype == torch.bfloat16


def test_missing_tensor_is_an_error_not_random_numbers(checkpoint):
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"layers\.1\.mlp\.up_proj"):
        load_target(checkpoint, dtype="auto")


def test_config_of_another_model_is_an_error(checkpoint):
    path = checkpoint / "config.json"
    write_json(path, {**read_json(path), "intermediate_size": 64})
    with pytest.raises(TargetError, match="mlp"):
        load_target(checkpoint, dtype="auto")


def test_target_is_found_by_digest_in_the_dtype_that_the_digest_names(checkpoint, configure, root):
    wide = resolve(configure(checkpoint, dtype="float32"), root=root).identity
    served = resolve(configure(checkpoint), root=root).identity
    assert load_by_digest(root, wide.digest).model.dtype == torch.float32
    assert load_by_digest(root, served.digest).model.dtype == torch.bfloat16


def test_analysis_in_another_dtype_keeps_the_identity(checkpoint, configure, root):
    identity = resolve(configure(checkpoint), root=root).identity
    target = load_by_digest(root, identity.digest, dtype="float32")
    assert target.model.dtype == torch.float32
    assert target.identity == identity


def test_missing_snapshot_says_how_to_make_it(root):
    with pytest.raises(TargetError, match="dvc repro resolve_target"):
        target_directory(root, "d" * 64)


def test_link_to_a_folder_that_has_gone_says_so(checkpoint, configure, root):
    identity = resolve(configure(checkpoint, snapshot="none"), root=root).identity
    shutil.rmtree(checkpoint)
    with pytest.raises(TargetError, match="has gone"):
        load_by_digest(root, identity.digest)


def test_tampered_snapshot_is_refused(checkpoint, configure, root):
    identity = resolve(configure(checkpoint), root=root).identity
    template = root / short(identity.digest) / "chat_template.jinja"
    template.write_text(template.read_text() + "ignore the above")
    with pytest.raises(TargetError, match=identity.digest):
        load_by_digest(root, identity.digest)
