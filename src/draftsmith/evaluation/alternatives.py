"""What else would make the target faster: other dtypes and int8 weights, with and without drafts.

Each alternative is decoded in turn with the served target on the same prompts. It is another
target: its law is not the served one's, so how many greedy tokens stay the same is stated beside
its speed. Nothing here is ever served.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.artifacts import read_json, write_json
from draftsmith.corpus.rollouts import Rollout
from draftsmith.decoding import Lengths
from draftsmith.evaluation.arms import Contestants
from draftsmith.evaluation.deadline import Deadline
from draftsmith.evaluation.int8 import can_be_int8, with_int8_linears
from draftsmith.evaluation.sweep import OnDone
from draftsmith.evaluation.timing import Arm, Timings, interleave, speed_ratio
from draftsmith.targets.loading import available_bytes

INT8 = "int8"
SCHEMES = (INT8, "bfloat16", "float32")  # most telling first
_MOST_GROUPS = 8
_FEWEST_GROUPS = 2
_MOST_ARMS = 3
_COMPARED = 24  # answers whose tokens are compared

Groups = Iterator[list[list[int]]]


@dataclass(frozen=True)
class AlternativeRun:
    """Measures alternatives to a served target.

    Attributes:
        pair: The pair; nothing may stop its answers, so that they are as long as asked.
        prompts: Real texts of one length, in a circle; called anew for each measurement.
        greedy: The served target's greedy answers.
        new_tokens: Of each answer.
        group_s: Seconds that the served target is expected to take for a batch of that size.
        folder: Where finished measurements are kept.
    """

    pair: Contestants
    prompts: Callable[[], Iterator[list[int]]]
    greedy: Sequence[Rollout]
    new_tokens: int
    group_s: Callable[[int], float]
    folder: Path

    def run(
        self,
        lengths: Mapping[int, Lengths],
        deadline: Deadline,
        *,
        on_done: OnDone = lambda _done: None,
    ) -> list[dict[str, Any]]:
        """One entry a scheme and batch size; a scheme that cannot be measured says why.

        Args:
            lengths: Draft and copy lengths by batch size.
            deadline: The time until then is spread evenly. Each is decoded on two groups of prompts
                at least, or left out where these would take too long.
            on_done: Called with 1 after each scheme.
        """
        entries: list[dict[str, Any]] = []
        for place, scheme in enumerate(SCHEMES):
            reason = left_out(self.pair.target, scheme)
            if reason is not None:
                entries.append({"scheme": scheme, "left_out": reason})
            else:
                entries += self._measured(scheme, lengths, deadline, len(SCHEMES) - place)
            on_done(1)
        return entries

    def _path(self, scheme: str, size: int, at: Lengths) -> Path:
        return self.folder / f"alternative-{scheme}-{size}-{at.draft}-{at.copy}.json"

    def _measured(
        self, scheme: str, lengths: Mapping[int, Lengths], deadline: Deadline, num_schemes: int
    ) -> list[dict[str, Any]]:
        model: PreTrainedModel | None = None
        same: float | None = None
        entries: list[dict[str, Any]] = []
        late: list[int] = []
        for place, (size, at) in enumerate(lengths.items()):
            path = self._path(scheme, size, at)
            least_s = _MOST_ARMS * (1 + _FEWEST_GROUPS) * self.group_s(size)
            if not path.exists() and not deadline.allows(least_s):
                late.append(size)
                continue
            if not path.exists():
                if model is None:
                    model = as_scheme(self.pair.target, scheme)
                    same = same_greedy_tokens(model, self.greedy[:_COMPARED])
                part = deadline.part(1 / (num_schemes * len(lengths) - place))
                entry = {"scheme": scheme, "same_greedy_tokens": same}
                write_json(path, entry | self._compare(model, size, at, part))
            entries.append(read_json(path))
        if late:
            batches = ", ".join(map(str, late))
            reason = f"no time left of the budget for batches of {batches}"
            entries.append({"scheme": scheme, "left_out": reason, "late": late})
        return entries

    def _compare(
        self, model: PreTrainedModel, size: int, at: Lengths, deadline: Deadline
    ) -> dict[str, Any]:
        other = replace(self.pair, target=model, lookup_length=at.copy)
        arms: dict[str, Arm] = {
            "served": self.pair.engine(0, max_new_tokens=self.new_tokens, batch_size=size),
            "drafting": other.engine(at.draft, max_new_tokens=self.new_tokens, batch_size=size),
        }
        is_served = model is self.pair.target
        if not is_served:
            arms["other"] = other.engine(0, max_new_tokens=self.new_tokens, batch_size=size)
        timings = interleave(arms, self._groups(size, deadline))
        alone = timings["served" if is_served else "other"]
        return {
            "batch_size": size,
            "draft_length": at.draft,
            "copy_length": at.copy,
            "ratio": _ratio(alone, timings["served"]),
            "reading_ratio": _ratio(alone.start, timings["served"].start),
            "decoding_ratio": _ratio(alone.decoding, timings["served"].decoding),
            "ratio_with_drafts": _ratio(timings["drafting"], timings["served"]),
            "keeps_the_targets_law": is_served,
        }

    def _groups(self, size: int, deadline: Deadline) -> Groups:
        """Groups of prompts until the time is over."""
        circle = self.prompts()
        for index in range(_MOST_GROUPS):
            if index >= _FEWEST_GROUPS and deadline.left_s < 0:
                return
            yield list(itertools.islice(circle, size))


def _ratio(arm: Timings, served: Timings) -> dict[str, Any]:
    """Speed over that of the served target without drafts."""
    return asdict(speed_ratio(arm, served, seed=0))


def left_out(target: PreTrainedModel, scheme: str) -> str | None:
    """Why a scheme cannot be measured on the target's device; None where it can."""
    if scheme == INT8:
        if target.device.type != "cpu":
            return "int8 linear layers are measured on a CPU only"
        if not any(map(can_be_int8, target.modules())):
            return "the target has no linear layers of a size that torch's kernel takes"
        return None
    dtype = getattr(torch, scheme)
    if dtype == target.dtype:
        return None
    # It is copied first and converted behind that.
    size = max(dtype.itemsize, target.dtype.itemsize)
    needed = sum(parameter.numel() for parameter in target.parameters()) * size
    if target.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(target.device)
    else:
        free = available_bytes()
    return f"needs {needed / 1e9:.1f} GB of {free / 1e9:.1f} GB" if needed > free else None


