"""`target.source` -> a checked snapshot below `root`, and its identity.

Decides by the form of the source which module finds the files; `identity` decides what they are,
`compatibility` whether they can be served. Knows nothing of MLflow: the caller hands in the
download.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from draftsmith.artifacts import scratch_directory, short, write_failure
from draftsmith.errors import TargetError
from draftsmith.targets import hub, packaged
from draftsmith.targets.checkpoint import (
    CONFIG_FILE,
    check_weights,
    needed_files,
    require_config,
)
from draftsmith.targets.compatibility import (
    refuse_unservable,
    require_chat_template,
    require_vocabulary,
)
from draftsmith.targets.components import load_config, load_tokenizer
from draftsmith.targets.conversion import check_gguf, convert_gguf
from draftsmith.targets.identity import TargetIdentity, identify
from draftsmith.targets.resolved import HUB_PREFIX
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

FetchModel = Callable[[str, Path], tuple[str, Path]]
"""Downloads a `models:/` URI into an empty folder; returns the URI of the version, and its folder.

It may return a folder of its own that stays as it is: then unchanged files are not hashed again.
"""


@dataclass(frozen=True)
class ResolvedTarget:
    """A target that was found, and where.

    Attributes:
        identity: Depends on the content alone.
        source: `hf:<org>/<name>@<commit>` or `models:/<name>/<version>` where the configured
            source may move; else the configured source.
    """

    identity: TargetIdentity
    source: str


def resolve(
    config: TargetConfig, *, root: Path, fetch_model: FetchModel | None = None
) -> ResolvedTarget:
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
        repository = source.removeprefix(HUB_PREFIX)
        path = hub.download(repository, config.revision)
        source = f"{HUB_PREFIX}{repository}@{path.name}"
    else:
        path = Path(source).expanduser()
    is_gguf = path.is_file() or path.suffix.lower() == ".gguf"
    identity = (_resolve_gguf if is_gguf else _resolve_directory)(path, config, root)
    return ResolvedTarget(identity, source)


def checkpoint_folder(source: str, *, root: Path) -> Path:
    """The folder of a checkpoint that is only looked at: a folder is taken as it is, not copied.

    Args:
        source: A directory, a Hub id (`org/name` or `hf:org/name`, with `@<revision>` behind it
            where another than the default is meant), a .gguf file or `package:<package>/<file>`.
        root: Where a converted file is kept for the next time.

    Raises:
        TargetError: It is missing or damaged, or the Hub cannot be reached.
        ArtifactError: The disk refused.
    """
    directory = Path(source).expanduser()
    name, _, revision = source.partition("@")
    if directory.is_dir():
        return directory
    if _names_hub(name):
        return hub.download(name.removeprefix(HUB_PREFIX), revision or None)
    config = TargetConfig(name, source, revision=None, dtype="auto", snapshot="copy")
    return root / short(resolve(config, root=root).identity.digest)


def config_folder(source: str) -> Path:
    """The folder that holds the config of a target; of a Hub source nothing else is fetched.

    Args:
        source: A directory, its config.json, or a Hub id as in `checkpoint_folder`.

    Raises:
        TargetError: It is none of these, or the Hub cannot be reached.
    """
    path = Path(source).expanduser()
    name, _, revision = source.partition("@")
    if path.is_dir():
        return path
    if path.is_file() and path.name == CONFIG_FILE:
        return path.parent
    if _names_hub(name):
        repository = name.removeprefix(HUB_PREFIX)
        return hub.download(repository, revision or None, patterns=[CONFIG_FILE])
    raise TargetError(
        f"reading the config of the target {source}",
        found="another kind of source" if path.exists() or ":" in source else "no such file",
        expected=f"a checkpoint folder, a {CONFIG_FILE}, or org/name on the Hub",
        remedy="name one of these; other sources have a config once `dvc repro resolve_target` "
        "has made their snapshot",
    )


def has_config(source: str) -> bool:
    """Whether `config_folder` finds the config without converting or fetching a model."""
    path = Path(source).expanduser()
    return path.is_dir() or path.name == CONFIG_FILE or _names_hub(source)


def _names_hub(source: str) -> bool:
    if source.startswith(HUB_PREFIX):
        return True
    return hub.is_repository(source) and not Path(source).exists() and ".gguf" not in source.lower()


def _resolve_directory(
    directory: Path, config: TargetConfig, root: Path, *, snapshot: str | None = None
) -> TargetIdentity:
    _require_servable(directory)
    identity = identity_of(directory, config.dtype, cache=IdentityCache(root))
    if held_identity(root, identity.digest) is None:
        _require_conversational(directory, identity, directory)
    keep = keep_link if (snapshot or config.snapshot) == "none" else keep_copy
    keep(directory, identity, root)
    return identity


def _require_servable(directory: Path) -> None:
    """The checks that need no tokenizer, cheapest first."""
    require_config(directory)
    refuse_unservable(load_config(directory), directory)
    check_weights(directory)


def _require_conversational(directory: Path, identity: TargetIdentity, origin: Path) -> None:
    """The checks that need the tokenizer; a snapshot that is already held has passed them.

    Errors name `origin`, which the user knows.
    """
    tokenizer = load_tokenizer(directory)
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
    with scratch_directory(root, "incoming") as scratch:
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
    _require_servable(directory)
    identity = identify(directory, config.dtype)
    _require_conversational(directory, identity, origin)
    keep_copy(directory, identity, root)
    return identity


def _resolve_model(
    config: TargetConfig, root: Path, fetch_model: FetchModel | None
) -> ResolvedTarget:
    packaged.require_model_uri(config.source)
    if fetch_model is None:
        raise TargetError(
            f"fetching the target {config.source}",
            found="no way to download registered models",
            expected="a caller that brings one, as the pipeline does",
            remedy="run `dvc repro`, or pass fetch_model",
        )
    with scratch_directory(root, "incoming") as scratch:
        downloads = scratch / "download"
        downloads.mkdir()
        source, folder = fetch_model(config.source, downloads)
        checkpoint, tokenizer_folder = packaged.find_in_model(folder, config.source)
        if tokenizer_folder == checkpoint and not folder.is_relative_to(scratch):
            identity = _resolve_directory(checkpoint, config, root, snapshot="copy")
            return ResolvedTarget(identity, source)
        joined = scratch / "checkpoint"
        _join(joined, checkpoint, tokenizer_folder)
        return ResolvedTarget(_resolve_converted(joined, Path(config.source), config, root), source)


def _join(joined: Path, checkpoint: Path, tokenizer_folder: Path) -> None:
    """Bring a checkpoint and its tokenizer, kept apart, together in one new folder."""
    files = {file.relative_to(checkpoint): file for file in needed_files(checkpoint)}
    for file in tokenizer_folder.iterdir():
        if file.is_file():
            files.setdefault(file.relative_to(tokenizer_folder), file)
    try:
        for name, file in files.items():
            (joined / name).parent.mkdir(parents=True, exist_ok=True)
            clone_file(file, joined / name)
    except OSError as error:
        raise write_failure(joined, error) from error
