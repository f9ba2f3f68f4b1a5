"""A loaded pair: text in, text out, through the lossless engine.

Its text ends before a stop string, while the token ids go on to the token that completed it, as in
Transformers' `generate`. Knows neither where the pair came from nor how it is registered. Each
engine has running requests, drafts and caches of its own, so several may take turns; one thread
drives them all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from draftsmith.artifacts import digest_json
from draftsmith.decoding import (
    AnswerText,
    Engine,
    Lengths,
    LookupFirstProposer,
    Request,
    Sampling,
    SamplingParams,
    TokenText,
    Tree,
    with_lookup,
)
from draftsmith.decoding.matching import LosslessMode, require_lossless
from draftsmith.decoding.proposers import Proposer
from draftsmith.decoding.request import require_known
from draftsmith.drafts.joined import LoadedDraft
from draftsmith.errors import TargetError
from draftsmith.evaluation.adaptive import AdaptiveLengths
from draftsmith.evaluation.arms import Contestants, copies_alone
from draftsmith.evaluation.choice import served_lengths
from draftsmith.evaluation.cost_model import Survival
from draftsmith.evaluation.guesses import (
    Guesses,
    measured_trees,
    served_tree,
    served_trees,
    with_trees,
)
from draftsmith.evaluation.profiling import Grid, cost_key, held_costs, kept_costs, round_costs
from draftsmith.registry.advice_table import nearest_entry
from draftsmith.registry.generated import Generation
from draftsmith.registry.pair import PairRecord
from draftsmith.targets.loading import LoadedTarget

if TYPE_CHECKING:
    from transformers import LogitsProcessor

Messages = Sequence[Mapping[str, str]]
REQUEST_ID = "0"
_MAX_NEW_TOKENS = 128
_ANY_SIZE = 1 << 30
LONGEST = Lengths(draft=8, copy=12)  # that an adaptive length may choose
_LEAST_WIDTH = 28  # drafts that kept costs cover: a tree of 16 nodes beside such copies

DraftLength = int | Literal["adaptive"]


class Pair:
    """A target and its draft, ready to generate.

    Attributes:
        record: Which pair this is.
        evidence: Name of an evidence file without `.json` -> its content.
        target: Loaded for the draft.
        draft: Joined to the target.
        draft_length: Tokens that the draft proposes in a round unless a call says otherwise.
        lookup_length: Tokens copied from the text in the draft's place where they can be.
        token_text: What the target's tokens spell.
    """

    def __init__(  # noqa: PLR0913  each is read from a file of its own
        self,
        record: PairRecord,
        evidence: Mapping[str, Any],
        *,
        target: LoadedTarget,
        draft: LoadedDraft,
        measured: Mapping[str, Any],
        costs: Path,
        advice: Mapping[str, Any] | None = None,
    ) -> None:
        """Join a target and a draft that were loaded for one another.

        Args:
            record: Which pair this is.
            evidence: What is known of it.
            target: The target.
            draft: The draft.
            measured: The benchmark record of the nearest device, which says how long drafts and
                copies are unless a call does; empty where nothing was measured.
            costs: Folder in which measured costs of an adaptive length are kept.
            advice: What `draftsmith advise` found of this pair on this device; its choice of
                lengths counts before that of the benchmark.
        """
        self.record = record
        self.evidence = dict(evidence)
        self.target, self.draft = target, draft
        self._measured = measured
        self._advice = advice
        self.draft_length = self.lengths_at(1).draft
        self.lookup_length = served_lengths(measured, rows=1)[1]
        self._costs = costs
        self.token_text = TokenText(target.tokenizer)
        self._adaptive: dict[int, AdaptiveLengths] = {}

    def generate(
        self,
        messages_or_text: Messages | str,
        *,
        draft_length: DraftLength | None = None,
        verify: LosslessMode = "rejection",
        logits_processors: Sequence[LogitsProcessor] = (),
        **sampling: Unpack[Sampling],
    ) -> Generation:
        """Continue a chat or a text exactly as the target alone would.

        Args:
            messages_or_text: A chat (`[{"role": ..., "content": ...}]`), or a text: one user turn
                where the target has a chat template, a plain prefix where it has none.
            draft_length: Tokens proposed in a round; None takes what was found best,
                "adaptive" the chain or tree that pays for this text now, by costs that are measured
                at the first such call on this device and kept.
            verify: "match" makes a seed's answer independent of the drafts; see `Engine`.
            logits_processors: Of Transformers; they need `verify="match"`.
            **sampling: Fields of `SamplingParams`; greedy and at most 128 new tokens unless they
                say otherwise. `stop_token_ids` are added to those that end the target's turns.

        Raises:
            DecodingError: A parameter is out of range or not supported, or the context is too long.
            TargetError: A chat was given and the target has no chat template.
        """
        request = self._request(messages_or_text, logits_processors, sampling)
        engine = self.engine(draft_length, verify=verify)
        start = time.perf_counter()
        result = engine.generate([request])[0]
        seconds = time.perf_counter() - start
        text = AnswerText(self.token_text, request.params.stop_strings)
        return Generation.of(request, result, text.add(result.token_ids, result), seconds=seconds)

    def stream(
        self,
        messages_or_text: Messages | str,
        *,
        draft_length: DraftLength | None = None,
        verify: LosslessMode = "rejection",
        logits_processors: Sequence[LogitsProcessor] = (),
        **sampling: Unpack[Sampling],
    ) -> Iterator[str]:
        """As `generate`, yielding the text in pieces; their concatenation is the same text.

        What may yet become a stop string is held back until it is known.
        """
        request = self._request(messages_or_text, logits_processors, sampling)
        return self._pieces(request, self.engine(draft_length, verify=verify))

    def _pieces(self, request: Request, engine: Engine) -> Iterator[str]:
        text = AnswerText(self.token_text, request.params.stop_strings)
        for event in engine.stream([request]):
            if piece := text.add(event.token_ids, event.result):
                yield piece

    def _request(
        self,
        messages_or_text: Messages | str,
        logits_processors: Sequence[LogitsProcessor],
        sampling: Sampling,
    ) -> Request:
        require_known(sampling)
        given: Sampling = {"max_new_tokens": _MAX_NEW_TOKENS, **sampling}
        stop_ids = {*self.stop_token_ids(), *given.get("stop_token_ids", ())}
        given["stop_token_ids"] = tuple(sorted(stop_ids))
        return Request(
            REQUEST_ID,
            self.encode(messages_or_text),
            SamplingParams(**given),
            logits_processors=tuple(logits_processors),
        )

    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids that ended turns in the corpus, too: generation config and tokenizer."""
        configured = self.target.model.generation_config.eos_token_id
        ids = configured if isinstance(configured, list) else [configured]
        known = {int(i) for i in [*ids, self.target.tokenizer.eos_token_id] if i is not None}
        return tuple(sorted(known))

    def engine(
        self,
        draft_length: DraftLength | None = None,
        *,
        max_rows: int = 1,
        verify: LosslessMode = "rejection",
    ) -> Engine:
        """An engine that decodes with this pair; it has drafts and caches of its own.

        Args:
            draft_length: As in `generate`.
            max_rows: Requests in flight at once.
            verify: As in `generate`.

        Raises:
            DecodingError: `verify` is lossy.
        """
        require_lossless(verify, what="decoding with a pair")
        proposer: Proposer
        if draft_length == "adaptive":
            adaptive = self._adaptive_lengths(max_rows)
            drafter = self.draft.proposer(trees=adaptive.trees)
            proposer = LookupFirstProposer(drafter, adaptive)
            longest = max(adaptive.limit)
        else:
            lengths, tree = self._served(max_rows)
            if draft_length is not None:
                copies = lengths.copy if any(lengths) else self.lookup_length
                lengths, tree = Lengths(draft_length, copies if draft_length else 0), None
            if lengths.draft == 0 and lengths.copy:
                proposer, longest = copies_alone(), lengths.copy
            else:
                drafter = self.draft.proposer(trees=served_trees(tree, max_rows))
                proposer, longest = with_lookup(drafter, *lengths)
        return Engine(
            self.target.model,
            proposer,
            max_rows=max_rows,
            draft_length=longest,
            verify=verify,
            token_text=self.token_text,
        )

    def lengths_at(self, max_rows: int) -> Lengths:
        """The lengths that were found best for so many requests in flight; 0 and 0 is nothing."""
        return self._served(max_rows)[0]

    def tree_at(self, max_rows: int) -> Tree | None:
        """The tree that was found best for so many requests in flight; None is a chain."""
        return self._served(max_rows)[1]

    def _served(self, max_rows: int) -> tuple[Lengths, Tree | None]:
        """What was advised on requests of usual length, else what the benchmark chose."""
        told = self._advice and nearest_entry(
            self._advice, rows=max_rows, temperature=self._benchmark_temperature
        )
        if not told:
            tree = served_tree(self._measured, rows=max_rows)
            return Lengths(*served_lengths(self._measured, rows=max_rows)), tree
        parents = tuple(told["tree"])
        lengths = Lengths(told["draft_length"], told["copy_length"])
        return lengths, Tree(parents) if parents else None

    @property
    def chain_length(self) -> int:
        """The best draft length for engines that draft no trees."""
        return int(self._measured.get("chain_length", self.draft_length))

    def _adaptive_lengths(self, max_rows: int) -> AdaptiveLengths:
        """One for all calls: what a request taught serves the next."""
        if max_rows not in self._adaptive:
            models, grid = (self.target.model, self.draft.model), self._grid(max_rows)
            costs = kept_costs(
                self._costs, self._cost_key(max_rows), partial(round_costs, *models, grid)
            )
            self._adaptive[max_rows] = AdaptiveLengths(
                costs,
                self._longest,
                self._recorded_survival(),
                measured_trees(self._measured, rows=max_rows),
                self._recorded_guesses(),
            )
        return self._adaptive[max_rows]

    def has_costs(self, max_rows: int) -> bool:
        """Whether the costs of an adaptive length were measured on this device for so many rows."""
        return held_costs(self._costs, self._cost_key(max_rows)) is not None

    @property
    def _longest(self) -> Lengths:
        longest = LONGEST._replace(draft=min(LONGEST.draft, self.draft.max_draft_length))
        return longest if self.lookup_length else longest._replace(copy=0)

    def _grid(self, max_rows: int) -> Grid:
        longest = self._longest
        trees = measured_trees(self._measured, rows=max_rows)
        nodes = [tree.num_nodes_with(longest.copy) for tree in trees]
        width = max(_LEAST_WIDTH, *longest, *nodes) + 1
        return Grid.covering(max_rows=max_rows, max_width=width)

    def _cost_key(self, max_rows: int) -> dict[str, Any]:
        """By what takes time: pairs of one target whose drafts have one shape share their costs."""
        state = self.draft.model.state_dict()
        draft = {
            "family": self.draft.manifest.family,
            "shapes": {name: list(tensor.shape) for name, tensor in state.items()},
        }
        models = digest_json({"target": self.record.target_digest, "draft": draft})
        return cost_key(models, self.target.model, self._grid(max_rows))

    @property
    def _benchmark_temperature(self) -> float:
        return float(self.evidence.get("benchmark", {}).get("temperature", 0.0))

    def _recorded_survival(self) -> Survival:
        """As evaluated at the temperature of the benchmark; nothing where there is no evidence."""
        try:
            return Survival.recorded(self.evidence["evaluation"], self._benchmark_temperature)
        except KeyError:
            return Survival(())

    def _recorded_guesses(self) -> Guesses:
        """The same of the guesses in trees."""
        counted = self.evidence.get("evaluation", {}).get("guesses", {})
        return Guesses.recorded(counted.get(str(self._benchmark_temperature)))

    def contestants(self) -> Contestants:
        """The pair as benchmarks drive it."""
        return Contestants(self.target.model, self.draft, self.stop_token_ids(), self.lookup_length)

    def survivals(self) -> dict[float, Survival]:
        """Measured acceptance by temperature, that of served trees included; empty if unknown."""
        evaluated = self.evidence.get("evaluation", {})
        trees = measured_trees(self._measured, rows=_ANY_SIZE)
        guesses = self._recorded_guesses()
        return {
            float(key): with_trees(Survival.recorded(evaluated, float(key)), guesses, trees)
            for key in evaluated.get("alpha", ())
        }

    def encode(self, messages_or_text: Messages | str) -> list[int]:
        """Token ids of a prompt; see `generate`.

        Raises:
            TargetError: A chat was given and the target has no chat template.
        """
        tokenizer = self.target.tokenizer
        has_template = tokenizer.chat_template is not None
        if isinstance(messages_or_text, str):
            if not has_template:
                return list(tokenizer(messages_or_text).input_ids)
            messages: Messages = [{"role": "user", "content": messages_or_text}]
        else:
            messages = messages_or_text
        if not has_template:
            raise TargetError(
                "encoding a chat",
                found="a target without a chat template",
                expected="a chat template in the target's tokenizer",
                remedy="pass a text, or add chat_template.jinja to the checkpoint",
            )
        chat = [dict(message) for message in messages]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False).input_ids)
