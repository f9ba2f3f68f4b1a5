"""The documentation's site: every page has its place, and what the code says of itself is in it."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import pytest
import yaml

from docsite.assembly import MARKER, assemble, sections
from docsite.command_line import commands
from docsite.configuration import read_keys
from docsite.formats import record, request
from docsite.tables import plain
from draftsmith.config import compose
from draftsmith.drafts.manifest import DraftManifest
from draftsmith.drift.comparison import Comparison
from draftsmith.drift.telemetry import ServedRequest
from draftsmith.evaluation.intervals import Estimate
from draftsmith.serving.schema import ChatRequest
from draftsmith.targets.identity import TargetIdentity, identify
from pipeline.compose import SCHEMA
from tests import tiny_target

ROOT = Path(__file__).parents[1]
SITE = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]


def pages(navigation: list[Any]) -> Iterator[str]:
    for entry in navigation:
        for place in entry.values():
            yield from pages(place) if isinstance(place, list) else [place]


def names(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of all keys."""
    for key, value in config.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from names(value, f"{prefix}{key}.")


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return sections(ROOT)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "source"
    assemble(ROOT, folder)
    return folder


def test_the_navigation_names_every_page_once():
    named = list(pages(SITE["nav"]))
    assert sorted(named) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_what_is_built_is_out_of_git():
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {f"/{SITE[name]}/" for name in ("docs_dir", "site_dir")} <= set(ignored)


