"""Matching weights with an architecture costs no reading and needs Transformers alone."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from draftsmith.artifacts import read_json, write_json
from draftsmith.errors import TargetError
from draftsmith.targets.components import load_model
from draftsmith.targets.identity import identify

SRC = Path(__file__).resolve().parents[2] / "src"
WITHOUT_ACCELERATE = """
import dataclasses, json, sys
from pathlib import Path

sys.modules["accelerate"] = None  # importing it fails

from draftsmith.errors import TargetError
from draftsmith.targets.loading import load_target

target = load_target(Path(sys.argv[1]), dtype="auto")
refused = []
for folder in sys.argv[2:]:
    try:
        load_target(Path(folder), dtype="auto")
    except TargetError as error:
        refused.append(str(error))
json.dump([dataclasses.asdict(target.identity), str(target.model.dtype), refused], sys.stdout)
"""


def rewrite(checkpoint, change):
    """Save the checkpoint's tensors again after `change`."""
    path = checkpoint / "model.safetensors"
    tensors = change(load_file(path))
    save_file(tensors, path, metadata={"format": "pt"})


def drop(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def tie(checkpoint):
    config = read_json(checkpoint / "config.json")
    write_json(checkpoint / "config.json", {**config, "tie_word_embeddings": True})


def test_a_target_is_identified_checked_and_loaded_without_accelerate(checkpoint, tmp_path):
    gap = shutil.copytree(checkpoint, tmp_path / "gap")
    rewrite(gap, drop("model.norm.weight"))
    misshapen = shutil.copytree(checkpoint, tmp_path / "misshapen")
    config = read_json(misshapen / "config.json")
    write_json(misshapen / "config.json", {**config, "intermediate_size": 64})
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ACCELERATE, checkpoint, gap, misshapen],
        env={**os.environ, "PYTHONPATH": str(SRC), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    identity, dtype, refused = json.loads(done.stdout)
    assert identity == dataclasses.asdict(identify(checkpoint, "auto"))
    assert dtype == "torch.bfloat16"
    assert "model.norm.weight" in refused[0]
    assert "mlp" in refused[1]


def test_without_a_dtype_the_weights_are_those_of_the_files(checkpoint):
    config = read_json(checkpoint / "config.json")
    write_json(checkpoint / "config.json", {**config, "dtype": "float32"})
    model = load_model(checkpoint, dtype=None)
    stored = load_file(checkpoint / "model.safetensors")
    state = model.state_dict()
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert all(torch.equal(state[name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("is_stored_twice", [False, True])
def test_tied_weights_are_counted_once(checkpoint, is_stored_twice):
    untied = identify(checkpoint, "auto").num_parameters
    tie(checkpoint)

    def share(tensors):
        shared = tensors["model.embed_tokens.weight"].clone()
        return {**tensors, "lm_head.weight": shared}

    rewrite(checkpoint, share if is_stored_twice else drop("lm_head.weight"))
    assert identify(checkpoint, "auto").num_parameters == untied - 272 * 32


def test_tied_weights_must_be_there_once(checkpoint):
    tie(checkpoint)
    rewrite(checkpoint, drop("lm_head.weight"))
    rewrite(checkpoint, drop("model.embed_tokens.weight"))
    with pytest.raises(TargetError, match="embed_tokens|lm_head"):
        identify(checkpoint, "auto")


def test_a_checkpoint_of_the_model_without_its_head_class_is_matched(checkpoint):
    tie(checkpoint)
    rewrite(checkpoint, drop("lm_head.weight"))
    expected = LlamaForCausalLM.from_pretrained(checkpoint).num_parameters()
    rewrite(
        checkpoint,
        lambda tensors: {name.removeprefix("model."): tensors[name] for name in tensors},
    )
    assert identify(checkpoint, "auto").num_parameters == expected