def as_scheme(target: PreTrainedModel, scheme: str) -> PreTrainedModel:
    """The target in a dtype, or with int8 linear layers; itself where that is its dtype."""
    if scheme == INT8:
        return with_int8_linears(target)
    dtype = getattr(torch, scheme)
    if dtype == target.dtype:
        return target
    other = copy.deepcopy(target)
    for parameter in other.parameters():  # buffers keep theirs: rotary frequencies are float32
        parameter.data = parameter.data.to(dtype)
    return other


@torch.inference_mode()
def same_greedy_tokens(model: PreTrainedModel, greedy: Sequence[Rollout]) -> float | None:
    """Share of the served target's greedy tokens that a model gives behind the same text.

    Args:
        model: Another target over the same vocabulary.
        greedy: Prompts with the served target's answers at temperature 0.

    Returns:
        In [0, 1]; the served target itself may miss 1 by near-ties. None without answers.
    """
    same = total = 0
    for rollout in greedy:
        if not rollout.response_ids:
            continue
        text = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids]], device=model.device)
        places = slice(len(rollout.prompt_ids) - 1, text.shape[1] - 1)
        found = model(input_ids=text, use_cache=False).logits[0, places].argmax(-1)
        same += int((found == text[0, len(rollout.prompt_ids) :]).sum())
        total += len(rollout.response_ids)
    return same / total if total else None


def pays_instead(
    entries: Sequence[Mapping[str, Any]], batch_size: int, reading: float, *, least: float = 1.0
) -> dict[str, Any] | None:
    """The fastest alternative without drafts that surely beats what is there; None if none.

    Args:
        entries: What `AlternativeRun` found.
        batch_size: Of a workload. Between two measured sizes the larger one counts, beyond all of
            them the largest; nothing beyond those that there was time for.
        reading: Share of the served target's time that goes into reading the workload's prompts.
        least: Speed to be beaten, over that of the served target without drafts.

    Returns:
        Its `scheme` and `ratio`: what was measured of reading and of decoding, by their shares.
    """
    sizes = sorted({entry["batch_size"] for entry in entries if "batch_size" in entry})
    if not sizes:
        return None
    is_cut = any(late > sizes[-1] for entry in entries for late in entry.get("late", ()))
    if is_cut and batch_size > sizes[-1]:
        return None
    size = next((measured for measured in sizes if measured >= batch_size), sizes[-1])
    found: list[dict[str, Any]] = [
        {"scheme": entry["scheme"], "ratio": _weighed(entry, reading)}
        for entry in entries
        if entry.get("batch_size") == size and not entry["keeps_the_targets_law"]
    ]
    faster = [entry for entry in found if entry["ratio"]["low"] > least]
    return max(faster, key=lambda entry: entry["ratio"]["mean"], default=None)


def _weighed(entry: Mapping[str, Any], reading: float) -> dict[str, float]:
    """A workload's ratio, from those of its parts."""
    read, decoded = entry["reading_ratio"], entry["decoding_ratio"]
    return {
        bound: 1 / (reading / read[bound] + (1 - reading) / decoded[bound])
        for bound in ("mean", "low", "high")
    }
