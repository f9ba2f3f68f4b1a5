"""Configuration: strict dataclasses, composition, and messages that name the key."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from omegaconf import OmegaConf

from draftsmith.config import build, check_agreement, compose, load_section, write_config
from draftsmith.errors import ArtifactError, ConfigError


@dataclass(frozen=True)
class Schedule:
    kind: Literal["cosine", "wsd"] = "cosine"
    warmup_steps: int = 10


@dataclass(frozen=True)
class Training:
    num_steps: int
    learning_rate: float = 1e-3
    schedule: Schedule = field(default_factory=Schedule)
    layers: tuple[int, ...] = (0,)
    names: list[str] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    vocabulary_size: int | None = None
    resume: bool = False
    limit: int | str = 0
    span: tuple[int, float] = (1, 2.0)

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps is {self.num_steps}, at least 1 is needed")


@dataclass(frozen=True)
class Corpus:
    num_self_prompts: int
    temperatures: tuple[float, ...] = (0.0,)
    domain_weights: dict[str, float] = field(default_factory=dict)
    seed: int = 0


def message(raised: pytest.ExceptionInfo[ConfigError]) -> str:
    return str(raised.value)


class TestBuild:
    def test_every_supported_form(self):
        made = build(
            Training,
            {
                "num_steps": 3,
                "learning_rate": 1,
                "schedule": {"kind": "wsd"},
                "layers": [0, 29],
                "names": ["a"],
                "weights": {"0.7": 2},
                "vocabulary_size": 8192,
                "resume": True,
                "limit": "none",
                "span": [4, 5],
            },
            "distill",
        )
        assert made == Training(
            num_steps=3,
            learning_rate=1.0,
            schedule=Schedule(kind="wsd"),
            layers=(0, 29),
            names=["a"],
            weights={"0.7": 2.0},
            vocabulary_size=8192,
            resume=True,
            limit="none",
            span=(4, 5.0),
        )
        assert isinstance(made.learning_rate, float)
        assert isinstance(made.layers, tuple)

    def test_defaults_fill_what_is_left_out(self):
        assert build(Training, {"num_steps": 1}, "distill") == Training(num_steps=1)

    def test_unknown_key_names_its_path_and_the_nearest_valid_key(self):
        with pytest.raises(ConfigError) as raised:
            build(Training, {"num_steps": 1, "schedule": {"warmup_step": 1}}, "distill")
        assert "`distill.schedule.warmup_step`" in message(raised)
        assert "did you mean `warmup_steps`" in message(raised)

    def test_unknown_key_that_resembles_nothing_lists_the_valid_keys(self):
        with pytest.raises(ConfigError) as raised:
            build(Schedule, {"zzz": 1}, "distill.schedule")
        assert "did you mean" not in message(raised)
        assert "`kind`, `warmup_steps`" in message(raised)

    def test_missing_key_names_its_path(self):
        with pytest.raises(ConfigError, match=r"`distill\.num_steps`"):
            build(Training, {}, "distill")

    @pytest.mark.parametrize(
        ("key", "value", "path"),
        [
            ("num_steps", "10", "distill.num_steps"),
            ("num_steps", 1.0, "distill.num_steps"),
            ("num_steps", True, "distill.num_steps"),
            ("num_steps", None, "distill.num_steps"),
            ("learning_rate", "1e-3", "distill.learning_rate"),
            ("learning_rate", True, "distill.learning_rate"),
            ("learning_rate", float("nan"), "distill.learning_rate"),
            ("resume", 1, "distill.resume"),
            ("layers", 3, "distill.layers"),
            ("layers", [0, "1"], "distill.layers[1]"),
            ("names", "abc", "distill.names"),
            ("weights", {"chat": "x"}, "distill.weights.chat"),
            ("weights", {0.7: 1.0}, "distill.weights"),
            ("schedule", "cosine", "distill.schedule"),
            ("schedule", {"kind": "cosin"}, "distill.schedule.kind"),
            ("vocabulary_size", "many", "distill.vocabulary_size"),
            ("limit", 1.5, "distill.limit"),
            ("span", [1], "distill.span"),
        ],
    )
    def test_ill_typed_value_names_its_path(self, key, value, path):
        with pytest.raises(ConfigError) as raised:
            build(Training, {"num_steps": 1, key: value}, "distill")
        assert f"`{path}`" in message(raised)

    def test_a_misspelt_choice_gets_the_nearest(self):
        with pytest.raises(ConfigError, match="did you mean `cosine`"):
            build(Schedule, {"kind": "cosin"}, "distill.schedule")

    def test_range_check_of_the_dataclass_gets_the_path(self):
        with pytest.raises(ConfigError, match=r"`distill`.*num_steps is 0"):
            build(Training, {"num_steps": 0}, "distill")

    def test_a_section_that_is_no_mapping_is_refused(self):
        with pytest.raises(ConfigError, match="a mapping of keys"):
            build(Training, ["num_steps"], "distill")  # type: ignore[arg-type]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {
        "params.yaml": "groups: {target: small}\nrecipes: [student]\n",
        "conf/target/small.yaml": "source: package:some/file.gguf\nsnapshot: copy\n",
        "conf/target/default.yaml": "source: ???\nsnapshot: copy\n",
        "conf/corpus/default.yaml": (
            "num_self_prompts: 10\ntemperatures: [0.0, 0.7]\n"
            'domain_weights: {"0.7": 1.0, chat: 2.0}\nseed: 7\n'
        ),
        "conf/distill/default.yaml": "num_steps: 5\nlearning_rate: 1e-4\nseed: ${corpus.seed}\n",
        "conf/draft/student.yaml": "family: student\nnum_steps: 10\n",
        "conf/draft/wide.yaml": "family: student\nnum_steps: 20\n",
        "conf/profile/default.yaml": "# nothing changed\n{}\n",
        "conf/profile/full.yaml": "corpus: {num_self_prompts: 800}\ndistill: {num_steps: 50}\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def composed(project: Path, params: str, schema: Mapping[str, type] | None = None) -> Any:
    (project / "params.yaml").write_text(params)
    return compose(project / "params.yaml", project / "conf", schema=schema)


class TestCompose:
    def test_groups_recipes_and_references_become_plain_values(self, project):
        config = compose(project / "params.yaml", project / "conf")
        assert config == {
            "target": {"source": "package:some/file.gguf", "snapshot": "copy"},
            "corpus": {
                "num_self_prompts": 10,
                "temperatures": [0.0, 0.7],
                "domain_weights": {"0.7": 1.0, "chat": 2.0},
                "seed": 7,
            },
            "distill": {"num_steps": 5, "learning_rate": 1e-4, "seed": 7},
            "drafts": {"student": {"family": "student", "num_steps": 10}},
            "recipes": ["student"],
        }
        assert type(config["corpus"]) is dict
        assert isinstance(config["distill"]["learning_rate"], float)

    def test_nothing_is_left_behind_on_disk(self, project):
        before = sorted(project.rglob("*"))
        compose(project / "params.yaml", project / "conf")
        assert sorted(project.rglob("*")) == before

    def test_override_wins_over_profile_which_wins_over_groups(self, project):
        config = composed(
            project,
            "groups: {target: small, profile: full}\nrecipes: [student]\n"
            "override: {corpus: {num_self_prompts: 3}}\n",
        )
        assert config["corpus"]["num_self_prompts"] == 3
        assert config["distill"]["num_steps"] == 50

    def test_dotted_and_nested_overrides_mean_the_same(self, project):
        start = "groups: {target: small}\nrecipes: [student]\noverride:\n"
        nested = composed(project, start + "  corpus: {domain_weights: {chat: 9.0}}\n")
        dotted = composed(project, start + "  corpus.domain_weights.chat: 9.0\n")
        assert nested == dotted
        assert dotted["corpus"]["domain_weights"] == {"0.7": 1.0, "chat": 9.0}

    def test_a_key_that_holds_a_dot_is_not_split(self, project):
        config = composed(
            project,
            "groups: {target: small}\nrecipes: [student]\n"
            'override: {corpus: {domain_weights: {"0.7": 4.0}}}\n',
        )
        assert config["corpus"]["domain_weights"] == {"0.7": 4.0, "chat": 2.0}

    def test_a_list_is_replaced_whole(self, project):
        config = composed(
            project,
            "groups: {target: small}\nrecipes: [student]\n"
            "override: {corpus.temperatures: [1e-1]}\n",
        )
        assert config["corpus"]["temperatures"] == [0.1]

    def test_recipes_are_selected_in_the_order_given(self, project):
        config = composed(project, "groups: {target: small}\nrecipes: [wide, student]\n")
        assert list(config["drafts"]) == ["wide", "student"]
        assert config["recipes"] == ["wide", "student"]

    def test_an_overlay_of_a_recipe_that_is_not_selected_is_checked_and_left_out(self, project):
        start = "groups: {target: small}\nrecipes: [student]\noverride: "
        config = composed(project, start + "{drafts: {wide: {num_steps: 1}}}\n")
        assert list(config["drafts"]) == ["student"]
        with pytest.raises(ConfigError, match=r"`drafts\.wide\.num_stps`"):
            composed(project, start + "{drafts.wide.num_stps: 1}\n")

    @pytest.mark.parametrize(
        ("override", "path", "near"),
        [
            ("{corpus: {num_self_promts: 1}}", "corpus.num_self_promts", "num_self_prompts"),
            ("{corpus.num_self_promts: 1}", "corpus.num_self_promts", "num_self_prompts"),
            ("{corpsu: {seed: 1}}", "corpsu", "corpus"),
            ("{corpsu.seed: 1}", "corpsu", "corpus"),
            ("{drafts: {studnet: {num_steps: 1}}}", "drafts.studnet", None),
            ("{drafts.student.num_step: 1}", "drafts.student.num_step", "num_steps"),
            ("{corpus: 3}", "corpus", None),
        ],
    )
    @pytest.mark.parametrize("schema", [None, {"corpus": Corpus}])
    def test_an_unknown_override_names_its_path_and_the_nearest_key(
        self, project, override, path, near, schema
    ):
        text = f"groups: {{target: small}}\nrecipes: [student]\noverride: {override}\n"
        with pytest.raises(ConfigError) as raised:
            composed(project, text, schema)
        assert f"`{path}`" in message(raised)
        if near:
            assert f"did you mean `{near}`" in message(raised)

    def test_an_unknown_key_of_a_profile_names_the_profile(self, project):
        (project / "conf/profile/full.yaml").write_text("corpus: {sed: 1}\n")
        with pytest.raises(ConfigError, match=r"`corpus\.sed`.*profile/full\.yaml"):
            composed(project, "groups: {target: small, profile: full}\nrecipes: [student]\n")

    def test_a_schema_finds_an_unknown_key_of_a_group_file(self, project):
        with (project / "conf/corpus/default.yaml").open("a") as stream:
            stream.write("num_selfprompts: 1\n")
        with pytest.raises(ConfigError, match=r"`corpus\.num_selfprompts`.*`num_self_prompts`"):
            compose(project / "params.yaml", project / "conf", schema={"corpus": Corpus})

    def test_a_schema_finds_an_ill_typed_value(self, project):
        text = "groups: {target: small}\nrecipes: [student]\noverride: {corpus.seed: x}\n"
        with pytest.raises(ConfigError, match=r"`corpus\.seed`: found 'x' \(str\)"):
            composed(project, text, {"corpus": Corpus})

    def test_a_schema_lets_an_override_set_a_key_that_has_only_a_default(self, project):
        (project / "conf/corpus/default.yaml").write_text("num_self_prompts: 1\n")
        (project / "conf/distill/default.yaml").write_text("num_steps: 1\n")
        text = "groups: {target: small}\nrecipes: [student]\noverride: {corpus.seed: 5}\n"
        assert composed(project, text, {"corpus": Corpus})["corpus"]["seed"] == 5

    def test_the_schema_of_drafts_fits_every_recipe(self, project):
        @dataclass(frozen=True)
        class Recipe:
            family: str
            num_steps: int

        params = "groups: {target: small}\nrecipes: [student, wide]\n"
        composed(project, params, {"drafts": Recipe})
        with pytest.raises(ConfigError, match=r"`drafts\.wide\.num_steps`"):
            composed(project, params + "override: {drafts.wide.num_steps: a}\n", {"drafts": Recipe})

    def test_an_unknown_file_names_those_that_exist(self, project):
        with pytest.raises(ConfigError) as raised:
            composed(project, "groups: {target: smal}\nrecipes: [student]\n")
        assert "`groups.target`" in message(raised)
        assert "`default`, `small`" in message(raised)
        assert "did you mean `small`" in message(raised)

    def test_an_unknown_group_names_the_nearest(self, project):
        with pytest.raises(ConfigError, match="did you mean `target`"):
            composed(project, "groups: {tarket: small}\nrecipes: [student]\n")

    def test_an_unknown_recipe_names_the_nearest(self, project):
        with pytest.raises(ConfigError, match=r"`recipes\[0\]`.*did you mean `student`"):
            composed(project, "recipes: [studnet]\n")

    @pytest.mark.parametrize(
        "recipes", ["", "recipes: []", "recipes: student", "recipes: [wide, wide]"]
    )
    def test_recipes_must_be_a_list_of_distinct_names(self, project, recipes):
        with pytest.raises(ConfigError, match="recipes"):
            composed(project, f"groups: {{target: small}}\n{recipes}\n")

    def test_a_choice_cannot_leave_its_folder(self, project):
        with pytest.raises(ConfigError, match=r"`groups\.corpus`"):
            composed(
                project, "groups: {target: small, corpus: ../target/small}\nrecipes: [student]\n"
            )

    def test_an_unknown_key_of_params_names_the_nearest(self, project):
        with pytest.raises(ConfigError, match="did you mean `override`"):
            composed(project, "recipes: [student]\noverrides: {}\n")

    def test_a_missing_params_file_says_so(self, project):
        (project / "params.yaml").unlink()
        with pytest.raises(ConfigError, match=r"params\.yaml: found No such file"):
            compose(project / "params.yaml", project / "conf")

    @pytest.mark.parametrize("text", ["groups: {target: [\n", "a: 1\na: 2\n", "\tx: 1\n"])
    def test_broken_yaml_in_params_says_where(self, project, text):
        with pytest.raises(ConfigError, match=r"params\.yaml.*broken YAML.*line"):
            composed(project, text)

    def test_a_params_file_that_is_a_list_is_refused(self, project):
        with pytest.raises(ConfigError, match="a mapping of keys"):
            composed(project, "- a\n")

    def test_broken_yaml_in_a_group_names_the_file(self, project):
        (project / "conf/corpus/default.yaml").write_text("seed: [\n")
        with pytest.raises(ConfigError, match=r"corpus/default"):
            compose(project / "params.yaml", project / "conf")

    def test_a_mandatory_value_that_nobody_gave_names_its_key(self, project):
        with pytest.raises(ConfigError, match=r"`target\.source`"):
            composed(project, "groups: {target: default}\nrecipes: [student]\n")

    def test_a_reference_to_nowhere_names_its_key(self, project):
        (project / "conf/distill/default.yaml").write_text("seed: ${corpus.sed}\n")
        with pytest.raises(ConfigError, match=r"`distill\.seed`"):
            compose(project / "params.yaml", project / "conf")

    def test_a_missing_conf_folder_says_so(self, project):
        with pytest.raises(ConfigError, match="nowhere"):
            compose(project / "params.yaml", project / "nowhere")


class TestAgreement:
    @pytest.fixture
    def config(self):
        root = Path(__file__).resolve().parents[1]
        return compose(root / "params.yaml", root / "conf")

    def test_the_committed_configuration_agrees_with_itself(self, config):
        check_agreement(config)

    @pytest.mark.parametrize(
        ("key", "value", "other", "remedy"),
        [
            ("evaluation.temperatures", [0.0, 1.5], "corpus.eval_temperatures", "add 1.5 to"),
            ("corpus.eval_temperatures", [0.7], "evaluation.temperatures", "add 0.0 to"),
            ("drift.temperature", 1.5, "evaluation.temperatures", "add 1.5 to"),
            ("gate.alpha_temperature", 1.5, "evaluation.temperatures", "add 1.5 to"),
            ("benchmark.max_draft_length", 99, "evaluation.draft_length", "to 99, or lower"),
            ("gate.min_prompts", 99, "benchmark.prompts", "to 99, or lower"),
        ],
    )
    def test_a_contradiction_names_both_keys_their_values_and_the_way_out(
        self, config, key, value, other, remedy
    ):
        section, name = key.split(".")
        config[section][name] = value
        with pytest.raises(ConfigError) as raised:
            check_agreement(config)
        other_section, other_name = other.split(".")
        assert f"`{key}: {value}`" in raised.value.found
        assert f"`{other}: {config[other_section][other_name]}`" in raised.value.found
        assert remedy in raised.value.remedy
        assert f"`{key}`" in raised.value.remedy
        assert f"`{other}`" in raised.value.remedy

    def test_the_benchmark_needs_survival_at_temperature_zero(self, config):
        config["evaluation"]["temperatures"] = [0.7]
        config["drift"]["temperature"] = config["gate"]["alpha_temperature"] = 0.7
        with pytest.raises(ConfigError, match=r"`evaluation\.temperatures: \[0\.7\]`.*benchmark"):
            check_agreement(config)

    def test_a_whole_number_is_the_same_temperature(self, config):
        config["evaluation"]["temperatures"] = [0]
        check_agreement(config)

    def test_a_key_that_has_a_default_may_be_left_out(self, config):
        del config["gate"]["min_prompts"]
        check_agreement(config)


class TestFiles:
    def test_written_and_read_back_alike(self, project):
        config = compose(project / "params.yaml", project / "conf")
        path = project / "build/config.yaml"
        write_config(path, config)
        assert path.read_text().startswith("# Written by the stage `compose`")
        assert load_section(path, "corpus", Corpus) == Corpus(
            num_self_prompts=10,
            temperatures=(0.0, 0.7),
            domain_weights={"0.7": 1.0, "chat": 2.0},
            seed=7,
        )
        assert OmegaConf.to_container(OmegaConf.load(path)) == config

    def test_the_text_does_not_depend_on_the_order_of_keys(self, tmp_path):
        write_config(tmp_path / "a.yaml", {"b": {"d": 1, "c": 2}, "a": 3})
        write_config(tmp_path / "b.yaml", {"a": 3, "b": {"c": 2, "d": 1}})
        assert (tmp_path / "a.yaml").read_text() == (tmp_path / "b.yaml").read_text()

    @pytest.mark.parametrize("value", [1e-4, 1e-7, 3e22, 0.1, "1e-4", "0.0", "yes", "null", None])
    def test_a_value_survives_with_its_type(self, tmp_path, value):
        write_config(tmp_path / "c.yaml", {"a": {"b": value}})
        read = OmegaConf.to_container(OmegaConf.load(tmp_path / "c.yaml"))
        assert read == {"a": {"b": value}}
        assert type(read["a"]["b"]) is type(value)  # type: ignore[index,call-overload]

    def test_a_dotted_section_is_found(self, tmp_path):
        write_config(tmp_path / "c.yaml", {"drafts": {"student": {"kind": "wsd"}}})
        assert load_section(tmp_path / "c.yaml", "drafts.student", Schedule).kind == "wsd"
        with pytest.raises(ConfigError, match=r"`drafts\.studnet`.*did you mean `student`"):
            load_section(tmp_path / "c.yaml", "drafts.studnet", Schedule)

    def test_a_missing_file_says_which_command_writes_it(self, tmp_path):
        with pytest.raises(ConfigError, match="dvc repro compose"):
            load_section(tmp_path / "config.yaml", "corpus", Corpus)

    def test_a_refused_write_leaves_the_old_file(self, tmp_path):
        (tmp_path / "file").write_text("old")
        with pytest.raises(ArtifactError):
            write_config(tmp_path / "file" / "config.yaml", {"a": 1})
        assert (tmp_path / "file").read_text() == "old"
        assert [path.name for path in tmp_path.iterdir()] == ["file"]

    def test_reading_a_section_does_not_import_hydra(self):
        code = "import sys, draftsmith.config; sys.exit('hydra' in sys.modules)"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
        assert done.returncode == 0
