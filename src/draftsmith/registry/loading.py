"""Load a registered pair: its draft from the registry, its target from wherever it is, verified.

The target is looked for in this order: the place the caller names, the pair's own folder, the
snapshot with its digest below models/targets, the source recorded at registration, the registered
version. Whatever is found must have the digest that the pair was measured with; anything else is
refused by name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from draftsmith.artifacts import read_json
from draftsmith.drafts.checkpoint import load_draft
from draftsmith.errors import ArtifactError, RegistryError
from draftsmith.provenance import processor_name
from draftsmith.registry.advice_table import ADVICE, is_checked, is_of_device, read_advice
from draftsmith.registry.device_evidence import served_as
from draftsmith.registry.generation import Pair
from draftsmith.registry.pair import DTYPE_TAG, SOURCE_TAG, PairRecord, PairVersion
from draftsmith.registry.records import CHAMPIONS
from draftsmith.registry.settings import RegistryConfig
from draftsmith.registry.target_source import find_target, is_reachable
from draftsmith.targets.compatibility import require_same_tokenizer, require_target
from draftsmith.targets.identity import identify
from draftsmith.targets.loading import LoadedTarget, load_target

_URI = re.compile(r"models:/(?P<name>[^/@]+)(?P<reference>@[^/@]+|/[^/@]+)")
COSTS = Path("build/partial/costs")
_LOG = logging.getLogger(__name__)


def load_pair(
    uri: str,
    *,
    root: Path | None = None,
    target: str | LoadedTarget | None = None,
    device: str = "cpu",
    dtype: str | None = None,
) -> Pair:
    """Load a pair by its address.

    Args:
        uri: `models:/<name>@<alias>`, `models:/<name>/<version>`, or a folder with pair.json.
        root: The project's folder, with snapshots of targets and the default registry; None is
            the working directory.
        target: Folder of the target's checkpoint, when it is not where the registry says; or that
            target, already in memory.
        device: Where both models go, in torch's words.
        dtype: None for the dtype that the pair was measured in; another one for analysis only.

    Raises:
        RegistryError: There is no such pair, or the registry cannot be reached.
        TargetError: The target cannot be found, or is not the pair's.
        DraftError: The draft is damaged.
    """
    base = Path.cwd() if root is None else root
    if not uri.startswith("models:"):
        return load_directory(Path(uri), root=base, target=target, device=device, dtype=dtype)
    from draftsmith.registry.mlflow_store import PairStore  # noqa: PLC0415  folders need no MLflow

    name, reference = parse_uri(uri)
    store = PairStore(base, RegistryConfig(name=name, experiment=name))
    found = store.resolve(reference)
    if found.quarantine is not None:
        _LOG.warning("event=quarantined uri=%s reason=%s", uri, found.quarantine)
    folder = store.fetch(found.pair, base / CHAMPIONS)
    return load_directory(folder, root=base, target=target, device=device, dtype=dtype)


def parse_uri(uri: str) -> tuple[str, str]:
    """Split `models:/name@alias` or `models:/name/version` into name and `@alias` or version.

    Raises:
        RegistryError: It is neither.
    """
    match = _URI.fullmatch(uri)
    if match is None:
        raise RegistryError(
            "reading the address of a pair",
            found=uri,
            expected="models:/<name>@<alias> or models:/<name>/<version>",
            remedy="run `draftsmith pairs` to see names, versions and aliases",
        )
    return match["name"], match["reference"].removeprefix("/")


def load_directory(
    directory: Path,
    *,
    root: Path | None = None,
    target: str | LoadedTarget | None = None,
    source: str | None = None,
    device: str = "cpu",
    dtype: str | None = None,
) -> Pair:
    """Load a pair from a folder with draft/, pair.json, maybe target/, evidence/ and origin.json.

    Args:
        directory: What `PairStore.fetch` makes, or the artifacts of a registered version.
        root: The project's folder; None is the working directory.
        target: Folder of the target's checkpoint, nothing else is tried; or that target, already
            in memory.
        source: Recorded source of the target; None takes the one in origin.json.
        device: Where both models go, in torch's words.
        dtype: None for the dtype that the pair was measured in.

    Raises:
        ArtifactError: The folder holds no pair.
        TargetError: The target cannot be found, or is not the pair's.
        DraftError: The draft is damaged.
    """
    path = directory / "pair.json"
    record = PairRecord.from_json(read_json(path), path=str(path))
    origin_path = directory / "origin.json"
    origin = read_json(origin_path) if origin_path.is_file() else {}
    sources = _sources(source or origin.get(SOURCE_TAG), origin.get("name"), origin.get("version"))
    if target is None and (directory / "target").is_dir():
        target = str(directory / "target")
    base = Path.cwd() if root is None else root
    loaded = _load_target(record, base, override=target, sources=sources, options=(device, dtype))
    draft = load_draft(directory / "draft", loaded.model, target_digest=record.draft.target_digest)
    require_same_tokenizer(loaded.identity, draft.manifest.tokenizer_digest)
    evidence = _evidence(directory / "evidence")
    elsewhere = [*_evidence(directory / "device_evidence").values()]
    measured = served_as(evidence.get("benchmark", {}), elsewhere, named_device(device))
    return Pair(
        record,
        evidence,
        target=loaded,
        draft=draft,
        measured=measured,
        costs=base / COSTS,
        advice=_advice(base, record.digest, loaded, device),
    )


def _advice(root: Path, digest: str, target: LoadedTarget, device: str) -> dict[str, Any] | None:
    """What was advised on this pair; None where it was not, or elsewhere, or not checked."""
    try:
        advice = read_advice(root / ADVICE, digest)
    except ArtifactError as error:
        _LOG.warning("event=advice_unread error=%s", error)
        return None
    if advice is None or not is_checked(advice):
        return None
    here = {**named_device(device), "threads": torch.get_num_threads()}
    is_same_dtype = advice["served_dtype"] == str(target.model.dtype).removeprefix("torch.")
    return advice if is_same_dtype and is_of_device(advice, here) else None


def target_reachable(item: PairVersion, *, root: Path) -> bool:
    """Whether the target of a registered pair can be loaded on this machine, digest verified."""
    return is_reachable(
        item.pair.target_digest,
        item.tags[DTYPE_TAG],
        root=root,
        sources=_sources(item.tags.get(SOURCE_TAG), item.pair.name, item.pair.version),
        fetch_model=partial(_fetch_model, root=root),
    )


def _sources(recorded: str | None, name: str | None, version: str | None) -> list[str]:
    """Where a pair's target may be: its recorded source, then the registered version itself."""
    own = f"models:/{name}/{version}" if name and version else None
    return [source for source in (recorded, own) if source]


