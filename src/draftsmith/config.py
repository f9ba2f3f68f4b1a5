"""Configuration: params.yaml and conf/ become build/config.yaml, and its sections dataclasses.

The only module that imports OmegaConf or Hydra. The dataclass of a section lives beside the code
that it configures and checks its own ranges in `__post_init__`; what a key means is known here only
where two sections must agree.
"""

from __future__ import annotations

import os
import re
import tempfile
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from draftsmith.errors import ArtifactError, ConfigError
from draftsmith.strict import build, convert, ill_typed, join, unknown

__all__ = [
    "RECIPE_NAME",
    "build",
    "check_agreement",
    "compose",
    "load_section",
    "load_value",
    "write_config",
]

T = TypeVar("T")

_RECIPE_GROUP = "draft"
_RECIPE_SECTION = "drafts"
_PROFILE_GROUP = "profile"
_PARAMS_KEYS = ("groups", "recipes", "override")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
RECIPE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
# What is measured must be there to be measured: values of the first key are among the second's.
_AMONG = (
    ("evaluation.temperatures", "corpus.eval_temperatures"),
    ("drift.temperature", "evaluation.temperatures"),
    ("gate.alpha_temperature", "evaluation.temperatures"),
)
# The first key is at most the second: survival that far, prompts that many.
_AT_MOST = (
    ("benchmark.max_draft_length", "evaluation.draft_length"),
    ("gate.min_prompts", "benchmark.prompts"),
)
_BENCHMARK_TEMPERATURE = 0.0
_HEADER = (
    "# Written by the stage `compose` from params.yaml and conf/. Edit those, not this file.\n"
)


def load_value(config_path: Path, key: str, hint: type[T]) -> T:
    """Read one key, dotted where it is nested, as the type form `hint`.

    Raises:
        ConfigError: The file or the key is missing, or the value does not fit.
    """
    node: object = _read_yaml(config_path, remedy="run `dvc repro compose`, which writes it")
    walked = ""
    for name in key.split("."):
        keys = node if isinstance(node, Mapping) else {}
        walked = join(walked, name)
        if name not in keys:
            raise unknown(walked, name, keys, kind="section", where=f"in {config_path}")
        node = keys[name]
    return typing.cast("T", convert(node, hint, key))


def load_section(config_path: Path, section: str, cls: type[T]) -> T:
    """Read one section of the composed configuration.

    Args:
        config_path: build/config.yaml.
        section: Its name; dotted for a nested one (`drafts.student`).
        cls: The dataclass of that section.

    Raises:
        ConfigError: The file or the section is missing, or the section does not fit `cls`.
    """
    return load_value(config_path, section, cls)


def compose(
    params_path: Path,
    conf_dir: Path,
    *,
    schema: Mapping[str, Any] | None = None,
    recipes: list[str] | None = None,
) -> dict[str, Any]:
    """Compose the effective configuration: groups, then the profile, then `override`.

    A folder of `conf_dir` is a group, and a group that params.yaml does not name takes its file
    `default`. A profile file holds overlays of other sections (`corpus: {num_self_prompts: 800}`);
    `override` has the same shape and may use dotted keys. An overlay may mention a recipe that is
    not selected: it is checked and then left out.

    Args:
        params_path: params.yaml with `groups`, `recipes` and `override`.
        conf_dir: Folder of the groups; the recipes are the files of its folder `draft`.
        schema: Dataclass by section; the one of `drafts`, or a union of several, fits every
            recipe. Overlays of a section without a dataclass may change only keys that its file
            has.
        recipes: Instead of those that params.yaml names.

    Returns:
        `{section: {...}, "drafts": {recipe: {...}}, "recipes": [...]}`: plain values,
        interpolations resolved.

    Raises:
        ConfigError: A file, group, recipe, key or value is unknown, missing or ill-typed.
    """
    params = _read_params(params_path)
    available = _available(conf_dir)
    choices = _choose_groups(params["groups"], available)
    recipes = _choose_recipes(recipes or params["recipes"], available[_RECIPE_GROUP])
    overlays = {f"`override` of {params_path.name}": params["override"]}
    if profile := choices.pop(_PROFILE_GROUP, None):
        file = conf_dir / _PROFILE_GROUP / f"{profile}.yaml"
        overlays = {str(file): _read_yaml(file, remedy="restore conf/ from Git"), **overlays}
    mentioned = {name for changes in overlays.values() for name in _mentioned_recipes(changes)}
    needed = [name for name in available[_RECIPE_GROUP] if name in {*recipes, *mentioned}]
    base = _hydra_compose(conf_dir, choices, needed)
    for origin, changes in overlays.items():
        _overlay(base, changes, "", origin=origin, free=frozenset(schema or ()))
    config = _resolve(base)
    for section, cls in (schema or {}).items():
        _check_section(config, section, cls)
    config[_RECIPE_SECTION] = {name: config[_RECIPE_SECTION][name] for name in recipes}
    return {**config, "recipes": recipes}


