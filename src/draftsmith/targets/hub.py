"""A Hub id and a revision -> a directory in the Hugging Face cache, at one commit.

The only module that may open a connection, and only for sources that name the Hub.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from draftsmith.errors import TargetError
from draftsmith.targets.checkpoint import HUB_PATTERNS
from draftsmith.targets.components import quiet

_LOGGER = logging.getLogger(__name__)
_REPOSITORY = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_ELSEWHERE = (
    "copy the checkpoint to this machine and point target.source at its directory, or set HF_HOME "
    "to a cache that holds it"
)


def is_repository(text: str) -> bool:
    """Whether `text` has the form org/name."""
    return _REPOSITORY.fullmatch(text) is not None


def download(
    repository: str, revision: str | None, *, patterns: Sequence[str] = HUB_PATTERNS
) -> Path:
    """Fetch what belongs to a target; what the cache has at that commit is not fetched again.

    Args:
        repository: org/name.
        revision: Branch, tag or commit; None for the default branch.
        patterns: Names of the files that are wanted.

    Returns:
        The cached directory, whose name is the commit.

    Raises:
        TargetError: The Hub cannot be reached and the cache has no such commit, or there is no such
            repository or revision, or no access to it.
    """
    try:
        with quiet():
            found = snapshot_download(repository, revision=revision, allow_patterns=[*patterns])
    except GatedRepoError as error:
        raise _refusal(repository, revision, "no access to it", error) from error
    except RepositoryNotFoundError as error:
        reason = f"neither a directory {repository} here nor such a repository"
        raise _refusal(repository, revision, reason, error) from error
    except RevisionNotFoundError as error:
        raise _refusal(repository, revision, "no such revision", error) from error
    except (OSError, ValueError, RuntimeError) as error:
        reason = f"no connection, no copy in the cache and no directory {repository} here"
        raise _refusal(repository, revision, reason, error) from error
    folder = Path(found)
    _LOGGER.info(
        "event=hub_target repository=%s revision=%s commit=%s", repository, revision, folder.name
    )
    return folder


def _refusal(repository: str, revision: str | None, found: str, error: Exception) -> TargetError:
    return TargetError(
        f"fetching the target {repository} (revision {revision or 'of the default branch'})",
        found=f"{found} ({type(error).__name__})",
        expected="a model repository that can be reached or is in the cache",
        remedy=_ELSEWHERE,
    )
