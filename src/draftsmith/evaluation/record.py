"""One recipe's entry of reports/evaluation.json.

Alpha, tau and survival by domain and temperature, and losslessness.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from draftsmith.artifacts import digest_json
from draftsmith.corpus.rollouts import Rollout
from draftsmith.decoding import NO_TREES, Event, Result, Tree, TreesByRows
from draftsmith.decoding.trace import accepted_fraction, position_counts
from draftsmith.drafts.checkpoint import load_draft
from draftsmith.drafts.joined import LoadedDraft
from draftsmith.drafts.manifest import read_manifest
from draftsmith.errors import EvidenceError
from draftsmith.evaluation.acceptance import (
    DecodingPlan,
    PromptAlpha,
    copied_rounds,
    decode,
    estimate_tau,
    in_turn,
    teacher_forced_alpha,
)
from draftsmith.evaluation.guesses import Guesses, served_trees
from draftsmith.evaluation.intervals import Estimate, bootstrap_mean, bootstrap_ratio_of_sums
from draftsmith.evaluation.losslessness import (
    SelfTest,
    corrupted_control,
    exact_equality,
    near_ties,
)
from draftsmith.evaluation.settings import EvaluationConfig
from draftsmith.targets.compatibility import require_same_tokenizer
from draftsmith.targets.identity import TargetIdentity

_DECODED_SECTIONS = (
    "tau",
    "survival",
    "position_counts",
    "conditional_acceptance",
    "accepted_fraction",
    "positions",
    "copied",
)

OnPhase = Callable[[str, int], Callable[[int], None]]


def _silent(_phase: str, _total: int) -> Callable[[int], None]:
    return lambda _done: None


@dataclass(frozen=True)
class Evaluator:
    """Measures drafts on one target.

    Attributes:
        config: The evaluation section.
        target: Live target in its serving dtype.
        identity: Which target it is.
        rollouts: The corpus' eval split.
        stop_ids: Ids that end a response.
        on_phase: Called with a name and a number of prompts when a phase starts; returns what is
            called as they finish.
    """

    config: EvaluationConfig
    target: PreTrainedModel
    identity: TargetIdentity
    rollouts: Sequence[Rollout]
    stop_ids: tuple[int, ...]
    on_phase: OnPhase = _silent

    def evaluate(self, directory: Path) -> dict[str, Any]:
        """The complete entry of the draft in `directory`."""
        draft = self.join(directory)
        record = self.acceptance(draft)
        decoded = {t: self._decode(draft, t) for t in self.config.temperatures}
        self._add_decoding(record, decoded)
        record["guesses"] = self._guesses(draft)
        record["lookup_length"] = self.config.lookup_length
        record["losslessness"] = self._losslessness(draft, directory)
        return record

    def join(self, directory: Path) -> LoadedDraft:
        """Load a draft beside the target; it may stem from another target with the same tokenizer.

        Raises:
            DraftError: The draft speaks another vocabulary, or is damaged.
        """
        require_same_tokenizer(self.identity, read_manifest(directory).tokenizer_digest)
        return load_draft(directory, self.target, target_digest=None)

    def acceptance(self, draft: LoadedDraft) -> dict[str, Any]:
        """Identity, alpha and the prompts' own alphas: what the incumbent test needs."""
        alphas = {t: self._alpha(draft, t) for t in self.config.temperatures}
        domains = {rollout.prompt_id: rollout.domain for rollout in self.rollouts}
        prompts = [
            {
                "prompt_id": prompt_id,
                "domain": domain,
                "alpha": {_key(t): a[prompt_id].alpha for t, a in alphas.items() if prompt_id in a},
                "num_tokens": {
                    _key(t): a[prompt_id].num_positions for t, a in alphas.items() if prompt_id in a
                },
            }
            for prompt_id, domain in domains.items()
        ]
        manifest = draft.manifest
        return {
            "recipe": manifest.recipe,
            "family": manifest.family,
            "draft_digest": manifest.digest,
            "pair_digest": digest_json({"target": self.identity.digest, "draft": manifest.digest}),
            "alpha": {_key(t): self._summarise(a, domains) for t, a in alphas.items()},
            "prompts": prompts,
            "vocabulary_coverage": self._coverage(draft),
        }

    def _rollouts_at(self, temperature: float) -> list[Rollout]:
        chosen = [r for r in self.rollouts if r.temperature == temperature]
        if not chosen:
            raise EvidenceError(
                f"evaluating at temperature {temperature}",
                found=f"eval rollouts at {sorted({r.temperature for r in self.rollouts})}",
                expected="the target's own rollouts at that temperature",
                remedy="add it to corpus.eval_temperatures",
            )
        return chosen

    def _alpha(self, draft: LoadedDraft, temperature: float) -> dict[str, PromptAlpha]:
        chosen = self._rollouts_at(temperature)
        done = self.on_phase(f"alpha at temperature {temperature}", len(chosen))
        return teacher_forced_alpha(
            self.target, draft, chosen, temperature=temperature, on_batch=done
        )

    def _summarise(
        self, alphas: Mapping[str, PromptAlpha], domains: Mapping[str, str]
    ) -> dict[str, Any]:
        return _by_domain(
            domains, list(alphas), lambda ids: self._mean([alphas[i].alpha for i in ids])
        )

    def _mean(self, values: Sequence[float]) -> Estimate:
        return bootstrap_mean(values, seed=self.config.seed)

    def _coverage(self, draft: LoadedDraft) -> float | None:
        if draft.token_ids is None:
            return None
        known = set(draft.token_ids.tolist())
        tokens = [token for rollout in self.rollouts for token in rollout.response_ids]
        return sum(token in known for token in tokens) / len(tokens)

    def _decode(self, draft: LoadedDraft, temperature: float) -> dict[str, Result]:
        chosen = _fair_order(self._rollouts_at(temperature))[: self.config.decoding_prompts]
        plan = self._plan(self.config.draft_length)
        return self._decoded(draft, "decoding", chosen, temperature, plan)

    def _decoded(
        self,
        draft: LoadedDraft,
        phase: str,
        chosen: Sequence[Rollout],
        temperature: float,
        plan: DecodingPlan,
    ) -> dict[str, Result]:
        done = self.on_phase(f"{phase} at temperature {temperature}", len(chosen))

        def on_event(event: Event) -> None:
            done(event.result is not None)

        prompts = [(rollout.prompt_id, rollout.prompt_ids) for rollout in chosen]
        return decode(
            self.target, draft, prompts, temperature=temperature, plan=plan, on_event=on_event
        )

    def _guesses(self, draft: LoadedDraft) -> dict[str, Any]:
        """How often each guess of a position is right, by temperature."""
        if not self.config.guesses:
            return {}
        temperature, comb = min(self.config.temperatures), Tree.comb(self.config.guesses)
        chosen = _fair_order(self._rollouts_at(temperature))[: self.config.guess_prompts]
        plan = self._plan(comb.depth, served_trees(comb, self.config.batch_size))
        results = self._decoded(draft, "guesses", chosen, temperature, plan)
        counted = Guesses.counted([result.trace for result in results.values()], comb)
        return {_key(temperature): asdict(counted)}

    def _plan(self, length: int, trees: TreesByRows = NO_TREES) -> DecodingPlan:
        config = self.config
        return DecodingPlan(
            length,
            config.lookup_length,
            config.max_new_tokens,
            config.batch_size,
            self.stop_ids,
            config.seed,
            trees,
        )

    def _add_decoding(
        self, record: dict[str, Any], decoded: Mapping[float, dict[str, Result]]
    ) -> None:
        domains = {rollout.prompt_id: rollout.domain for rollout in self.rollouts}
        for section in _DECODED_SECTIONS:
            record[section] = {}
        for temperature, results in decoded.items():
            traces = [result.trace for result in results.values()]
            counts = position_counts(traces, self.config.draft_length)
            key = _key(temperature)
            record["tau"][key] = _by_domain(domains, list(results), partial(self._tau, results))
            record["survival"][key] = counts.survival
            record["position_counts"][key] = counts.drafted
            record["conditional_acceptance"][key] = counts.conditional_acceptance
            record["accepted_fraction"][key] = accepted_fraction(traces)
            record["positions"][key] = self._positions(domains, results)
            record["copied"][key] = copied_rounds(traces, self.config.lookup_length)
        for prompt in record["prompts"]:
            traces_of = {
                _key(t): r[i].trace for t, r in decoded.items() if (i := prompt["prompt_id"]) in r
            }
            prompt["num_rounds"] = {key: trace.num_rounds for key, trace in traces_of.items()}
            prompt["tau"] = {
                key: sum(trace.committed) / trace.num_rounds for key, trace in traces_of.items()
            }

    def _positions(
        self, domains: Mapping[str, str], results: Mapping[str, Result]
    ) -> list[dict[str, Any]]:
        """Survival and conditional acceptance with intervals and by domain.

        One entry a draft position, as far as any round reached.
        """
        length = self.config.draft_length
        counts = {name: position_counts([r.trace], length) for name, r in results.items()}
        entries = []
        for place in range(length):
            accepted = {name: c.accepted[place] for name, c in counts.items()}
            shares = {
                "survival": {name: c.drafted[place] for name, c in counts.items()},
                "conditional_acceptance": {name: c.reached[place] for name, c in counts.items()},
            }
            if not any(shares["conditional_acceptance"].values()):
                break
            entries.append(
                {name: self._share(domains, accepted, rounds) for name, rounds in shares.items()}
            )
        return entries

    def _share(
        self, domains: Mapping[str, str], accepted: Mapping[str, int], rounds: Mapping[str, int]
    ) -> dict[str, Any]:
        """Accepted rounds over `rounds`, of the prompts that have any."""

        def estimate(ids: Sequence[str]) -> Estimate:
            return bootstrap_ratio_of_sums(
                [float(accepted[i]) for i in ids],
                [float(rounds[i]) for i in ids],
                seed=self.config.seed,
            )

        return _by_domain(domains, [name for name, count in rounds.items() if count], estimate)

    def _tau(self, results: Mapping[str, Result], prompt_ids: Sequence[str]) -> Estimate:
        traces = [results[prompt_id].trace for prompt_id in prompt_ids]
        return estimate_tau(traces, seed=self.config.seed)

    def _losslessness(self, draft: LoadedDraft, directory: Path) -> dict[str, Any]:
        prompts = [(r.prompt_id, r.prompt_ids) for r in _fair_order(self.rollouts)]
        config = self.config
        test = SelfTest(
            config.draft_length,
            config.lookup_length,
            config.self_test_tokens,
            self.stop_ids,
            Tree.comb(config.guesses) if config.guesses else None,
        )
        done = self.on_phase("losslessness self-test", 3)
        exact_target = copy.deepcopy(self.target).float()
        exact_draft = load_draft(directory, exact_target, target_digest=None)
        exact_prompts = prompts[: config.exact_prompts]
        fp32 = exact_equality(exact_target, exact_draft, exact_prompts, test)
        done(1)
        control = corrupted_control(exact_target, exact_draft, exact_prompts, test)
        del exact_target, exact_draft
        done(1)
        serving = near_ties(self.target, draft, prompts[: config.near_tie_prompts], test)
        done(1)
        dtype = str(self.target.dtype).removeprefix("torch.")
        return {
            "holds": fp32["holds"] and serving["holds"] and control["detected"],
            "fp32": fp32,
            "bf16": {"dtype": dtype, **serving},
            "control": control,
        }