def check_agreement(config: Mapping[str, Any]) -> None:
    """Check what sections must agree on, so that no late stage fails over an early key. Pure.

    Args:
        config: What `compose` returns, with all sections.

    Raises:
        ConfigError: Two keys contradict each other; names both, their values and the way out.
    """
    for key, other in _AMONG:
        value, allowed = _setting(config, key), _setting(config, other)
        missing = [v for v in (value if isinstance(value, list) else [value]) if v not in allowed]
        if missing:
            listed = ", ".join(str(v) for v in missing)
            remedy = f"add {listed} to `{other}`, or change `{key}`"
            raise _disagreement(
                config, (key, other), expected="the first among the second", remedy=remedy
            )
    measured = "evaluation.temperatures"
    if _BENCHMARK_TEMPERATURE not in _setting(config, measured):
        raise ConfigError(
            f"comparing `{measured}` with stage benchmark",
            found=f"`{measured}: {_setting(config, measured)}`",
            expected=f"{_BENCHMARK_TEMPERATURE} among them: `benchmark` measures speed there",
            remedy=f"add {_BENCHMARK_TEMPERATURE} to `{measured}` in params.yaml or in conf/",
        )
    for key, other in _AT_MOST:
        value, limit = _setting(config, key), _setting(config, other)
        if value is not None and value > limit:
            remedy = f"raise `{other}` to {value}, or lower `{key}` to {limit}"
            raise _disagreement(
                config, (key, other), expected="the first at most the second", remedy=remedy
            )


def _setting(config: Mapping[str, Any], key: str) -> Any:  # noqa: ANN401  a YAML value
    section, name = key.split(".")
    return config[section].get(name)


