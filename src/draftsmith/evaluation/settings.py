"""The `evaluation` and `benchmark` sections."""

from __future__ import annotations

from dataclasses import dataclass

_AT_LEAST_ONE = (
    "max_draft_length",
    "calibration_tokens",
    "prompts",
    "max_new_tokens",
    "batch_tokens",
    "repeats",
)


@dataclass(frozen=True)
class EvaluationConfig:
    """How acceptance and losslessness are measured.

    Attributes:
        draft_length: Tokens proposed in a round when survival and tau are measured.
        lookup_length: Tokens copied from the text where its last words occurred before, in the
            place of a draft; 0 never copies. Pairs are measured and served this way.
        temperatures: Each must be among the corpus' eval temperatures.
        decoding_prompts: Eval prompts decoded at each temperature, taken from all domains in turn;
            alpha is measured on all of them.
        guesses: By draft position how many guesses are tried, to find out how often each is right:
            what trees are chosen by. Empty leaves it out.
        guess_prompts: Eval prompts that are decoded for that, at the lowest temperature.
        max_new_tokens: Tokens decoded for an eval prompt.
        batch_size: Requests in flight.
        exact_prompts: Prompts of the float32 self-test.
        near_tie_prompts: Prompts of the self-test in the target's dtype.
        self_test_tokens: Tokens of a self-test prompt.
        seed: Of sampling and of the bootstrap.
    """

    draft_length: int
    lookup_length: int
    temperatures: tuple[float, ...]
    decoding_prompts: int
    guesses: tuple[int, ...]
    guess_prompts: int
    max_new_tokens: int
    batch_size: int
    exact_prompts: int
    near_tie_prompts: int
    self_test_tokens: int
    seed: int

    def __post_init__(self) -> None:
        """Check ranges."""
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError("temperatures must name at least one value, each 0 or more")
        sizes = (self.max_new_tokens, self.batch_size, self.self_test_tokens, self.draft_length)
        prompts = (self.decoding_prompts, self.exact_prompts, self.near_tie_prompts)
        if min(*sizes, *prompts, *self.guesses, self.guess_prompts) < 1:
            raise ValueError("lengths, sizes and prompt counts must be at least 1")
        if self.lookup_length < 0:
            raise ValueError(f"lookup_length must be at least 0, found {self.lookup_length}")


@dataclass(frozen=True)
class BenchmarkConfig:
    """How speed is measured. Budgets are prompts and tokens.

    Attributes:
        max_draft_length: Draft lengths 1 to this are calibrated.
        max_tree_nodes: Nodes of the largest tree that is priced beside chains; 0 leaves trees out.
        calibration_prompts: Prompts that choose the draft length, at most 12; others confirm it.
        calibration_tokens: Tokens of a calibration prompt.
        prompts: Prompts of the confirmation.
        max_new_tokens: Tokens of a confirmation prompt.
        assisted_lengths: Lengths that Transformers' assisted generation is tried at.
        batch_sizes: Batches of the engine.
        batch_tokens: Tokens of a request in a batch.
        repeats: Repetitions of an isolated forward; the median counts.
        seed: Of the bootstrap and of the choice of prompts.
    """

    max_draft_length: int
    max_tree_nodes: int
    calibration_prompts: int
    calibration_tokens: int
    prompts: int
    max_new_tokens: int
    assisted_lengths: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    batch_tokens: int
    repeats: int
    seed: int

    def __post_init__(self) -> None:
        """Check ranges."""
        if not 1 <= self.calibration_prompts <= 12:  # noqa: PLR2004  stated above
            raise ValueError("calibration_prompts must lie between 1 and 12")
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.max_tree_nodes < 0:
            raise ValueError(f"max_tree_nodes must be at least 0, found {self.max_tree_nodes}")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError("batch_sizes must name at least one size >= 1")
        if not self.assisted_lengths or min(self.assisted_lengths) < 1:
            raise ValueError("assisted_lengths must name at least one length >= 1")
