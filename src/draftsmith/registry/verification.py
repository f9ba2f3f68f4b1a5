"""Is a registered pair still what was registered, and still lossless?"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from draftsmith.errors import DamagedPairError
from draftsmith.registry.loading import load_directory
from draftsmith.registry.mlflow_store import PairStore
from draftsmith.registry.pair import RegisteredPair

_PROMPTS = ("Why is the sky blue?", "Name three rivers.", "Write two lines about rain.")
_NUM_TOKENS = 20


def verify(
    store: PairStore, reference: str, *, root: Path, target: str | None = None, device: str = "cpu"
) -> dict[str, Any]:
    """Download a version afresh, hash it, load it and decode a few tokens with and without drafts.

    In float32, where both must agree token for token. The version is marked as damaged when its
    files are not those that were registered, and the mark goes when they are again.

    Args:
        store: The registry.
        reference: `@alias` or a version number.
        root: The project's folder, with snapshots of targets.
        target: Folder of the target's checkpoint, when it is not where the registry says.
        device: Where both models go, in torch's words.

    Returns:
        `version`, `pair_digest`, `quarantine`, `model_checked` (whether the digest of MLmodel and
        code was recorded, too), `num_prompts`, `num_identical`, `num_tokens` and `holds`.

    Raises:
        DamagedPairError: The files differ from those that were registered.
        DraftError: The draft is damaged.
        TargetError: The target cannot be found, or is another one.
    """
    found = store.resolve(reference)
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder:
        fetched, model_checked = _hashed(store, found.pair, Path(folder))
        pair = load_directory(fetched, root=root, target=target, device=device, dtype="float32")
        plain, speculative = (
            [
                pair.generate(prompt, max_new_tokens=_NUM_TOKENS, draft_length=length).token_ids
                for prompt in _PROMPTS
            ]
            for length in (0, None if pair.draft_length else 1)  # None is as it is served
        )
    identical = sum(a == b for a, b in zip(plain, speculative, strict=True))
    return {
        "version": found.pair.version,
        "pair_digest": found.pair.pair_digest,
        "quarantine": found.quarantine,
        "model_checked": model_checked,
        "num_prompts": len(_PROMPTS),
        "num_identical": identical,
        "num_tokens": sum(map(len, plain)),
        "holds": identical == len(_PROMPTS),
    }


def _hashed(store: PairStore, pair: RegisteredPair, folder: Path) -> tuple[Path, bool]:
    """The files of a pair, and whether MLmodel and code could be checked; damage is marked."""
    try:
        found = store.fetch(pair, folder), store.check_model(pair)
    except DamagedPairError as error:
        store.set_damage(pair.version, error.found)
        raise
    store.set_damage(pair.version, None)
    return found