def _disagreement(
    config: Mapping[str, Any], keys: tuple[str, str], *, expected: str, remedy: str
) -> ConfigError:
    shown = " and ".join(f"`{key}: {_setting(config, key)}`" for key in keys)
    return ConfigError(
        f"comparing `{keys[0]}` with `{keys[1]}`",
        found=shown,
        expected=expected,
        remedy=f"{remedy} in params.yaml or in conf/",
    )


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write `config` as YAML with sorted keys under a header comment, in one step.

    Raises:
        ArtifactError: The disk refused; the old file, if any, is untouched.
    """
    text = _HEADER + OmegaConf.to_yaml(OmegaConf.create(dict(config)), sort_keys=True)
    temporary: Path | None = None
    # `artifacts` is a sibling of this module, so its atomic write cannot be borrowed.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise ArtifactError(
            f"writing {path}",
            found=error.strerror or str(error),
            expected="room and permission to write there",
            remedy="free disk space or mend the permissions, then rerun; nothing was changed",
        ) from error


def _read_yaml(path: Path, *, remedy: str) -> dict[str, Any]:
    try:
        # OmegaConf, not PyYAML: to the latter 1e-4 is a string.
        data = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(
            f"reading {path}",
            found=f"broken YAML ({_one_line(error)})",
            expected="valid YAML",
            remedy="correct the file at that line",
        ) from error
    except OSError as error:
        raise ConfigError(
            f"reading {path}",
            found=error.strerror or str(error),
            expected="a YAML file that holds a mapping",
            remedy=remedy,
        ) from error
    if not isinstance(data, dict):
        raise ill_typed(str(path), data, expected="a mapping of keys")
    return typing.cast("dict[str, Any]", data)


def _read_params(path: Path) -> dict[str, Any]:
    params = _read_yaml(path, remedy="restore params.yaml from Git, or give the path of yours")
    for key in params:
        if key not in _PARAMS_KEYS:
            raise unknown(str(key), str(key), _PARAMS_KEYS, kind="key", where=f"in {path.name}")
    for key in ("groups", "override"):
        params[key] = {} if params.get(key) is None else params[key]
        if not isinstance(params[key], dict):
            raise ill_typed(key, params[key], expected="a mapping of keys")
    return {"recipes": None, **params}


def _available(conf_dir: Path) -> dict[str, list[str]]:
    """Names of the files, by group."""
    folders = [folder for folder in sorted(conf_dir.glob("*")) if folder.is_dir()]
    files = {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in folders}
    if not files.get(_RECIPE_GROUP):
        raise ConfigError(
            f"reading the configuration groups below {conf_dir}",
            found=f"no recipe in {conf_dir / _RECIPE_GROUP}",
            expected=f"a folder per group and at least one {_RECIPE_GROUP}/<recipe>.yaml",
            remedy="restore conf/ from Git, or give the path of yours",
        )
    return {group: names for group, names in files.items() if names}


def _choose_groups(groups: Mapping[str, Any], available: Mapping[str, list[str]]) -> dict[str, str]:
    valid = {group: names for group, names in available.items() if group != _RECIPE_GROUP}
    for group in groups:
        if group not in valid:
            where = "in params.yaml"
            raise unknown(f"groups.{group}", str(group), valid, kind="group", where=where)
    chosen = {group: groups.get(group, "default") for group in valid}
    for group, name in chosen.items():
        _check_choice(f"groups.{group}", name, valid[group], folder=group, pattern=_FILE_NAME)
    return chosen


def _choose_recipes(recipes: object, available: list[str]) -> list[str]:
    if not isinstance(recipes, list) or not recipes:
        raise ill_typed("recipes", recipes, expected="a list with at least one draft recipe")
    for i, name in enumerate(recipes):
        path = f"recipes[{i}]"
        _check_choice(path, name, available, folder=_RECIPE_GROUP, pattern=RECIPE_NAME)
        if name in recipes[:i]:
            raise ill_typed(path, name, expected="every recipe once")
    return recipes


def _check_choice(
    path: str, name: object, names: list[str], *, folder: str, pattern: re.Pattern[str]
) -> None:
    if not isinstance(name, str):
        raise ill_typed(path, name, expected=f"the name of a file in conf/{folder}/")
    if name not in names or not pattern.fullmatch(name):
        usable = [name for name in names if pattern.fullmatch(name)]
        where = f"in params.yaml, or add a file to conf/{folder}/"
        raise unknown(path, name, usable, kind=f"file of conf/{folder}/", where=where)


def _mentioned_recipes(overlay: Mapping[str, Any]) -> Iterator[str]:
    prefix = f"{_RECIPE_SECTION}."
    for key, value in overlay.items():
        if key == _RECIPE_SECTION and isinstance(value, Mapping):
            yield from (str(name).split(".")[0] for name in value)
        elif str(key).startswith(prefix):
            yield str(key).split(".")[1]


def _hydra_compose(
    conf_dir: Path, choices: Mapping[str, str], recipes: Sequence[str]
) -> dict[str, Any]:
    # Only the stage that composes needs Hydra; a stage that reads its section does not pay for it.
    import hydra  # noqa: PLC0415
    from hydra.errors import HydraException  # noqa: PLC0415

    overrides = [f"+{group}={name}" for group, name in choices.items()]
    overrides += [f"+{_RECIPE_GROUP}@{_RECIPE_SECTION}.{name}={name}" for name in recipes]
    try:
        with hydra.initialize_config_dir(str(conf_dir.resolve()), version_base="1.3"):
            config = OmegaConf.to_container(hydra.compose(overrides=overrides), resolve=False)
    except (HydraException, yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(
            f"composing the files of {conf_dir}",
            found=_one_line(error),
            expected="one valid YAML mapping a file",
            remedy="correct the file that is named",
        ) from error
    sections = {*choices, _RECIPE_SECTION}
    composed = typing.cast("dict[str, Any]", config)
    for name in composed:
        if name not in sections:
            raise unknown(name, name, sections, kind="section", where=f"in {conf_dir}")
    return {section: composed.get(section) or {} for section in sorted(sections)}


def _overlay(
    base: dict[str, Any], changes: object, path: str, *, origin: str, free: Collection[str]
) -> None:
    """Merge `changes` into `base` in place; lists are replaced whole.

    A key must exist already, except below a section in `free`, whose dataclass judges it later.
    """
    if not isinstance(changes, Mapping):
        raise ill_typed(path, changes, expected=f"a mapping of keys in {origin}")
    is_free = path not in ("", _RECIPE_SECTION) and path.split(".", 1)[0] in free
    for key, value in _undot(changes, base, is_top=path == ""):
        where = join(path, str(key))
        if key not in base and not is_free:
            raise unknown(where, str(key), base, kind="key", where=f"in {origin}")
        if isinstance(base.get(key), dict) and value is not None:
            _overlay(base[key], value, where, origin=origin, free=free)
        else:
            base[key] = value


def _undot(
    changes: Mapping[str, object], base: Mapping[str, object], *, is_top: bool
) -> Iterator[tuple[str, object]]:
    """Split `a.b: x` into `a: {b: x}`; a key that has a dot itself, such as "0.7", stays whole."""
    for key, value in changes.items():
        head, dot, tail = str(key).partition(".")
        if dot and key not in base and (is_top or head in base):
            yield head, {tail: value}
        else:
            yield key, value


def _resolve(config: dict[str, Any]) -> dict[str, Any]:
    try:
        node = OmegaConf.create(config)
        resolved = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"resolving the key `{error.full_key or '?'}`",
            found=_one_line(error),
            expected="a value, or a reference to an existing key",
            remedy="set the key under `override` in params.yaml or correct it in conf/",
        ) from error
    return typing.cast("dict[str, Any]", resolved)


def _check_section(config: Mapping[str, Any], section: str, form: object) -> None:
    if section not in config:
        raise unknown(section, section, config, kind="group", where="in conf/")
    if section != _RECIPE_SECTION:
        convert(config[section], form, section)
        return
    for recipe, values in config[section].items():
        convert(values, form, f"{section}.{recipe}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
