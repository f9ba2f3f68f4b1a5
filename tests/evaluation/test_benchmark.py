"""Phases, prompts and choices of a benchmark: contestants have known costs on their own clock."""

from __future__ import annotations

import dataclasses
import types
from dataclasses import dataclass, field

import pytest

from draftsmith.artifacts import read_json, write_json
from draftsmith.decoding import Trace, Tree
from draftsmith.evaluation import timing
from draftsmith.evaluation.acceptance import in_turn
from draftsmith.evaluation.arms import Contestants
from draftsmith.evaluation.benchmark import Bench, PairBench
from draftsmith.evaluation.cost_model import ForwardCosts, RoundCosts, Survival
from draftsmith.evaluation.guesses import Guesses, served_tree
from draftsmith.evaluation.settings import BenchmarkConfig

CONFIG = BenchmarkConfig(
    max_draft_length=3,
    max_tree_nodes=6,
    calibration_prompts=2,
    calibration_tokens=4,
    prompts=3,
    max_new_tokens=6,
    assisted_lengths=(1, 2),
    batch_sizes=(1, 2),
    batch_tokens=5,
    repeats=1,
    seed=0,
)
# Seconds a token; the draft length 2 is the fastest.
COSTS = {
    "engine-0": 1.0,
    "engine-1": 0.8,
    "engine-2": 0.5,
    "engine-3": 0.7,
    "adaptive": 0.4,
    **{f"tree-{nodes}": 0.45 for nodes in range(1, 7)},
    "lookup-2": 0.9,
    "lookup-5": 0.9,
    "transformers": 1.25,
    "assisted-1": 2.0,
    "assisted-2": 1.5,
}
SURVIVAL = Survival([0.5, 0.25, 0.125])
GUESSES = Guesses([[0.5, 0.3], [0.5, 0.1]], [100, 50])
PHASES = ["calibration", "isolated forwards", "confirmation", "batches"]
TICK_S = 1e-6


class Killed(Exception):
    """What a test raises where a real run would be killed."""


class Phases:
    """Notes what is measured, and may end the run when a phase starts."""

    def __init__(self, kill_in=""):
        self.names, self.totals, self.num_done = [], {}, {}
        self._kill_in = kill_in

    def __call__(self, name, total):
        if name == self._kill_in:
            raise Killed
        self.names.append(name)
        self.totals[name], self.num_done[name] = total, 0

        def done(count):
            self.num_done[name] += count

        return done


class Clock:
    """Moves by a little on every look, so that no forward takes no time."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += TICK_S
        return self.now


@dataclass(frozen=True)
class PricedContestants(Contestants):
    """Real models for the isolated forwards; arms that move the clock and note their prompts."""

    clock: Clock = field(default_factory=Clock)
    seen: list[tuple[str, int, list[list[int]]]] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)

    def engine(self, draft_length, *, max_new_tokens, batch_size=1, tree=None):
        if tree is not None:
            return self._arm(f"tree-{tree.num_nodes}", max_new_tokens)
        return self._arm(f"engine-{draft_length}", max_new_tokens)

    def adaptive(self, lengths, *, max_new_tokens, batch_size=1):
        assert lengths.limit.draft == CONFIG.max_draft_length
        self.offered.append(lengths.trees.max_nodes)
        return self._arm("adaptive", max_new_tokens)

    def prompt_lookup(self, draft_length, *, max_new_tokens, batch_size=1):
        return self._arm(f"lookup-{draft_length}", max_new_tokens)

    def transformers(self, *, max_new_tokens):
        return self._arm("transformers", max_new_tokens)

    def assisted(self, draft_length, *, max_new_tokens):
        return self._arm(f"assisted-{draft_length}", max_new_tokens)

    def _arm(self, name, max_new_tokens):
        return PricedArm(self, name, max_new_tokens)


@dataclass
class PricedArm:
    """Commits its tokens in rounds of as many as its name counts drafts, and the target's own."""

    pair: PricedContestants
    name: str
    max_new_tokens: int
    traces: list[Trace] = field(default_factory=list)

    def __call__(self, prompts):
        self.pair.seen.append((self.name, self.max_new_tokens, prompts))
        tokens = self.max_new_tokens * len(prompts)
        self.pair.clock.now += tokens * COSTS[self.name]
        committed = 1 + int(self.name.partition("-")[2] or 0)
        trace = Trace()
        trace.record(drafted=committed - 1, accepted=committed - 1, committed=committed)
        self.traces.append(trace)
        return tokens


