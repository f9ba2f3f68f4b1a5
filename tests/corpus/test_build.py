"""The corpus of a small fitted target, from all kinds of sources."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import datasets
import pytest

from draftsmith.artifacts import digest_directory, write_json
from draftsmith.corpus.build import CorpusBuilder
from draftsmith.corpus.dataset import read_facts, read_split
from draftsmith.corpus.prompts import bundled_prompts, is_eval, user_prompt
from draftsmith.corpus.settings import CorpusConfig, SourceConfig
from draftsmith.decoding import Engine, NoProposer
from draftsmith.errors import CorpusError
from tests.tiny_target import conversations

FRACTION = 0.4
TRAIN_TEMPERATURES = (0.0, 0.7)
EVAL_TEMPERATURES = (0.0, 0.7)
DIGEST = "5" * 64


class Killed(BaseException):  # nothing may notice it
    """What a test raises where a real run would be killed."""


class Phases:
    """Notes the phases that decode, and may end a run after some results of one."""

    def __init__(self, kill_in="", after=0):
        self.totals = {}
        self.num_done = Counter()
        self._kill_in, self._after = kill_in, after

    def __call__(self, name, total):
        self.totals[name] = total

        def on_event(event):
            self.num_done[name] += event.result is not None
            if name == self._kill_in and self.num_done[name] == self._after:
                raise Killed

        return on_event


def questions(start, stop):
    return [(domain, text) for domain, text, _ in conversations("home")[start:stop]]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Sources by name: `file` and `more` are JSONL, `saved` is a datasets folder."""
    folder = tmp_path_factory.mktemp("sources")
    for name, rows in (("file", questions(0, 24)), ("more", questions(24, 40))):
        lines = [json.dumps({"prompt": text, "domain": domain}) for domain, text in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_list([{"prompt": text} for _, text in questions(40, 48)])
    data.save_to_disk(str(folder / "saved"))
    return {
        "file": SourceConfig(kind="jsonl", path=str(folder / "file.jsonl")),
        "more": SourceConfig(kind="jsonl", path=str(folder / "more.jsonl")),
        "saved": SourceConfig(kind="dataset", path=str(folder / "saved"), domain="saved"),
        "bundled": SourceConfig(kind="bundled", count=10),
        "self": SourceConfig(kind="self", count=20),
    }


@pytest.fixture(scope="module")
def builder(target, chat, sources, tmp_path_factory):
    """`builder("file", "self", on_phase=, partial=, **settings)`."""

    def make(*names, on_phase=None, partial=None, **settings):
        config = CorpusConfig(
            sources=tuple(sources[name] for name in names),
            **{
                "eval_fraction": FRACTION,
                "train_temperatures": TRAIN_TEMPERATURES,
                "eval_temperatures": EVAL_TEMPERATURES,
                "max_prompt_tokens": 200,
                "max_new_tokens": 6,
                "min_eval_prompts": 2,
                "batch_size": 16,
                "shard_size": 4,
                "seed": 0,
                **settings,
            },
        )
        folder = partial or tmp_path_factory.mktemp("partial")
        engine = Engine(target, NoProposer(), max_rows=config.batch_size, draft_length=0)
        return CorpusBuilder(config, DIGEST, engine, chat, folder, on_phase or Phases())

    return make


@pytest.fixture(scope="module")
def whole(builder, tmp_path_factory):
    """A corpus from all kinds of sources: the folder, its facts and the phases."""
    directory, phases = tmp_path_factory.mktemp("whole") / "corpus", Phases()
    facts = builder("bundled", "file", "saved", "self", on_phase=phases).build(directory)
    return directory, facts, phases


def rows(directory):
    return read_split(directory, "train") + read_split(directory, "eval")


def temperatures_by_prompt(directory, split):
    answered = {}
    for row in read_split(directory, split):
        answered[row.prompt_id] = (*answered.get(row.prompt_id, ()), row.temperature)
    return answered


class TestContent:
    def test_every_source_contributes_and_a_count_limits_it(self, whole):
        prompts = {(row.prompt_id, row.domain) for row in rows(whole[0])}
        by_domain = Counter(domain for _, domain in prompts)
        assert by_domain["chat"] == 10
        assert by_domain["walk"] + by_domain["meal"] == 24
        assert by_domain["saved"] == 8
        assert 1 <= by_domain["self-written"] <= 20

    def test_the_first_prompts_of_a_source_are_taken(self, whole):
        first = {prompt.prompt_id for prompt in bundled_prompts()[:10]}
        assert {row.prompt_id for row in rows(whole[0]) if row.domain == "chat"} == first

    def test_prompts_hold_the_exact_ids_of_the_template(self, whole, chat):
        known = {
            prompt.prompt_id: chat.prompt_ids(prompt)
            for prompt in [
                *bundled_prompts()[:10],
                *(user_prompt(text, domain) for domain, text in questions(0, 48)),
            ]
        }
        for row in rows(whole[0]):
            if row.domain != "self-written":
                assert row.prompt_ids == known[row.prompt_id]

    def test_no_prompt_is_on_both_sides_and_the_hash_decides(self, whole):
        train, held_out = (
            {(row.prompt_id, row.domain) for row in read_split(whole[0], split)}
            for split in ("train", "eval")
        )
        assert not {name for name, _ in train} & {name for name, _ in held_out}
        expected = {
            prompt.prompt_id
            for prompt in [
                *bundled_prompts()[:10],
                *(user_prompt(text, domain) for domain, text in questions(0, 24)),
                *(user_prompt(text, "saved") for _, text in questions(40, 48)),
            ]
            if is_eval(prompt, FRACTION)
        }
        assert {name for name, _ in held_out} == expected

    def test_the_target_is_not_evaluated_on_prompts_that_it_wrote_itself(self, whole):
        assert "self-written" not in {row.domain for row in read_split(whole[0], "eval")}

    def test_every_eval_prompt_is_answered_at_every_temperature(self, whole):
        assert set(temperatures_by_prompt(whole[0], "eval").values()) == {EVAL_TEMPERATURES}

    def test_training_prompts_take_turns(self, whole):
        answered = Counter(temperatures_by_prompt(whole[0], "train").values())
        assert set(answered) == {(temperature,) for temperature in TRAIN_TEMPERATURES}
        assert min(answered.values()) > 0.3 * answered.total()

    def test_training_prompts_are_answered_as_often_as_is_asked_for(self, builder, tmp_path):
        builder("file", train_answers=2).build(tmp_path / "corpus")
        answered = temperatures_by_prompt(tmp_path / "corpus", "train").values()
        assert set(map(frozenset, answered)) == {frozenset(TRAIN_TEMPERATURES)}
        assert {len(temperatures) for temperatures in answered} == {2}

    def test_the_facts_are_those_of_the_rows(self, whole):
        directory, facts, phases = whole
        assert read_facts(directory) == facts
        assert facts["target_digest"] == DIGEST
        for split in ("train", "eval"):
            split_rows = read_split(directory, split)
            by_domain = Counter(
                domain for _, domain in {(r.prompt_id, r.domain) for r in split_rows}
            )
            assert facts["prompts"][split] == by_domain
            assert facts["response_tokens"][split] == sum(len(r.response_ids) for r in split_rows)
            used = Counter(str(row.temperature) for row in split_rows)
            assert facts["temperatures"][split] == used
        assert phases.totals["rollouts"] == phases.num_done["rollouts"] == len(rows(directory))

    def test_prompts_longer_than_the_limit_are_left_out(self, builder, chat, tmp_path):
        limit = 60
        builder("bundled", "file", max_prompt_tokens=limit).build(tmp_path / "corpus")
        lengths = [len(chat.prompt_ids(prompt)) for prompt in bundled_prompts()[:10]]
        kept = {row.prompt_id for row in rows(tmp_path / "corpus") if row.domain == "chat"}
        assert len(kept) == sum(length <= limit for length in lengths) < 10

    def test_a_corpus_of_self_written_prompts_alone_is_split_as_well(self, builder, tmp_path):
        facts = builder("self", min_eval_prompts=1).build(tmp_path / "corpus")
        assert (
            min(facts["prompts"]["eval"]["self-written"], facts["prompts"]["train"]["self-written"])
            >= 1
        )


class TestDigest:
    def test_an_equal_corpus_has_an_equal_digest(self, builder, tmp_path):
        first, second = (builder("file").build(tmp_path / name)["digest"] for name in "ab")
        assert first == second

    @pytest.mark.parametrize(
        "change",
        [
            {"seed": 1},
            {"max_new_tokens": 5},
            {"eval_fraction": 0.5},
            {"eval_temperatures": (0.0,)},
            {"train_temperatures": (0.0,)},
            {"train_answers": 2},
        ],
    )
    def test_whatever_changes_responses_changes_it(self, builder, tmp_path, change):
        before = builder("file").build(tmp_path / "a")["digest"]
        after = builder("file", **change).build(tmp_path / "b")["digest"]
        assert before != after

    def test_the_words_of_self_written_prompts_do_not_but_their_settings_do(
        self, builder, sources, tmp_path
    ):
        first = builder("file", "self", partial=tmp_path / "partial").build(tmp_path / "a")
        (kept,) = (tmp_path / "partial" / "self").iterdir()
        write_json(kept, {"prompts": ["A turn that another machine wrote."]})
        second = builder("file", "self", partial=tmp_path / "partial").build(tmp_path / "b")
        assert first["prompts"] != second["prompts"]
        assert first["digest"] == second["digest"]
        more = dataclasses.replace(sources["self"], count=19)
        config = dataclasses.replace(builder("file").config, sources=(sources["file"], more))
        third = dataclasses.replace(builder("file"), config=config).build(tmp_path / "c")
        assert third["digest"] != first["digest"]

    def test_how_the_work_is_cut_does_not(self, builder, tmp_path):
        first = builder("file").build(tmp_path / "a")
        second = builder("file", batch_size=3, shard_size=5).build(tmp_path / "b")
        assert first == second
        assert rows(tmp_path / "a") == rows(tmp_path / "b")


def test_adding_prompts_leaves_the_old_ones_on_their_side_with_their_responses(builder, tmp_path):
    builder("file").build(tmp_path / "before")
    builder("bundled", "more", "file", "self").build(tmp_path / "after")
    for split in ("train", "eval"):
        before = {row.key: row for row in read_split(tmp_path / "before", split)}
        after = {row.key: row for row in read_split(tmp_path / "after", split)}
        assert {key: after.get(key) for key in before} == before
        assert len(after) > len(before)


def test_a_renamed_domain_reaches_the_corpus_and_nothing_is_decoded_again(
    builder, sources, tmp_path
):
    phases, names = Phases(), ("file", "saved")
    before = builder(*names, partial=tmp_path / "partial").build(tmp_path / "before")
    again = builder(*names, partial=tmp_path / "partial", on_phase=phases)
    renamed = (sources["file"], dataclasses.replace(sources["saved"], domain="anew"))
    config = dataclasses.replace(again.config, sources=renamed)
    after = dataclasses.replace(again, config=config).build(tmp_path / "after")
    assert phases.totals == {"rollouts": 0}
    assert after["digest"] == before["digest"]
    domains = {"saved": "anew"}
    assert rows(tmp_path / "after") == [
        dataclasses.replace(row, domain=domains.get(row.domain, row.domain))
        for row in rows(tmp_path / "before")
    ]
    for split, counts in before["prompts"].items():
        new = {domains.get(name, name): count for name, count in counts.items()}
        assert after["prompts"][split] == new


def test_equal_prompts_of_two_sources_are_answered_once(builder, sources, tmp_path):
    twice = builder("file", "file").build(tmp_path / "twice")
    assert twice == builder("file").build(tmp_path / "once")


def test_a_killed_build_samples_and_decodes_nothing_again(builder, tmp_path):
    names, partial = ("file", "self"), tmp_path / "partial"
    builder(*names).build(tmp_path / "unbroken")
    killed = builder(*names, partial=partial, on_phase=Phases("rollouts", after=10))
    with pytest.raises(Killed):
        killed.build(tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()
    phases = Phases()
    builder(*names, partial=partial, on_phase=phases).build(tmp_path / "corpus")
    assert list(phases.totals) == ["rollouts"]
    found = 8  # two shards of four
    assert phases.num_done["rollouts"] == phases.totals["rollouts"]
    assert phases.totals["rollouts"] == len(rows(tmp_path / "corpus")) - found
    # Byte for byte, or `dvc repro` would distil again.
    assert digest_directory(tmp_path / "corpus") == digest_directory(tmp_path / "unbroken")


class TestErrors:
    @pytest.fixture
    def previous(self, builder, tmp_path):
        """A corpus that is there already, and a check that it is untouched."""
        directory = tmp_path / "data" / "corpus"
        builder("file").build(directory)
        digest = digest_directory(directory)
        yield directory
        assert digest_directory(directory) == digest
        assert [path.name for path in directory.parent.iterdir()] == ["corpus"]

    def test_too_few_eval_prompts_are_counted(self, builder, previous):
        wanted = sum(is_eval(user_prompt(t, d), FRACTION) for d, t in questions(0, 24))
        with pytest.raises(CorpusError) as caught:
            builder("file", min_eval_prompts=25).build(previous)
        assert f"{wanted} eval and {24 - wanted} training prompts" in caught.value.found
        assert "25 eval prompts" in caught.value.expected

    def test_a_corpus_without_training_prompts_is_refused(self, builder, previous):
        with pytest.raises(CorpusError, match="24 eval and 0 training"):
            builder("file", eval_fraction=1 - 1e-9).build(previous)

    def test_a_broken_source_is_named(self, builder, sources, previous, tmp_path):
        (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": 3}\n')
        config = builder("file").config
        broken = SourceConfig(kind="jsonl", path=str(tmp_path / "broken.jsonl"))
        config = dataclasses.replace(config, sources=(*config.sources, broken))
        with pytest.raises(CorpusError, match=r"broken\.jsonl, line 2"):
            dataclasses.replace(builder("file"), config=config).build(previous)

    def test_a_kill_in_the_middle_is_no_loss(self, builder, previous):
        with pytest.raises(Killed):
            builder("file", "more", on_phase=Phases("rollouts", 5)).build(previous)
