"""The command that brings a draft which was trained elsewhere into the pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from draftsmith.artifacts import write_text
from draftsmith.commands.common import HERE, AsJson, Root, reported, write_json
from draftsmith.config import RECIPE_NAME, load_value
from draftsmith.drafts.settings import CheckpointConfig
from draftsmith.errors import ConfigError

_RECIPES = Path("conf", "draft")
_FAMILY = "checkpoint"
_TEXT = """\
# A draft that was trained elsewhere. Written by `draftsmith import-draft`; run it again to update.
family: checkpoint
source: {source}  # where it came from; a copy lies in models/imported/{name}/
digest: {digest}  # of its files: another checkpoint is another recipe
"""


@reported
def import_draft(
    directory: Annotated[
        Path,
        typer.Argument(help="Folder of a causal LM with the target's tokenizer, or of a head."),
    ],
    name: Annotated[
        str | None, typer.Option(help="Name of the recipe; default: the folder's.")
    ] = None,
    root: Root = HERE,
    as_json: AsJson = False,
) -> None:
    """Make a draft that was trained elsewhere a recipe: evaluated, gated and promoted like others.

    It must fit the target that was resolved last: a causal LM has its tokenizer and vocabulary, an
    EAGLE-3 head its shape, vocabulary and embedding.
    """
    from draftsmith.distillation.imported import import_checkpoint  # noqa: PLC0415  torch is slow
    from draftsmith.targets.identity import read_identity  # noqa: PLC0415

    recipe_name = name or directory.resolve().name
    file = _recipe_file(recipe_name, root)
    resolved = root / "build" / "target.json"
    target = read_identity(resolved) if resolved.is_file() else None
    recipe = import_checkpoint(directory, recipe_name, root=root, target=target)
    write_text(file, _text(recipe_name, recipe))
    if as_json:
        write_json(
            {"name": recipe_name, "recipe": file.relative_to(root).as_posix()}
            | {"source": recipe.source, "digest": recipe.digest, "fits_target": target is not None}
        )
        return
    typer.echo(
        f"Recipe {recipe_name} is in {file}. Add `- {recipe_name}` under `recipes:` in params.yaml "
        "and run `dvc repro`: it is measured against the others and promoted on the same evidence."
    )
    if target is None:
        typer.echo("No target is resolved yet, so whether it fits is checked by `dvc repro`.")


def _recipe_file(name: str, root: Path) -> Path:
    """Where the recipe goes; one of another family is not overwritten."""
    if not RECIPE_NAME.fullmatch(name):
        raise ConfigError(
            "naming the recipe",
            found=repr(name),
            expected="letters, digits, dashes and underscores, no digit first",
            remedy="name it with --name",
        )
    file = root / _RECIPES / f"{name}.yaml"
    family = load_value(file, "family", str) if file.is_file() else _FAMILY
    if family != _FAMILY:
        raise ConfigError(
            f"writing {file}",
            found=f"a recipe of family {family}",
            expected=f"no file, or a recipe of family {_FAMILY}",
            remedy="choose another name with --name",
        )
    return file


def _text(name: str, recipe: CheckpointConfig) -> str:
    values = {"source": json.dumps(recipe.source), "digest": json.dumps(recipe.digest)}
    return _TEXT.format(name=name, **values)
