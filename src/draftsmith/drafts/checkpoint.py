"""A draft on disk.

A student, or heads on the target's states: `draft.json`, `config.json`, `model.safetensors` (only
its own weights) and, if trimmed, `vocabulary.safetensors`. Embedding and output rows come from the
target at load time, so it can only be loaded beside a target. A whole model: `draft.json` in its
checkpoint. Digests are verified.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from draftsmith.artifacts import atomic_directory, digest_file, digest_json, read_json, writing
from draftsmith.drafts.causal_lm import load_causal_lm, verify_causal_lm
from draftsmith.drafts.eagle_start import empty_head
from draftsmith.drafts.joined import LoadedDraft, family_of
from draftsmith.drafts.manifest import (
    CAUSAL_LM,
    EAGLE,
    FILE_NAME,
    MEDUSA,
    SCHEMA,
    DraftManifest,
    draft_digest,
    read_manifest,
    write_manifest,
)
from draftsmith.drafts.medusa import HeadShape, MedusaHeads, empty_heads
from draftsmith.drafts.student import empty_student, own_parameter_names
from draftsmith.drafts.vocabulary import vocabulary_digest
from draftsmith.errors import DraftError, DraftMisfitError

WEIGHTS = "model.safetensors"
VOCABULARY = "vocabulary.safetensors"


@dataclass(frozen=True)
class Lineage:
    """Where a draft comes from; goes into its manifest.

    `layers` are the target's that a student starts as, or whose features a head reads; Medusa heads
    are about none.
    """

    recipe: str
    recipe_digest: str
    target_digest: str
    tokenizer_digest: str
    corpus_digest: str
    layers: tuple[int, ...]


def save_draft(
    directory: Path,
    student: PreTrainedModel,
    token_ids: Tensor | None,
    *,
    lineage: Lineage,
    training: dict[str, Any],
) -> DraftManifest:
    """Write a student or heads into `directory` (existing, empty) and return the manifest.

    Raises:
        ArtifactError: The disk refused.
    """
    state = student.state_dict()
    dtype = student.get_input_embeddings().weight.dtype
    own = {name: state[name].to(dtype).contiguous() for name in own_parameter_names(student)}
    with writing(directory):
        save_file(own, directory / WEIGHTS)
        student.config.save_pretrained(directory)
        if token_ids is not None:
            save_file({"token_ids": token_ids.to(torch.int64).cpu()}, directory / VOCABULARY)
    map_digest = None if token_ids is None else vocabulary_digest(token_ids)
    weights_digest = digest_file(directory / WEIGHTS)
    architecture = {
        "layers": list(lineage.layers),
        "vocabulary_entries": None if token_ids is None else len(token_ids),
        "dtype": str(dtype).removeprefix("torch."),
        "num_trained_parameters": sum(tensor.numel() for tensor in own.values()),
        "model_type": student.config.model_type,
        "config_digest": _config_digest(directory),
    }
    if isinstance(student, MedusaHeads):
        architecture["heads"] = asdict(student.shape)
    manifest = DraftManifest(
        schema=SCHEMA,
        family=family_of(student),
        recipe=lineage.recipe,
        recipe_digest=lineage.recipe_digest,
        digest=draft_digest(weights_digest, map_digest, architecture),
        weights_digest=weights_digest,
        vocabulary_digest=map_digest,
        target_digest=lineage.target_digest,
        tokenizer_digest=lineage.tokenizer_digest,
        corpus_digest=lineage.corpus_digest,
        architecture=architecture,
        training=training,
    )
    write_manifest(directory, manifest)
    return manifest


def load_draft(
    directory: Path, target: PreTrainedModel, *, target_digest: str | None
) -> LoadedDraft:
    """Load a draft and join it to `target`.

    Args:
        directory: A draft with its manifest.
        target: Live target.
        target_digest: Digest of `target`; None skips the comparison with the manifest (drift tests
            put a draft on another target).

    Raises:
        DraftError: The draft belongs to another target, is damaged, or does not fit the target.
    """
    manifest = read_manifest(directory)
    if target_digest is not None and manifest.target_digest != target_digest:
        raise DraftError(
            f"loading the draft in {directory}",
            found=f"target {target_digest}",
            expected=f"target {manifest.target_digest}, which it was made for",
            remedy="load the matching target, or distil a draft for this one with `dvc repro`",
        )
    if manifest.family == CAUSAL_LM:
        verify_causal_lm(directory, manifest)
        return LoadedDraft(load_causal_lm(directory, target), None, manifest)
    return _load_parts(directory, target, manifest)


def _load_parts(directory: Path, target: PreTrainedModel, manifest: DraftManifest) -> LoadedDraft:
    state, token_ids = _verified(directory, manifest)
    vocab_size = target.get_output_embeddings().weight.shape[0]
    if token_ids is not None and int(token_ids.max()) >= vocab_size:
        raise _misfit(directory, "a vocabulary map that reaches past the target's vocabulary")
    config = AutoConfig.from_pretrained(directory)
    if config.hidden_size != target.config.get_text_config().hidden_size:
        raise _misfit(directory, f"hidden size {config.hidden_size}")
    model = _empty(directory, config, target, token_ids, manifest)
    ours = model.state_dict()
    own = {name: ours[name].shape for name in own_parameter_names(model)}
    strange = own.items() ^ {name: tensor.shape for name, tensor in state.items()}.items()
    if strange:
        names = sorted({name for name, _ in strange})
        raise _misfit(directory, f"weights that differ by {names[:3]}")
    model.load_state_dict(state, strict=False)
    token_ids = None if token_ids is None else token_ids.to(target.device)
    return LoadedDraft(model, token_ids, manifest)


def _empty(
    directory: Path,
    config: Any,  # noqa: ANN401  Transformers configurations share no useful type
    target: PreTrainedModel,
    token_ids: Tensor | None,
    manifest: DraftManifest,
) -> PreTrainedModel:
    """A draft of the manifest's family without its weights."""
    if manifest.family == MEDUSA:
        shape = HeadShape(**manifest.architecture["heads"])
        return empty_heads(config, target, token_ids, shape)
    if manifest.family != EAGLE:
        return empty_student(config, target, token_ids)
    layers = [int(layer) for layer in manifest.architecture["layers"]]
    num_layers = int(target.config.get_text_config().num_hidden_layers)
    if max(layers) >= num_layers:
        raise _misfit(directory, f"features of layers {layers} for a target of {num_layers}")
    return empty_head(config, target, token_ids, layers)