@pytest.fixture
def contestants(target, drafts, stop_ids, monkeypatch):
    priced = PricedContestants(target, drafts["student"], stop_ids)
    clock = types.SimpleNamespace(perf_counter=priced.clock.perf_counter)
    monkeypatch.setattr(timing, "time", clock)
    return priced


@pytest.fixture
def token_ids(prompts):
    return [ids for _, ids in prompts[:8]]


@pytest.fixture
def bench(contestants, token_ids, tmp_path):
    """`bench(on_phase=, **changes)` -> a benchmark with its partial work in one folder."""

    def make(on_phase=None, **changes):
        default = PairBench(CONFIG, contestants, token_ids, tmp_path, on_phase or Phases())
        return dataclasses.replace(default, **changes)

    return make


class TestEntry:
    def test_the_fastest_lengths_are_chosen_and_confirmed(self, bench):
        entry = bench().run(SURVIVAL)
        assert entry["draft_length"] == 2
        assert entry["arms"]["transformers_assisted"]["draft_length"] == 2
        assert [c["draft_length"] for c in entry["calibration"]] == [1, 2, 3]
        speedups = [c["speedup"] for c in entry["calibration"]]
        assert speedups == pytest.approx([1 / 0.8, 1 / 0.5, 1 / 0.7], rel=1e-3)
        assert entry["speedup"]["mean"] == pytest.approx(2.0, rel=1e-3)
        assert entry["speedup"]["num_prompts"] == CONFIG.prompts

    def test_every_ratio_is_that_of_its_two_arms(self, bench):
        entry = bench().run(SURVIVAL)
        speed = {name: arm["tokens_per_s"] for name, arm in entry["arms"].items()}
        for name, fast, slow in (
            ("engine_vs_generate", "gamma_0", "transformers_generate"),
            ("speculative_vs_generate", "speculative", "transformers_generate"),
            ("speculative_vs_assisted", "speculative", "transformers_assisted"),
            ("speculative_vs_prompt_lookup", "speculative", "prompt_lookup"),
        ):
            assert entry["ratios"][name]["mean"] == pytest.approx(speed[fast] / speed[slow])

    def test_every_batch_size_is_measured_without_drafts_and_as_it_is_served(self, bench):
        """To this clock a draft step costs as much as a target step: drafts pay in no batch."""
        alone, together = bench().run(SURVIVAL)["batch"]
        assert (alone["batch_size"], alone["draft_length"]) == (1, 2)
        assert alone["speedup"] == pytest.approx(2.0, rel=1e-3)
        assert (together["batch_size"], together["draft_length"]) == (2, 0)
        assert together["lookup_length"] == 0
        assert together["speedup"] == 1.0
        for part in (alone, together):
            rate = part["baseline_tokens_per_s"] * part["speedup"]
            assert part["tokens_per_s"] == pytest.approx(rate)

    def test_a_batch_is_served_at_the_lengths_that_promise_most(self, bench, contestants):
        copying = dataclasses.replace(contestants, lookup_length=5)
        survival = Survival(SURVIVAL.draft, copied_share=0.5, copied=[0.9, 0.9, 0.9, 0.8, 0.8])
        alone, together = bench(contestants=copying).run(survival)["batch"]
        assert (alone["draft_length"], alone["lookup_length"]) == (2, 5)
        assert (together["draft_length"], together["lookup_length"]) == (1, 5)
        assert together["speedup"] == pytest.approx(1 / 0.8, rel=1e-3)  # of draft length 1

    def test_lengths_that_adapt_are_measured_where_there_is_a_batch(self, bench):
        alone, together = bench().run(SURVIVAL)["batch"]
        assert "adaptive_speedup" not in alone
        assert together["adaptive_speedup"] == pytest.approx(2.5, rel=1e-3)
        rate = together["baseline_tokens_per_s"] * together["adaptive_speedup"]
        assert together["adaptive_tokens_per_s"] == pytest.approx(rate)

    def test_the_prediction_follows_from_survival_and_costs(self, bench):
        entry = bench().run(SURVIVAL)
        cost = entry["cost"]
        assert entry["expected_tau"] == 1 + sum(SURVIVAL.draft[:2])
        round_ms = 2 * cost["draft_step_ms"] + cost["verify_ms"]["3"]
        expected = entry["expected_tau"] * cost["target_step_ms"] / round_ms
        assert entry["predicted_speedup"] == pytest.approx(expected)
        assert set(cost["verify_ms"]) == {str(width) for width in range(1, 8)}  # of trees, too

    def test_tau_is_counted_on_what_is_served(self, bench):
        assert bench().run(SURVIVAL)["tau"] == 3.0  # two drafts and the target's own

    def test_a_tree_that_promises_more_is_served_and_measured_beside_the_chain(self, bench):
        """To this clock a verification costs the same whatever its width."""
        entry = bench().run(SURVIVAL, GUESSES)
        tree = Tree(tuple(entry["tree"]))
        assert tree.num_nodes > tree.depth
        assert entry["draft_length"] == tree.depth
        assert entry["expected_tau"] == pytest.approx(GUESSES.expected_tokens(tree))
        assert entry["tau"] == 1 + tree.num_nodes  # by these arms
        assert entry["speedup"]["mean"] == pytest.approx(1 / 0.45, rel=1e-3)
        assert entry["arms"]["chain"]["draft_length"] == 2
        assert entry["ratios"]["speculative_vs_chain"]["mean"] == pytest.approx(
            0.5 / 0.45, rel=1e-3
        )
        assert served_tree(entry, rows=1) == tree

    def test_trees_beside_copies_are_priced_by_measured_widths(self, bench, contestants):
        """Six nodes at most, five copied tokens at most, and the place before them."""
        copying = dataclasses.replace(contestants, lookup_length=5)
        survival = Survival(SURVIVAL.draft, copied_share=0.5, copied=[0.9, 0.9, 0.9, 0.8, 0.8])
        entry = bench(contestants=copying).run(survival, GUESSES)
        tree, cost = Tree(tuple(entry["tree"])), entry["cost"]
        assert set(cost["verify_ms"]) == {str(width) for width in range(1, 13)}
        drafted = tree.depth * cost["draft_step_ms"] + cost["verify_ms"][str(tree.num_nodes + 1)]
        round_ms = 0.5 * drafted + 0.5 * cost["verify_ms"]["6"]
        assert entry["predicted_speedup"] == pytest.approx(
            entry["expected_tau"] * cost["target_step_ms"] / round_ms
        )

    def test_lengths_that_adapt_may_draft_the_tree_of_their_batch(
        self, bench, contestants, monkeypatch
    ):
        cell = ForwardCosts(20.0, 2.0, {width: 20.0 + 0.1 * width for width in range(1, 8)})
        costs = RoundCosts((2,), (160,), {(2, 160): cell})
        monkeypatch.setattr("draftsmith.evaluation.benchmark.round_costs", lambda *_: costs)
        _, together = bench().run(SURVIVAL, GUESSES)["batch"]
        assert contestants.offered == [len(together["tree"])]
        assert contestants.offered[0] > together["draft_length"]

    def test_a_tree_that_is_slower_than_its_chain_is_not_served(self, bench, monkeypatch):
        slow = {name: 0.6 for name in COSTS if name.startswith("tree")}
        monkeypatch.setattr("tests.evaluation.test_benchmark.COSTS", COSTS | slow)
        entry = bench().run(SURVIVAL, GUESSES)
        assert (entry["tree"], entry["draft_length"]) == ([], 2)
        assert entry["speedup"]["mean"] == pytest.approx(2.0, rel=1e-3)
        assert entry["expected_tau"] == 1 + sum(SURVIVAL.draft[:2])
        assert entry["tau"] == 3.0  # of the chain
        arms = entry["arms"]
        assert arms["tree"]["tokens_per_s"] < arms["speculative"]["tokens_per_s"]
        tree = Tree(tuple(arms["tree"]["tree"]))
        assert arms["tree"]["draft_length"] == tree.depth < tree.num_nodes
        assert arms["tree"]["tau"] == 1 + tree.num_nodes  # of the tree
        assert arms["tree"]["expected_tau"] == pytest.approx(GUESSES.expected_tokens(tree))
        assert arms["tree"]["predicted_speedup"] > entry["predicted_speedup"]

    @pytest.mark.parametrize("seconds", [0.3, 0.9])
    def test_a_batch_is_served_the_faster_of_chain_and_tree(self, bench, monkeypatch, seconds):
        """The tree promises more; here a chain takes 0.5 s a token."""
        cell = ForwardCosts(20.0, 2.0, {width: 20.0 + 0.1 * width for width in range(1, 8)})
        costs = RoundCosts((2,), (160,), {(2, 160): cell})
        monkeypatch.setattr("draftsmith.evaluation.benchmark.round_costs", lambda *_: costs)
        priced = {name: seconds for name in COSTS if name.startswith("tree")}
        chains = dict.fromkeys(("engine-1", "engine-2", "engine-3"), 0.5)
        monkeypatch.setattr("tests.evaluation.test_benchmark.COSTS", COSTS | chains | priced)
        _, together = bench().run(SURVIVAL, GUESSES)["batch"]
        slower = together["slower"]
        assert together["tokens_per_s"] > slower["tokens_per_s"]
        assert together["speedup"] == pytest.approx(1 / min(seconds, 0.5), rel=1e-3)
        by_kind = {bool(each["tree"]): each for each in (together, slower)}
        assert by_kind[True]["predicted_speedup"] > by_kind[False]["predicted_speedup"]
        assert bool(together["tree"]) is (seconds < 0.5)

    def test_a_tree_that_promises_a_loss_is_not_tried(self, bench, contestants, monkeypatch):
        """Neither does a chain pay, and every round costs what features do."""
        cell = ForwardCosts(20.0, 19.0, dict.fromkeys(range(1, 8), 28.0))
        costs = RoundCosts((2,), (160,), {(2, 160): cell})
        monkeypatch.setattr("draftsmith.evaluation.benchmark.round_costs", lambda *_: costs)
        _, together = bench().run(SURVIVAL, GUESSES)["batch"]
        assert (together["draft_length"], together["tree"]) == (0, [])
        assert contestants.offered == [0]

    def test_without_nodes_nothing_but_chains_is_tried(self, bench):
        config = dataclasses.replace(CONFIG, max_tree_nodes=0)
        entry = bench(config=config).run(SURVIVAL, GUESSES)
        assert entry["tree"] == []
        assert "chain" not in entry["arms"]

    def test_the_entry_can_be_written(self, bench, tmp_path):
        entry = bench().run(SURVIVAL)
        write_json(tmp_path / "entry.json", entry)
        assert read_json(tmp_path / "entry.json") == entry


