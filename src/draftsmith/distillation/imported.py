"""A draft that was trained elsewhere: kept as a copy, named by content, taken over for a target.

It is a whole causal language model, which drafts as it is, or an EAGLE-3 head, which becomes one of
ours. The recipe holds the digest of the files, so an edited copy is noticed and another checkpoint
is another recipe. Nothing is trained; what the draft is worth is for evaluation to say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith.artifacts import atomic_directory, digest_file, digest_json
from draftsmith.distillation.recipe import checkpoint_digest
from draftsmith.drafts.causal_lm import describe, identify_causal_lm
from draftsmith.drafts.checkpoint import Lineage, save_draft
from draftsmith.drafts.eagle import EagleHead
from draftsmith.drafts.eagle3_folder import StoredHead, head_files, is_head, read_stored
from draftsmith.drafts.eagle3_join import join_stored
from draftsmith.drafts.manifest import FILE_NAME, DraftManifest, write_manifest
from draftsmith.drafts.settings import CheckpointConfig
from draftsmith.errors import DraftError
from draftsmith.targets.checkpoint import is_checkpoint, needed_files
from draftsmith.targets.compatibility import require_same_rows, require_same_tokenizer
from draftsmith.targets.identity import TargetIdentity
from draftsmith.targets.loading import load_by_digest
from draftsmith.targets.resolved import TARGETS
from draftsmith.targets.snapshot import clone_file

IMPORTED = Path("models", "imported")


def import_checkpoint(
    source: Path, name: str, *, root: Path, target: TargetIdentity | None
) -> CheckpointConfig:
    """Copy a checkpoint below models/imported/ and describe it as a recipe.

    Args:
        source: Folder of a whole causal language model, or of an EAGLE-3 head, with safetensors.
        name: The recipe's name.
        root: The project's folder.
        target: The current target, where there is one: what is imported must fit.

    Raises:
        DraftError: It is no such checkpoint, does not fit the target, or changed while it was read.
        TargetError: The target that a head is to be held against is not where it was put.
        ArtifactError: The disk refused; an earlier copy is as it was.
    """
    _require_importable(source)
    if is_head(source):
        stored = read_stored(source)
        if target is not None:
            _joined(stored, target, root)
    else:
        identity = identify_causal_lm(source, "auto")
        if target is not None:
            _require_fit(identity, target, source)
    digest = files_digest(source)
    with atomic_directory(root / IMPORTED / name) as folder:
        _copy(source, folder)
        if files_digest(folder) != digest:
            raise DraftError(
                f"copying {source}",
                found="files that changed while they were read",
                expected="a checkpoint that nobody is writing",
                remedy="import it again when it is complete",
            )
    return CheckpointConfig("checkpoint", source=_origin(source, root), digest=digest)


def take_over(
    recipe: CheckpointConfig, target: TargetIdentity, directory: Path, *, root: Path = Path()
) -> DraftManifest:
    """Make the recipe's checkpoint the draft in `directory`, whose name is the recipe's.

    Args:
        recipe: What to take.
        target: The target that it is to draft for; it drafts in the target's dtype.
        directory: Replaced in one step.
        root: The project's folder.

    Raises:
        DraftError: The checkpoint is not where it was, is another one, or does not fit the target.
        TargetError: The target of a head is not where it was put.
        ArtifactError: The disk refused; `directory` is as it was.
    """
    source = _held(recipe, directory.name, root)
    training: dict[str, Any] = {"source": recipe.source, "files_digest": recipe.digest}
    if is_head(source):
        stored = read_stored(source)
        training["max_position_embeddings"] = stored.config.max_position_embeddings
        head, token_ids = _joined(stored, target, root)
        lineage = Lineage(
            recipe=directory.name,
            recipe_digest=checkpoint_digest(recipe),
            target_digest=target.digest,
            tokenizer_digest=target.tokenizer_digest,
            corpus_digest="",
            layers=head.feature_layers,
        )
        with atomic_directory(directory) as folder:
            return save_draft(folder, head, token_ids, lineage=lineage, training=training)
    identity = identify_causal_lm(source, target.dtype)
    _require_fit(identity, target, source)
    manifest = describe(
        identity,
        recipe=directory.name,
        recipe_digest=checkpoint_digest(recipe),
        target_digest=target.digest,
        training=training,
    )
    with atomic_directory(directory) as folder:
        _copy(source, folder)
        write_manifest(folder, manifest)
    return manifest


def files_digest(directory: Path) -> str:
    """Digest of the files that belong to a checkpoint, by relative name and content."""
    files = _files(directory)
    return digest_json({f.relative_to(directory).as_posix(): digest_file(f) for f in files})


def _files(directory: Path) -> list[Path]:
    return head_files(directory) if is_head(directory) else needed_files(directory)


def _copy(source: Path, folder: Path) -> None:
    for file in _files(source):
        copy = folder / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        clone_file(file, copy)


def _joined(
    stored: StoredHead, target: TargetIdentity, root: Path
) -> tuple[EagleHead, Tensor | None]:
    """A head beside its target, whose embedding and output rows it is held against."""
    live = load_by_digest(root / TARGETS, target.digest, device="cpu")
    return join_stored(stored, live.model)


def _origin(source: Path, root: Path) -> str:
    """The folder as a recipe names it: relative when it lies in the project."""
    place, base = source.resolve(), root.resolve()
    return place.relative_to(base).as_posix() if place.is_relative_to(base) else str(place)


def _held(recipe: CheckpointConfig, name: str, root: Path) -> Path:
    """Folder with the recipe's files: the imported copy, or where it came from."""
    found = []
    for folder in (root / IMPORTED / name, root / recipe.source):
        if not is_checkpoint(folder):
            found.append(f"no checkpoint in {folder}")
        elif files_digest(folder) == recipe.digest:
            return folder
        else:
            found.append(f"another checkpoint in {folder}")
    raise DraftError(
        f"taking over the checkpoint of recipe {name}",
        found=" and ".join(found),
        expected=f"the files with digest {recipe.digest}",
        remedy=f"run `draftsmith import-draft DIR --name {name}` on the checkpoint that is meant; "
        "it makes the copy and updates the recipe",
    )


def _require_importable(source: Path) -> None:
    found = None
    if (source / FILE_NAME).is_file():
        found = f"a draft of another project ({FILE_NAME}), which shares weights with its target"
    elif not is_checkpoint(source):
        found = "no folder with config.json and safetensors weights"
    if found is not None:
        raise DraftError(
            f"importing {source}",
            found=found,
            expected="a whole causal language model with its tokenizer, or an EAGLE-3 head",
            remedy="name the folder that its trainer wrote, weights as safetensors",
        )


def _require_fit(identity: TargetIdentity, target: TargetIdentity, source: Path) -> None:
    require_same_tokenizer(target, identity.tokenizer_digest)
    require_same_rows(identity.vocab_size, target.vocab_size, source)