def evaluation_report(
    records: Mapping[str, Mapping[str, Any]], config: EvaluationConfig, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of reports/evaluation.json, provenance left out.

    Args:
        records: Recipe -> its entry.
        config: The evaluation section.
        facts: corpus.json.
    """
    return {
        "schema": 1,
        "target_digest": facts["target_digest"],
        "corpus_digest": facts["digest"],
        "draft_length": config.draft_length,
        "lookup_length": config.lookup_length,
        "temperatures": [_key(temperature) for temperature in config.temperatures],
        "recipes": dict(records),
    }


def _fair_order(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """One rollout a prompt, the domains in turn."""
    by_prompt = {rollout.prompt_id: rollout for rollout in rollouts}
    return in_turn([(name, rollout.domain, rollout) for name, rollout in by_prompt.items()])


def _key(temperature: float) -> str:
    return str(float(temperature))


def _by_domain(
    domains: Mapping[str, str], prompt_ids: Sequence[str], estimate: Callable[[list[str]], Estimate]
) -> dict[str, Any]:
    """An estimate over all prompts with one of every domain inside."""
    groups: dict[str, list[str]] = {}
    for prompt_id in prompt_ids:
        groups.setdefault(domains[prompt_id], []).append(prompt_id)
    parts = {domain: asdict(estimate(ids)) for domain, ids in sorted(groups.items())}
    return {**asdict(estimate(list(prompt_ids))), "by_domain": parts}