def _verified(directory: Path, manifest: DraftManifest) -> tuple[dict[str, Tensor], Tensor | None]:
    """Weights and vocabulary map; they and config.json have the manifest's digests."""
    if _config_digest(directory) != manifest.architecture.get("config_digest"):
        raise _damaged(directory / "config.json", "another configuration")
    if digest_file(directory / WEIGHTS) != manifest.weights_digest:
        raise _damaged(directory / WEIGHTS, "other bytes than the manifest's digest says")
    state = _read_tensors(directory / WEIGHTS)
    if manifest.vocabulary_digest is None:
        return state, None
    token_ids = _read_tensors(directory / VOCABULARY).get("token_ids")
    if token_ids is None or vocabulary_digest(token_ids) != manifest.vocabulary_digest:
        raise _damaged(directory / VOCABULARY, "another vocabulary map")
    return state, token_ids


def _config_digest(directory: Path) -> str:
    """Digest of config.json, the version of Transformers that wrote it left out."""
    config = read_json(directory / "config.json")
    return digest_json({key: config[key] for key in config if key != "transformers_version"})


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, found: str) -> DraftError:
    return DraftError(
        f"reading {path}",
        found=found,
        expected=f"the file that {FILE_NAME} describes",
        remedy="fetch the draft again from the registry, or rerun `dvc repro`",
    )


def _misfit(directory: Path, found: str) -> DraftMisfitError:
    return DraftMisfitError(
        f"joining the draft in {directory} to its target",
        found=found,
        expected="the target that it was distilled from, or one of the same shape",
        remedy="distil a draft for this target with `dvc repro`",
    )


def copy_draft(source: Path, directory: Path) -> DraftManifest:
    """Copy a draft byte for byte, verified; `directory` is replaced.

    Raises:
        DraftError: The source is damaged.
    """
    manifest = read_manifest(source)
    if manifest.family == CAUSAL_LM:
        verify_causal_lm(source, manifest)
    else:
        _verified(source, manifest)
    with atomic_directory(directory) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
    return manifest