class TestPrompts:
    def test_calibration_and_confirmation_share_no_prompt(self, bench, contestants, token_ids):
        bench().run(SURVIVAL)
        used = {
            limit: [ids for _, n, prompts in contestants.seen if n == limit for ids in prompts]
            for limit in (CONFIG.calibration_tokens, CONFIG.max_new_tokens, CONFIG.batch_tokens)
        }
        calibration, confirmation, batches = (
            {tuple(ids) for ids in used[limit]}
            for limit in (CONFIG.calibration_tokens, CONFIG.max_new_tokens, CONFIG.batch_tokens)
        )
        assert calibration == {tuple(ids) for ids in token_ids[:2]}
        assert confirmation == {tuple(ids) for ids in token_ids[2:5]}
        assert batches <= confirmation

    def test_a_batch_is_filled_even_when_there_are_few_prompts(self, bench, contestants):
        config = dataclasses.replace(CONFIG, batch_sizes=(7,))
        bench(config=config).run(SURVIVAL)
        groups = [p for _, n, p in contestants.seen if n == CONFIG.batch_tokens]
        assert {len(group) for group in groups} == {7}

    def test_domains_take_turns_and_the_order_given_does_not_matter(self):
        prompts = [
            (f"{d}{i}", d, [ord(d), i]) for d in "cab" for i in range(3) if (d, i) != ("b", 2)
        ]
        expected = [[97, 0], [98, 0], [99, 0], [97, 1], [98, 1], [99, 1], [97, 2], [99, 2]]
        assert in_turn(prompts) == in_turn(prompts[::-1]) == expected

    def test_turns_follow_the_ids_so_a_sample_is_no_matter_of_names(self):
        prompts = [("7", "a", [7]), ("3", "b", [3]), ("5", "a", [5])]
        assert in_turn(prompts) == [[3], [5], [7]]


