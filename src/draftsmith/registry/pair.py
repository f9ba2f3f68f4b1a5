"""What a pair is: a target identity, a draft identity, and the tags that describe a version.

Pure: knows no disk, no MLflow and no clock. A pair's digest covers the two models and nothing
else, so measuring again, or elsewhere, never makes another pair.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftsmith.artifacts import digest_json
from draftsmith.errors import RegistryError

SCHEMA = 1
QUARANTINE_TAG = "quarantined"
LIVE_DRIFT_TAG = "live_drift"
DAMAGED_TAG = "damaged"
CLEARED_TAG = "live_drift_cleared"
FILES_TAG = "files_digest"
EVIDENCE_TAG = "evidence_digest"
MODEL_TAG = "model_digest"  # of what MLflow executes: MLmodel, code, requirements
SOURCE_TAG = "target_source"
DTYPE_TAG = "target_dtype"
DECISION_TAG = "decision"
CORPUS_TAG = "evaluated_corpus_digest"
METRIC_TAGS = ("alpha", "tau", "speedup")
IDENTITY_TAGS = (
    "pair_digest",
    "target_digest",
    "draft_digest",
    "recipe",
    "recipe_digest",
    "corpus_digest",
)
RESERVED_TAGS = frozenset(
    {
        *(QUARANTINE_TAG, LIVE_DRIFT_TAG, CLEARED_TAG, DAMAGED_TAG, DECISION_TAG),
        *(FILES_TAG, EVIDENCE_TAG, MODEL_TAG, SOURCE_TAG),
    }
)


def pair_digest(target_digest: str, draft_digest: str) -> str:
    """The identity of a pair, from the identities of its two models."""
    return digest_json({"target": target_digest, "draft": draft_digest})


@dataclass(frozen=True)
class DraftIdentity:
    """Which draft a pair holds.

    Attributes:
        target_digest: The target that it was distilled from. A reused draft keeps it, so it may
            differ from the pair's own target.
        vocabulary_digest: Digest of the map to target token ids; None for the full vocabulary.
    """

    family: str
    recipe: str
    recipe_digest: str
    digest: str
    weights_digest: str
    vocabulary_digest: str | None
    target_digest: str
    corpus_digest: str

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DraftIdentity:
        """Take the identity out of a draft's manifest, or out of pair.json.

        Raises:
            KeyError: A field is missing.
        """
        return cls(**{field.name: data[field.name] for field in dataclasses.fields(cls)})


@dataclass(frozen=True)
class PairRecord:
    """The content of pair.json."""

    target: Mapping[str, Any]
    draft: DraftIdentity

    @property
    def target_digest(self) -> str:
        """Digest of the pair's target."""
        return str(self.target["digest"])

    @property
    def digest(self) -> str:
        """Digest of the pair."""
        return pair_digest(self.target_digest, self.draft.digest)

    def to_json(self) -> dict[str, Any]:
        """The record as plain values, with its digest spelled out."""
        return {
            "schema": SCHEMA,
            "pair_digest": self.digest,
            "target": dict(self.target),
            "draft": dataclasses.asdict(self.draft),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, path: str = "pair.json") -> PairRecord:
        """Read a record and verify the digest that it states.

        Raises:
            RegistryError: A field is missing, or the digest is not that of the content.
        """
        try:
            draft = DraftIdentity.from_json(data["draft"])
            record = cls(target=dict(data["target"]), draft=draft)
            stated, actual = data["pair_digest"], record.digest
        except (KeyError, TypeError) as error:
            raise RegistryError(
                f"reading {path}",
                found=f"no usable field {error}",
                expected="the target's and the draft's identity",
                remedy="fetch the pair again from the registry",
            ) from error
        if stated != actual:
            raise RegistryError(
                f"reading {path}",
                found=f"content with digest {actual}",
                expected=f"the stated pair digest {stated}",
                remedy="fetch the pair again from the registry; the file was edited or mixed up",
            )
        return record

    def tags(self) -> dict[str, str]:
        """The tags that identify the pair among the versions of a registered model."""
        return {
            "pair_digest": self.digest,
            "target_digest": self.target_digest,
            "draft_digest": self.draft.digest,
            "recipe": self.draft.recipe,
            "recipe_digest": self.draft.recipe_digest,
            "corpus_digest": self.draft.corpus_digest,
            DTYPE_TAG: str(self.target["dtype"]),
        }


