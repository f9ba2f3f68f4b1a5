"""A whole causal language model as a draft: any checkpoint with its target's tokenizer and rows.

Its digest is the identity of the checkpoint in the dtype that it drafts in, so an imported copy and
the folder that it came from are one draft. Knows nothing of how it was trained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from draftsmith.drafts.manifest import CAUSAL_LM, SCHEMA, DraftManifest
from draftsmith.errors import DraftError, TargetError
from draftsmith.targets.compatibility import refuse_unservable, require_same_rows
from draftsmith.targets.components import load_config, load_model
from draftsmith.targets.identity import TargetIdentity, identify


def identify_causal_lm(directory: Path, dtype: str) -> TargetIdentity:
    """Identity of a checkpoint that is to draft; hashes all of its files.

    Args:
        directory: A Transformers checkpoint.
        dtype: That it drafts in, or "auto".

    Raises:
        DraftError: It is damaged, incomplete, or of a kind that cannot be decoded with.
    """
    with _as_draft():
        refuse_unservable(load_config(directory), directory)
        return identify(directory, dtype)


def describe(
    identity: TargetIdentity,
    *,
    recipe: str,
    recipe_digest: str = "",
    target_digest: str = "",
    training: dict[str, Any] | None = None,
) -> DraftManifest:
    """What is known of a checkpoint that draftsmith did not train.

    Args:
        identity: What it is.
        recipe: Name of the recipe, or of its folder.
        recipe_digest: Of the recipe; empty when there is none.
        target_digest: The target that it is paired with; empty when it is only measured.
        training: Where it came from.
    """
    return DraftManifest(
        schema=SCHEMA,
        family=CAUSAL_LM,
        recipe=recipe,
        recipe_digest=recipe_digest,
        digest=identity.digest,
        weights_digest=identity.weights_digest,
        vocabulary_digest=None,
        target_digest=target_digest,
        tokenizer_digest=identity.tokenizer_digest,
        corpus_digest="",
        architecture={
            "model_type": identity.model_type,
            "num_layers": identity.num_layers,
            "num_parameters": identity.num_parameters,
            "dtype": identity.dtype,
        },
        training=training or {},
    )


def load_causal_lm(directory: Path, target: PreTrainedModel) -> PreTrainedModel:
    """The model in its target's dtype and on its device.

    Raises:
        DraftError: It is damaged.
        DraftMisfitError: It has other output rows than the target.
    """
    dtype = str(target.dtype).removeprefix("torch.")
    with _as_draft():
        model = load_model(directory, dtype=dtype, device=str(target.device))
    rows, wanted = (len(m.get_output_embeddings().weight) for m in (model, target))
    require_same_rows(rows, wanted, directory)
    return model


def verify_causal_lm(directory: Path, manifest: DraftManifest) -> None:
    """Check that the files are those that the manifest describes.

    Raises:
        DraftError: They are not, or are damaged.
    """
    found = identify_causal_lm(directory, str(manifest.architecture["dtype"]))
    if found.digest != manifest.digest:
        raise DraftError(
            f"reading the draft in {directory}",
            found=f"a checkpoint with digest {found.digest}",
            expected=f"the one that its manifest describes, {manifest.digest}",
            remedy="fetch the draft again from the registry, or rerun `dvc repro`",
        )


@contextlib.contextmanager
def _as_draft() -> Iterator[None]:
    """Errors about a checkpoint speak of a target; here it is a draft."""
    try:
        yield
    except TargetError as error:
        raise DraftError(
            error.what.replace("the target", "the draft"),
            found=error.found,
            expected=error.expected,
            remedy="use a whole checkpoint that can be decoded with: config.json, tokenizer and "
            "safetensors weights, as `save_pretrained` writes them",
        ) from error