class TestKills:
    def test_all_phases_are_measured_and_told_of_their_work(self, bench):
        phases = Phases()
        bench(phases).run(SURVIVAL)
        assert phases.names == PHASES
        assert phases.totals["calibration"] == phases.num_done["calibration"] == 2
        assert phases.totals["confirmation"] == phases.num_done["confirmation"] == 3
        assert phases.totals["batches"] == phases.num_done["batches"] == 2

    @pytest.mark.parametrize("index", range(len(PHASES)))
    def test_finished_phases_are_not_measured_again(self, bench, contestants, index):
        with pytest.raises(Killed):
            bench(Phases(kill_in=PHASES[index])).run(SURVIVAL)
        contestants.seen.clear()
        phases = Phases()
        entry = bench(phases).run(SURVIVAL)
        assert phases.names == PHASES[index:]
        limits = {limit for _, limit, _ in contestants.seen}
        assert (CONFIG.calibration_tokens in limits) == (index == 0)
        assert entry == bench(Phases()).run(SURVIVAL)

    def test_without_a_folder_everything_is_measured_again(self, bench, tmp_path):
        for _ in range(2):
            phases = Phases()
            bench(phases, partial=None).run(SURVIVAL)
            assert phases.names == PHASES
        assert list(tmp_path.iterdir()) == []


