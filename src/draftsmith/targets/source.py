"""`target.source` -> a checked snapshot below `root`, and its identity.

Decides by the form of the source which module finds the files; `identity` decides what they are,
`compatibility` whether they can be served. Knows nothing of MLflow: the caller hands in the
download.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from draftsmith.artifacts import write_failure
from draftsmith.errors import TargetError
from draftsmith.targets import hub, packaged
from draftsmith.targets.checkpoint import check_weights, needed_files, require_config
from draftsmith.targets.compatibility import (
    refuse_unservable,
    require_chat_template,
    require_vocabulary,
)
from draftsmith.targets.components import load_config, load_tokenizer
from draftsmith.targets.conversion import check_gguf, convert_gguf
from draftsmith.targets.identity import TargetIdentity, identify
from draftsmith.targets.settings import TargetConfig
from draftsmith.targets.snapshot import (
    clone_file,
    held_identity,
    identity_of,
    keep_copy,
    keep_link,
    moving_target,
)
from draftsmith.targets.stamps import IdentityCache, stamp

_LOGGER = logging.getLogger(__name__)

FetchModel = Callable[[str, Path], Path]
"""Downloads a `models:/` URI; given an empty folder, returns the folder where the model lies.

It may return a folder of its own that stays as it is: then unchanged files are not hashed again.
"""


def resolve(
    config: TargetConfig, *, root: Path, fetch_model: FetchModel | None = None
) -> TargetIdentity:
    """Find the target, check it, keep a snapshot of it, and say what it is.

    An unchanged source costs a look at its files' sizes and times.

    Args:
        config: Where the target is and how it is to be served.
        root: Folder of all snapshots; the one of this target is `root/<short(digest)>`.
        fetch_model: Needed for `models:/` sources only.

    Raises:
        TargetError: The source is missing, damaged, or cannot be served. Earlier snapshots stay.
        ArtifactError: The disk refused; nothing half-written is left.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_failure(root, error) from error
    source = config.source
    if config.revision is not None and not _names_hub(source):
        raise TargetError(
            f"reading target.revision {config.revision}",
            found=f"target.source {source}, which has no revisions",
            expected="a revision with a Hub source only",
            remedy="set target.revision: null",
        )
    if source.startswith("models:"):
        return _resolve_model(config, root, fetch_model)
    if source.startswith("package:"):
        path = packaged.find_in_package(source)
    elif _names_hub(source):
        path = hub.download(
            source.removeprefix("hf:"),
            config.revision,
            trust_remote_code=config.trust_remote_code,
        )
    else:
        path = Path(source).expanduser()
    if path.is_file() or path.suffix.lower() == ".gguf":
        return _resolve_gguf(path, config, root)
    return _resolve_directory(path, config, root)


def _names_hub(source: str) -> bool:
    if source.startswith("hf:"):
        return True
    return hub.is_repository(source) and not Path(source).exists() and ".gguf" not in source.lower()


def _resolve_directory(
    directory: Path, config: TargetConfig, root: Path, *, snapshot: str | None = None
) -> TargetIdentity:
    trust = config.trust_remote_code
    _require_servable(directory, trust_remote_code=trust)
    identity = identity_of(
        directory, config.dtype, cache=IdentityCache(root), trust_remote_code=trust
    )
    if held_identity(root, identity.digest, trust_remote_code=trust) is None:
        _require_conversational(directory, identity, directory, trust_remote_code=trust)
    keep = keep_link if (snapshot or config.snapshot) == "none" else keep_copy
    keep(directory, identity, root, trust_remote_code=trust)
    return identity


def _require_servable(directory: Path, *, trust_remote_code: bool) -> None:
    """The checks that need no tokenizer, cheapest first."""
    require_config(directory)
    config = load_config(directory, trust_remote_code=trust_remote_code)
    refuse_unservable(config, directory)
    check_weights(directory)


def _require_conversational(
    directory: Path, identity: TargetIdentity, origin: Path, *, trust_remote_code: bool
) -> None:
    """The checks that need the tokenizer; a snapshot that is already held has passed them.

    Errors name `origin`, which the user knows.
    """
    tokenizer = load_tokenizer(directory, trust_remote_code=trust_remote_code)
    require_vocabulary(identity, tokenizer, origin)
    require_chat_template(tokenizer, origin)


def _resolve_gguf(file: Path, config: TargetConfig, root: Path) -> TargetIdentity:
    check_gguf(file)
    settings = f"dtype={config.dtype} gguf"
    key, before = f"{file.absolute()} {settings}", stamp([file], settings)
    cache = IdentityCache(root)
    known = cache.get(key, before)
    if known is not None and held_identity(root, known.digest) is not None:
        return known
    _LOGGER.info("event=gguf_conversion file=%s dtype=%s", file, config.dtype)
    with _scratch(root) as scratch:
        convert_gguf(file, scratch, dtype=config.dtype)
        if stamp([file], settings) != before:
            raise moving_target(file)
        identity = _resolve_converted(scratch, file, config, root)
    cache.put(key, before, identity)
    return identity


def _resolve_converted(
    directory: Path, origin: Path, config: TargetConfig, root: Path
) -> TargetIdentity:
    """Take a directory of our own making: it is copied whatever target.snapshot says."""
    _require_servable(directory, trust_remote_code=config.trust_remote_code)
    identity = identify(directory, config.dtype, trust_remote_code=config.trust_remote_code)
    _require_conversational(directory, identity, origin, trust_remote_code=config.trust_remote_code)
    keep_copy(directory, identity, root, trust_remote_code=config.trust_remote_code)
    return identity


def _resolve_model(
    config: TargetConfig, root: Path, fetch_model: FetchModel | None
) -> TargetIdentity:
    packaged.require_model_uri(config.source)
    if fetch_model is None:
        raise TargetError(
            f"fetching the target {config.source}",
            found="no way to download registered models",
            expected="a caller that brings one, as the pipeline does",
            remedy="run `dvc repro`, or pass fetch_model",
        )
    with _scratch(root) as scratch:
        downloads = scratch / "download"
        downloads.mkdir()
        folder = fetch_model(config.source, downloads)
        checkpoint, tokenizer_folder = packaged.find_in_model(folder, config.source)
        if tokenizer_folder == checkpoint and not folder.is_relative_to(scratch):
            return _resolve_directory(checkpoint, config, root, snapshot="copy")
        joined = scratch / "checkpoint"
        _join(joined, checkpoint, tokenizer_folder, config.trust_remote_code)
        return _resolve_converted(joined, Path(config.source), config, root)


def _join(joined: Path, checkpoint: Path, tokenizer_folder: Path, trust_remote_code: bool) -> None:
    """Bring a checkpoint and its tokenizer, kept apart, together in one new folder."""
    files = {
        file.relative_to(checkpoint): file
        for file in needed_files(checkpoint, trust_remote_code=trust_remote_code)
    }
    for file in tokenizer_folder.iterdir():
        if file.is_file():
            files.setdefault(file.relative_to(tokenizer_folder), file)
    try:
        for name, file in files.items():
            (joined / name).parent.mkdir(parents=True, exist_ok=True)
            clone_file(file, joined / name)
    except OSError as error:
        raise write_failure(joined, error) from error


@contextlib.contextmanager
def _scratch(root: Path) -> Iterator[Path]:
    """An empty folder on the disk of the snapshots, gone after the block."""
    try:
        folder = tempfile.TemporaryDirectory(dir=root, prefix=".incoming.")
    except OSError as error:
        raise write_failure(root, error) from error
    with folder as name:
        yield Path(name)
