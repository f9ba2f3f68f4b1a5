"""The identity follows content: each component moves with its own part and with no other."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaForCausalLM

from draftsmith.artifacts import digest_json, read_json, write_json
from draftsmith.errors import ArtifactError, TargetError
from draftsmith.targets.identity import (
    COMPONENTS,
    changed,
    identify,
    read_identity,
    tokenizer_digest,
    with_dtype,
)


def edit_json(path, **changes):
    write_json(path, {**read_json(path), **changes})


def test_moved_checkpoint_keeps_its_digest(checkpoint, tmp_path):
    before = identify(checkpoint, "auto")
    moved = shutil.move(checkpoint, tmp_path / "elsewhere")
    assert identify(moved, "auto") == before


def test_facts_are_those_of_the_model_and_its_tokenizer(checkpoint):
    identity = identify(checkpoint, "auto")
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    assert identity.num_parameters == sum(p.numel() for p in model.parameters())
    assert (identity.vocab_size, identity.tokenizer_size) == (272, 260)
    assert (identity.max_positions, identity.num_layers) == (128, 2)
    assert (identity.model_type, identity.dtype, identity.schema) == ("llama", "bfloat16", 1)


def test_digest_is_that_of_the_components_alone(checkpoint):
    identity = identify(checkpoint, "auto")
    parts = {
        name: getattr(identity, name if name == "dtype" else f"{name}_digest")
        for name in COMPONENTS
    }
    assert identity.digest == digest_json(parts)


def test_weights_change_changes_weights_only(checkpoint):
    before = identify(checkpoint, "auto")
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    after = identify(checkpoint, "auto")
    assert changed(before, after) == ["weights"]
    assert after.digest != before.digest


def test_config_change_changes_config_only(checkpoint):
    before = identify(checkpoint, "auto")
    edit_json(checkpoint / "config.json", rms_norm_eps=1e-3)
    assert changed(before, identify(checkpoint, "auto")) == ["config"]


def test_template_change_changes_the_template_only(checkpoint):
    before = identify(checkpoint, "auto")
    path = checkpoint / "chat_template.jinja"
    path.write_text("Be brief. " + path.read_text())
    assert changed(before, identify(checkpoint, "auto")) == ["chat_template"]


def test_added_token_changes_the_tokenizer_only(checkpoint):
    before = identify(checkpoint, "auto")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(checkpoint)
    after = identify(checkpoint, "auto")
    assert changed(before, after) == ["tokenizer"]
    assert after.tokenizer_size == before.tokenizer_size + 1


def test_another_end_token_changes_the_tokenizer_only(checkpoint):
    before = identify(checkpoint, "auto")
    edit_json(checkpoint / "tokenizer_config.json", eos_token="<|none|>")
    assert changed(before, identify(checkpoint, "auto")) == ["tokenizer"]


def test_generation_config_change_changes_it_only(checkpoint):
    before = identify(checkpoint, "auto")
    edit_json(checkpoint / "generation_config.json", eos_token_id=[2, 0])
    assert changed(before, identify(checkpoint, "auto")) == ["generation_config"]


def test_absent_generation_config_and_template_are_none(checkpoint):
    (checkpoint / "generation_config.json").unlink()
    (checkpoint / "chat_template.jinja").unlink()
    identity = identify(checkpoint, "auto")
    assert identity.generation_config_digest is None
    assert identity.chat_template_digest is None


def test_dtype_is_a_component_of_its_own(checkpoint):
    served, wide = identify(checkpoint, "auto"), identify(checkpoint, "float32")
    assert changed(served, wide) == ["dtype"]
    assert with_dtype(wide, "bfloat16") == served


def test_auto_dtype_is_read_from_the_weights_when_the_config_states_none(checkpoint):
    before = identify(checkpoint, "auto")
    config = read_json(checkpoint / "config.json")
    del config["dtype"]
    write_json(checkpoint / "config.json", config)
    assert identify(checkpoint, "auto") == before


def test_volatile_keys_and_layout_of_json_do_not_matter(checkpoint):
    before = identify(checkpoint, "auto")
    path = checkpoint / "config.json"
    config = {**json.loads(path.read_text()), "_name_or_path": "/old", "transformers_version": "9"}
    path.write_text(json.dumps(dict(reversed(config.items()))))
    assert identify(checkpoint, "auto") == before


def test_unrelated_files_do_not_matter(checkpoint):
    before = identify(checkpoint, "auto")
    (checkpoint / "optimizer.pt").write_bytes(b"state")
    (checkpoint / "README.md").write_text("notes")
    assert identify(checkpoint, "auto") == before


def test_padding_and_truncation_in_use_do_not_change_the_tokenizer(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    before = tokenizer_digest(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding()
    tokenizer.pad_token = None
    assert tokenizer_digest(tokenizer) == before


def test_every_shard_and_the_index_belong_to_the_weights(checkpoint):
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    model.save_pretrained(checkpoint, max_shard_size="20KB")
    shards = sorted(checkpoint.glob("model-*.safetensors"))
    assert len(shards) > 1
    before = identify(checkpoint, "auto")
    tensors = load_file(shards[-1])
    name = sorted(tensors)[0]
    tensors[name] = tensors[name] + 1
    save_file(tensors, shards[-1], metadata={"format": "pt"})
    middle = identify(checkpoint, "auto")
    assert changed(before, middle) == ["weights"]
    shards[0].unlink()
    with pytest.raises(TargetError, match=shards[0].name):
        identify(checkpoint, "auto")


@pytest.mark.parametrize("damage", ["truncate", "garbage", "empty"])
def test_damaged_weights_are_refused_by_file_name(checkpoint, damage):
    path = checkpoint / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(
        {"truncate": whole[: len(whole) // 2], "garbage": b"\xff" * 4096, "empty": b""}[damage]
    )
    with pytest.raises(TargetError, match="model.safetensors"):
        identify(checkpoint, "auto")


def test_damaged_tokenizer_is_refused_by_directory(checkpoint):
    (checkpoint / "tokenizer.json").write_text("{")
    with pytest.raises(TargetError, match="tokenizer"):
        identify(checkpoint, "auto")


def test_record_survives_writing_and_reading(checkpoint, tmp_path):
    identity = identify(checkpoint, "auto")
    write_json(tmp_path / "target.json", identity)
    assert read_identity(tmp_path / "target.json") == identity


def test_edited_or_foreign_record_is_refused(checkpoint, tmp_path):
    identity = dataclasses.asdict(identify(checkpoint, "auto"))
    path = tmp_path / "target.json"
    write_json(path, {**identity, "weights_digest": "0" * 64})
    with pytest.raises(ArtifactError, match="digest"):
        read_identity(path)
    write_json(path, {**identity, "place": "/somewhere"})
    with pytest.raises(ArtifactError, match="place"):
        read_identity(path)


def test_identifying_touches_no_global_seed(checkpoint):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    identify(checkpoint, "auto")
    assert torch.equal(torch.rand(1), expected)


def test_missing_tensor_is_refused_by_name(checkpoint):
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"model\.norm\.weight"):
        identify(checkpoint, "auto")
