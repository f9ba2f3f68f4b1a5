"""An imported draft is registered, loaded and lossless like one of our own."""

from __future__ import annotations

import dataclasses

from draftsmith.artifacts import read_json
from draftsmith.distillation.imported import import_checkpoint, take_over
from draftsmith.registry.loading import load_pair
from draftsmith.registry.pair import DraftIdentity, PairRecord
from draftsmith.registry.verification import verify
from draftsmith.targets.identity import identify
from tests.registry.small_pairs import TAGS
from tests.registry.tiny_models import save_target


def test_it_is_registered_loaded_and_decodes_as_the_target_alone(root, store):
    target = identify(save_target(root / "target"), "float32")
    source = save_target(root / "elsewhere", seed=1)
    recipe = import_checkpoint(source, "sibling", root=root, target=target)
    take_over(recipe, target, root / "drafts" / "sibling", root=root)
    manifest = read_json(root / "drafts" / "sibling" / "draft.json")
    record = PairRecord(dataclasses.asdict(target), DraftIdentity.from_json(manifest))
    version = store.register(
        record,
        root / "drafts" / "sibling",
        evidence={},
        tags=TAGS,
        target_source=str(root / "target"),
    )
    assert store.resolve(version).pair.recipe == "sibling"
    pair = load_pair(f"models:/demo/{version}", root=root)
    plain, drafted = (
        pair.generate("hello", max_new_tokens=12, draft_length=length) for length in (0, 3)
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.num_drafted > 0
    assert verify(store, version, root=root)["holds"]
