"""Every error a user can cause: what went wrong, what was found, what was expected, what to do.

Knows nothing of the rest of the package. Programming errors stay plain Python exceptions.
"""

from __future__ import annotations


class DraftsmithError(Exception):
    """A failure whose cause is outside the code: input, configuration, environment.

    Args:
        what: One clause that says which operation failed, with the path or name it concerned.
        found: What was there.
        expected: What would have been accepted.
        remedy: The next action that mends it.
    """

    def __init__(self, what: str, *, found: str, expected: str, remedy: str) -> None:
        self.what = what
        self.found = found
        self.expected = expected
        self.remedy = remedy
        super().__init__(f"{what}: found {found}; expected {expected}. To mend it: {remedy}")


class ConfigError(DraftsmithError):
    """A key or value of params.yaml or conf/ is wrong."""


class ArtifactError(DraftsmithError):
    """A file that a stage reads or writes is missing, damaged or could not be written."""


class TargetError(DraftsmithError):
    """The target cannot be resolved, loaded or matched."""


class DraftError(DraftsmithError):
    """The draft cannot be built, loaded or matched with its target."""


class DraftMisfitError(DraftError):
    """The draft is sound, but of another shape than the target that it is to be joined to."""


class CorpusError(DraftsmithError):
    """Prompts or rollouts are unusable."""


class DecodingError(DraftsmithError):
    """A request or a model cannot be decoded as asked."""


class EvidenceError(DraftsmithError):
    """A measurement is missing or belongs to another pair."""


class RegistryError(DraftsmithError):
    """The registry refuses, or cannot be reached."""


class DamagedPairError(RegistryError):
    """The files of a registered version are no longer those that were registered."""


class PromotionRefusedError(RegistryError):
    """A version must not become champion as things stand."""
