from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from draftsmith.corpus.prompts import (
    bundled_prompts,
    distinct,
    is_eval,
    read_jsonl,
    user_prompt,
)
from draftsmith.errors import CorpusError

ROOT = Path(__file__).resolve().parents[2]
RUN_LENGTH = 8


def write_lines(path, *lines):
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def turns(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


@pytest.fixture(scope="module")
def bundled():
    return bundled_prompts()


@pytest.fixture(scope="module")
def default_fraction():
    return yaml.safe_load((ROOT / "conf/corpus/default.yaml").read_text())["eval_fraction"]


class TestReading:
    def test_a_line_holds_a_prompt_or_a_conversation(self, tmp_path):
        path = write_lines(
            tmp_path / "p.jsonl",
            {"prompt": "name a river"},
            {"messages": turns(("system", "be brief"), ("user", "name a lake"))},
        )
        one, two = read_jsonl(path, domain="general")
        assert one.messages == (("user", "name a river"),)
        assert two.messages == (("system", "be brief"), ("user", "name a lake"))
        assert two.as_messages() == turns(("system", "be brief"), ("user", "name a lake"))

    def test_a_label_comes_from_domain_then_category_then_the_source(self, tmp_path):
        path = write_lines(
            tmp_path / "p.jsonl",
            {"prompt": "a", "domain": "maths", "category": "other"},
            {"prompt": "b", "category": "code"},
            {"prompt": "c"},
            {"prompt": "d", "domain": None},
        )
        labels = [prompt.domain for prompt in read_jsonl(path, domain="general")]
        assert labels == ["maths", "code", "general", "general"]

    def test_assistant_turns_at_the_end_are_dropped_and_inner_ones_kept(self, tmp_path):
        chat = turns(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
        path = write_lines(tmp_path / "p.jsonl", {"messages": [*chat, *turns(("assistant", "e"))]})
        (prompt,) = read_jsonl(path, domain="general")
        assert prompt.messages == (("user", "a"), ("assistant", "b"), ("user", "c"))

    def test_a_line_ends_only_at_a_line_feed(self, tmp_path):
        text = "one\u2028two\u0085three\x0bfour"
        path = tmp_path / "p.jsonl"
        line = json.dumps({"prompt": text}, ensure_ascii=False)
        path.write_bytes(f"{line}\r\n{line}\n".encode())
        assert [p.messages[0][1] for p in read_jsonl(path, domain="general")] == [text, text]

    def test_blank_lines_are_skipped_and_still_counted(self, tmp_path):
        path = write_lines(tmp_path / "p.jsonl", "", {"prompt": "a"}, "   ", "{broken")
        reader = read_jsonl(path, domain="general")
        assert next(reader).messages == (("user", "a"),)
        with pytest.raises(CorpusError, match="line 4"):
            next(reader)

    @pytest.mark.parametrize(
        ("line", "found"),
        [
            ('{"prompt": "half', "no JSON"),
            ("[1, 2]", "a list"),
            ('"text"', "a str"),
            ({"prompt": "   "}, "without text"),
            ({"text": "a"}, "without text"),
            ({"messages": []}, "without text"),
            ({"messages": "user: a"}, "without text"),
            ({"messages": turns(("tool", "a"))}, "the message"),
            ({"messages": ["a"]}, "the message"),
            ({"messages": [{"content": "a"}]}, "the message"),
            ({"messages": [{"role": "user"}]}, "a user turn without text"),
            ({"messages": turns(("user", "  "))}, "a user turn without text"),
            ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "without text"),
            ({"messages": turns(("assistant", "a"))}, "no user turn"),
            ({"messages": turns(("user", "a"), ("system", "b"))}, "no user turn"),
        ],
    )
    def test_a_line_that_is_no_prompt_is_named(self, tmp_path, line, found):
        path = write_lines(tmp_path / "p.jsonl", {"prompt": "fine"}, line)
        with pytest.raises(CorpusError) as caught:
            list(read_jsonl(path, domain="general"))
        assert f"{path}, line 2" in caught.value.what
        assert found in caught.value.found

    @pytest.mark.parametrize("content", ["", "\n \n"])
    def test_an_empty_file_is_refused(self, tmp_path, content):
        path = tmp_path / "p.jsonl"
        path.write_text(content)
        with pytest.raises(CorpusError, match="an empty file"):
            list(read_jsonl(path, domain="general"))

    def test_a_file_that_is_missing_or_not_utf8_is_refused_by_name(self, tmp_path):
        (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
        for name in ("none.jsonl", "latin.jsonl"):
            with pytest.raises(CorpusError, match=name):
                list(read_jsonl(tmp_path / name, domain="general"))


class TestIdentity:
    def test_the_id_is_the_conversations_and_not_the_labels(self):
        assert user_prompt("a", "maths").prompt_id == user_prompt("a", "code").prompt_id
        assert user_prompt("a", "maths").prompt_id != user_prompt("b", "maths").prompt_id

    def test_the_id_depends_on_roles_and_on_where_turns_end(self, tmp_path):
        path = write_lines(
            tmp_path / "p.jsonl",
            {"messages": turns(("user", "a b"))},
            {"messages": turns(("user", "a"), ("user", "b"))},
            {"messages": turns(("system", "a"), ("user", "b"))},
            {"messages": turns(("assistant", "a"), ("user", "b"))},
        )
        ids = {prompt.prompt_id for prompt in read_jsonl(path, domain="general")}
        assert len(ids) == 4
        assert all(re.fullmatch("[0-9a-f]{16}", name) for name in ids)

    def test_duplicates_are_folded_over_case_and_white_space_and_the_first_stays(self):
        prompts = [
            user_prompt("Name a  river", "one"),
            user_prompt("name a\nriver ", "two"),
            user_prompt("name a lake", "three"),
        ]
        assert [prompt.domain for prompt in distinct(prompts)] == ["one", "three"]


class TestSplit:
    def test_a_prompts_side_does_not_change_when_prompts_are_added(self, bundled):
        fraction = 0.3
        alone = {p.prompt_id: is_eval(p, fraction) for p in bundled[::7]}
        together = {p.prompt_id: is_eval(p, fraction) for p in distinct(bundled)}
        assert alone == {name: together[name] for name in alone}

    @pytest.mark.parametrize("fraction", [0.1, 0.33, 0.5, 0.9])
    def test_the_share_held_out_is_close_to_the_fraction(self, bundled, fraction):
        share = sum(is_eval(prompt, fraction) for prompt in bundled) / len(bundled)
        assert share == pytest.approx(fraction, abs=0.06)

    def test_a_larger_fraction_only_adds_eval_prompts(self, bundled):
        assert all(is_eval(p, 0.5) for p in bundled if is_eval(p, 0.2))


class TestBundledPrompts:
    def test_there_are_enough_of_enough_domains(self, bundled):
        assert len(bundled) >= 300
        assert len({prompt.domain for prompt in bundled}) >= 6

    def test_ids_are_unique_and_nothing_is_said_twice(self, bundled):
        assert len({prompt.prompt_id for prompt in bundled}) == len(bundled)
        assert len(distinct(bundled)) == len(bundled)

    def test_every_domain_has_enough_eval_prompts_at_the_default_fraction(
        self, bundled, default_fraction
    ):
        held_out = Counter(p.domain for p in bundled if is_eval(p, default_fraction))
        assert set(held_out) == {prompt.domain for prompt in bundled}
        assert min(held_out.values()) >= 25
        assert held_out.total() >= 200

    def test_passages_to_be_summarised_are_long(self, bundled):
        passages = [passage(p.messages[-1][1]) for p in bundled if p.domain == "summarisation"]
        assert min(len(text.split()) for text in passages) >= 120

    def test_no_two_prompts_share_a_run_of_words(self, bundled):
        seen: dict[tuple[str, ...], int] = {}
        shared = []
        for index, prompt in enumerate(bundled):
            for run in runs_of_words(prompt.messages[-1][1]):
                if seen.setdefault(run, index) != index:
                    shared.append(" ".join(run))
        assert shared == []


def passage(text):
    """The text without its instruction: the shorter one of the first and the last paragraph."""
    paragraphs = text.split("\n\n")
    if len(paragraphs) == 1:
        return text
    ends = (paragraphs[0], paragraphs[-1])
    return text.replace(min(ends, key=len), "")


def runs_of_words(text):
    """All runs of eight words; lines with the punctuation of code break a run."""
    for block in re.split(r"\n[^\n]*[=;{}<>\[\]][^\n]*|```", text):
        words = re.findall(r"[^\W_]+(?:['’][^\W_]+)?", block.casefold())
        for start in range(len(words) - RUN_LENGTH + 1):
            yield tuple(words[start : start + RUN_LENGTH])