class TestBench:
    """Whole measurements of a real pair, as small as they get."""

    SMALL = BenchmarkConfig(
        max_draft_length=1,
        max_tree_nodes=6,
        calibration_prompts=1,
        calibration_tokens=2,
        prompts=2,
        max_new_tokens=3,
        assisted_lengths=(1,),
        batch_sizes=(2,),
        batch_tokens=2,
        repeats=1,
        seed=0,
    )
    DEVICE = {"kind": "cpu", "name": "a"}

    @pytest.fixture
    def evaluated(self, drafts):
        digest = drafts["trimmed"].manifest.digest
        survival = {"0.0": [0.5, 0.25], "0.7": [0.0, 0.0]}
        names = {"recipe": "trimmed", "draft_digest": digest, "pair_digest": "7" * 64}
        copied = {"0.0": {"share": 0.5, "survival": [0.9, 0.6]}}
        return {
            **names,
            "survival": survival,
            "lookup_length": 2,
            "copied": copied,
            "prompts": [],
        }

    @pytest.fixture
    def measure(self, target, drafts, stop_ids, rollouts, evaluated, tmp_path):
        def run(on_phase, *, config=self.SMALL, device=None, chosen=rollouts):
            bench = Bench(config, target, stop_ids, chosen, on_phase)
            return bench.measure(
                drafts["trimmed"], evaluated, device=device or self.DEVICE, partial=tmp_path / "p"
            )

        return run

    def test_the_entry_names_the_pair_and_its_folder_is_removed(self, measure, evaluated, tmp_path):
        phases = Phases()
        entry = measure(phases)
        assert {key: entry[key] for key in ("recipe", "draft_digest", "pair_digest")} == {
            key: evaluated[key] for key in ("recipe", "draft_digest", "pair_digest")
        }
        assert entry["expected_tau"] == 1 + (0.5 + 1.5) / 2
        assert (entry["lookup_length"], entry["temperature"]) == (2, 0.0)
        assert {"2", "3"} <= set(entry["cost"]["verify_ms"])
        assert phases.names == PHASES
        assert list((tmp_path / "p").iterdir()) == []

    def test_a_killed_measurement_is_taken_up_and_its_folder_removed_at_the_end(
        self, measure, tmp_path
    ):
        with pytest.raises(Killed):
            measure(Phases(kill_in="batches"))
        (folder,) = (tmp_path / "p").iterdir()
        kept = read_json(folder / "confirmation.json")
        phases = Phases()
        entry = measure(phases)
        assert phases.names == ["batches"]
        assert entry["speedup"] == kept["speedup"]
        assert list((tmp_path / "p").iterdir()) == []

    def test_partial_work_of_another_measurement_is_not_used(self, measure, rollouts):
        with pytest.raises(Killed):
            measure(Phases(kill_in="batches"))
        others = {
            "device": {"device": {"kind": "cpu", "name": "b"}},
            "config": {"config": dataclasses.replace(self.SMALL, max_new_tokens=2)},
            "prompts": {"chosen": rollouts[10:]},
        }
        for name, change in others.items():
            phases = Phases()
            measure(phases, **change)
            assert (name, phases.names) == (name, PHASES)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("calibration_prompts", 0),
        ("calibration_prompts", 13),
        ("max_draft_length", 0),
        ("prompts", 0),
        ("repeats", 0),
        ("assisted_lengths", ()),
        ("assisted_lengths", (0,)),
    ],
)
def test_a_setting_out_of_range_is_refused(key, value):
    with pytest.raises(ValueError, match=key):
        dataclasses.replace(CONFIG, **{key: value})