@dataclass(frozen=True)
class RegisteredPair:
    """A pair as the registry knows it; what stages exchange.

    Attributes:
        live_drift: Its draft's traffic raised an alarm, with this target or another.
    """

    name: str
    version: str
    pair_digest: str
    target_digest: str
    draft_digest: str
    recipe: str
    recipe_digest: str
    corpus_digest: str
    live_drift: bool

    @classmethod
    def from_tags(cls, name: str, version: str, tags: Mapping[str, str]) -> RegisteredPair:
        """The pair that a version's tags describe.

        Raises:
            RegistryError: The version lacks a tag, so it is not a pair.
        """
        missing = [tag for tag in IDENTITY_TAGS if tag not in tags]
        if missing:
            raise RegistryError(
                f"reading version {version} of {name}",
                found=f"no tag {missing[0]}",
                expected="a version registered by draftsmith",
                remedy="point registry.name at a model that holds pairs only",
            )
        identity = {tag: tags[tag] for tag in IDENTITY_TAGS}
        return cls(name=name, version=str(version), live_drift=LIVE_DRIFT_TAG in tags, **identity)


@dataclass(frozen=True)
class PairVersion:
    """A registered pair with everything that the registry says about it.

    Attributes:
        quarantine: Why the version must not be promoted again; None when it may.
        created_utc: ISO time of registration.
        damage: What was found when its files were not those that were registered; None when that
            never happened, or they came back.
    """

    pair: RegisteredPair
    aliases: tuple[str, ...]
    tags: Mapping[str, str]
    created_utc: str
    quarantine: str | None
    damage: str | None = None

    @property
    def state(self) -> str:
        """What keeps the version from serving, in a few words; `ok` when nothing does."""
        if self.damage is not None:
            return f"damaged: {self.damage}"
        if self.quarantine is not None:
            return f"quarantine: {self.quarantine}"
        return "live drift" if self.pair.live_drift else "ok"


def evidence_tags(
    evaluation: Mapping[str, Any],
    benchmark: Mapping[str, Any],
    *,
    device: str,
    drift: str,
    corpus_digest: str,
) -> dict[str, str]:
    """Headline figures of a pair as tags.

    Args:
        evaluation: The pair's own record of the evaluation.
        benchmark: The pair's own record of the benchmark; its temperature is the headline one.
        device: Name of the device that the speed was measured on.
        drift: Verdict of the drift stage.
        corpus_digest: The corpus that the pair was evaluated on; a reused draft was distilled from
            another one.

    Returns:
        Tags `alpha`, `tau`, `speedup`, `speedup_low`, `speedup_high`, `temperature`,
        `draft_length`, `device`, `drift`, `evaluated_corpus_digest`.
    """
    temperature = str(float(benchmark.get("temperature", 0.0)))
    speedup = benchmark["speedup"]
    return {
        "alpha": _figure(evaluation["alpha"][temperature]["mean"]),
        "tau": _figure(evaluation["tau"][temperature]["mean"]),
        "speedup": _figure(speedup["mean"]),
        **{f"speedup_{bound}": _figure(speedup[bound]) for bound in ("low", "high")},
        "temperature": temperature,
        "draft_length": str(benchmark["draft_length"]),
        "device": device,
        "drift": drift,
        CORPUS_TAG: corpus_digest,
    }


def _figure(value: float) -> str:
    return f"{value:.4f}"