def _load_target(
    record: PairRecord,
    root: Path,
    *,
    override: str | LoadedTarget | None,
    sources: Sequence[str],
    options: tuple[str, str | None],
) -> LoadedTarget:
    device, dtype = options
    identity_dtype = str(record.target["dtype"])
    if isinstance(override, LoadedTarget):
        require_target(override.identity, record.target_digest)
        return override
    if override is not None:
        folder = Path(override).expanduser()
        require_target(identify(folder, identity_dtype), record.target_digest)
    else:
        folder = find_target(
            record.target_digest,
            identity_dtype,
            root=root,
            sources=sources,
            fetch_model=partial(_fetch_model, root=root),
        )
    return load_target(folder, dtype=dtype or identity_dtype, device=device)


def _fetch_model(uri: str, dst: Path, *, root: Path) -> tuple[str, Path]:
    from draftsmith.registry.mlflow_target import fetch_model  # noqa: PLC0415  rarely needed

    return fetch_model(uri, dst, root=root)


def named_device(device: str) -> dict[str, str]:
    """Kind and name of a device in torch's words, as evidence states them."""
    kind = torch.device(device).type
    name = torch.cuda.get_device_name(device) if kind == "cuda" else processor_name()
    return {"kind": kind, "name": name}


def _evidence(folder: Path) -> dict[str, Any]:
    return {path.stem: read_json(path) for path in sorted(folder.glob("*.json"))}