def test_every_section_has_its_place_and_every_place_its_section(made: dict[str, str]):
    documents = (page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    marked = [name for text in documents for name in MARKER.findall(text)]
    assert sorted(marked) == sorted(made)


def test_the_source_holds_all_pages_with_their_sections(source: Path, made: dict[str, str]):
    texts = {page.name: page.read_text(encoding="utf-8") for page in source.glob("*.md")}
    assert set(texts) == set(pages(SITE["nav"]))
    assert made["configuration"] in texts["configuration.md"]
    assert not any("made by docsite" in text for text in texts.values())
    assert (source / "examples" / "grafana-dashboard.json").is_file()
    assert all((source / style).is_file() for style in SITE["extra_css"])


def test_a_source_is_replaced_and_a_place_without_section_refused(source: Path, tmp_path: Path):
    project = tmp_path / "project"
    for name in ("docs", "conf"):
        shutil.copytree(ROOT / name, project / name)
    shutil.copy(ROOT / "params.yaml", project)
    (project / "docs" / "gate.md").write_text("<!-- made by docsite: nothing -->", "utf-8")
    with pytest.raises(KeyError, match="nothing"):
        assemble(project, tmp_path / "source")
    (project / "docs" / "gate.md").unlink()
    assemble(project, tmp_path / "source")
    left = {page.name for page in source.glob("*.md")} - {"gate.md"}
    assert {page.name for page in (tmp_path / "source").glob("*.md")} == left


def test_the_reference_has_every_key_of_the_configuration(made: dict[str, str], tmp_path: Path):
    recipes = sorted(path.stem for path in (ROOT / "conf" / "draft").glob("*.yaml"))
    params = tmp_path / "params.yaml"
    params.write_text(yaml.safe_dump({"recipes": recipes}), encoding="utf-8")
    config = compose(params, ROOT / "conf", schema=SCHEMA)
    wanted = set(names({name: keys for name, keys in config.items() if name != "recipes"}))
    listed = set(re.findall(r"^\| `([\w.]+)` \|", made["configuration"], flags=re.MULTILINE))
    tops = {name for name in wanted if "." not in name}
    assert wanted - tops - {f"drafts.{recipe}" for recipe in recipes} == listed


FILES = [file for file in (ROOT / "conf").glob("*/*.yaml") if file.parent.name != "profile"]


@pytest.mark.parametrize("file", sorted(FILES), ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_every_key_says_what_it_means(file: Path):
    _, keys = read_keys(file.read_text(encoding="utf-8"))
    silent = {key.name for key in keys if not key.comments}
    assert {name for name in silent if not name.startswith("checks.")} == set()


class TestKeys:
    def test_comments_behind_above_and_at_the_head(self):
        heading, keys = read_keys(
            "# Of the file.\na: 1  # one\n# above b,\n# two lines\nb: [x, y]\n\n"
            "# a mapping\nc:\n  d: 1.0e-3  # deep\n  e: null\n"
            "f:\n  - {k: v}  # first\n  - w  # second\n"
        )
        assert heading == "Of the file."
        assert [(key.name, key.default, key.comments) for key in keys] == [
            ("a", "1", ("one",)),
            ("b", "[x, y]", ("above b, two lines",)),
            ("c", "", ("a mapping",)),
            ("c.d", "1.0e-3", ("deep",)),
            ("c.e", "null", ()),
            ("f", "[{k: v}, w]", ("first", "second")),
        ]

    def test_a_first_key_without_its_own_comment_has_the_one_above(self):
        heading, (key,) = read_keys("# What a is.\na: 1\n")
        assert (heading, key.comments) == ("", ("What a is.",))

    def test_markup_of_a_comment_is_text(self):
        assert plain("a | <b>\n`c <d>` * e") == "a &#124; &lt;b> `c <d>` &#42; e"


def test_the_reference_has_every_command_and_option(made: dict[str, str]):
    listed = made["command line"]
    assert {"generate", "evidence import"} <= {name for name, _ in commands()}
    for name, command in commands():
        _, part = listed.split(f"## {name}\n", 1)
        part = part.split("\n## ", 1)[0]
        for parameter in command.params:
            assert parameter.opts[0] in part, (name, parameter.name)
    assert "Load a pair and answer one prompt" in listed
    assert "default: 64" in listed


@pytest.mark.parametrize(
    "cls", [Comparison, DraftManifest, Estimate, ServedRequest, TargetIdentity]
)
def test_every_field_of_a_record_has_its_meaning(cls: type):
    rows = [line.split(" | ") for line in record(cls).splitlines()[2:]]
    assert [row[0] for row in rows] == [f"| `{name}`" for name in cls.__dataclass_fields__]
    assert all(len(row[-1].removesuffix("|").strip()) > 3 for row in rows)


def test_a_request_is_told_with_its_limits():
    rows = {line.split("`")[1]: line for line in request(ChatRequest).splitlines()[2:]}
    assert set(rows) == set(ChatRequest.model_fields)
    assert "number >=0 &lt;=2 or null | `1.0`" in rows["temperature"]
    assert "or null" in rows["seed"]
    assert "required" in rows["messages"]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The script that makes the tutorial's new target."""
    spec = spec_from_file_location("fine_tune", ROOT / "docs" / "examples" / "fine_tune.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tutorials_new_target_has_other_weights_and_the_same_tokenizer(
    example: ModuleType, tmp_path: Path
):
    tokenizer = tiny_target.make_tokenizer()
    tiny_target.save(tiny_target.make_model(tokenizer), tokenizer, tmp_path / "home")
    row = {"prompt_ids": [7, 8, 9], "response_ids": list(range(10, 11 + example.SHORTEST))}
    datasets.Dataset.from_list([row]).save_to_disk(str(tmp_path / "answers"))
    for name, steps in (("copy", 0), ("next", 20)):
        example.fine_tune(tmp_path / "home", tmp_path / "answers", tmp_path / name, steps=steps)
    home, copy, after = (identify(tmp_path / name, "auto") for name in ("home", "copy", "next"))
    assert copy.weights_digest != after.weights_digest
    assert home.tokenizer_digest == after.tokenizer_digest
    assert home.chat_template_digest == after.chat_template_digest


def test_the_tutorials_new_style(example: ModuleType):
    assert example.restyled("Well, so. It is.") == "well so ; it is ;"
