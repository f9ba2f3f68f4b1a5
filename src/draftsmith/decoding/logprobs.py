"""Log-probabilities of committed tokens: the target's own, before any sampling parameter.

The logits are those that verified the round, so no forward is added; each token is looked up at the
position that decided it, whether it was drafted or drawn there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from draftsmith.decoding.batch import to_device
from draftsmith.decoding.request import TokenLogprobs


def token_logprobs(
    logits: Tensor,
    committed: Sequence[Sequence[int]],
    num_top: Mapping[int, int],
    places: Sequence[Sequence[int]],
) -> dict[int, list[TokenLogprobs]]:
    """Log-probabilities of a round, for the rows that want them; copies from the device.

    Args:
        logits: The target's, `[rows, positions, vocab]`.
        committed: By row its tokens.
        num_top: Row -> how many of the most probable tokens it wants.
        places: By row the positions of the logits that decided them.

    Returns:
        Row -> one entry a token.
    """
    found = {}
    for row, wanted in num_top.items():
        tokens = committed[row]
        decided = to_device(places[row][: len(tokens)], logits.device)
        scores = logits[row, decided].float().log_softmax(-1)
        index = to_device(tokens, scores.device)[:, None]
        chosen = scores.gather(-1, index).squeeze(-1).tolist()
        top = scores.topk(min(wanted, scores.shape[-1]), dim=-1)
        ranked = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        found[row] = [
            TokenLogprobs(logprob, tuple(zip(ids, values, strict=True)))
            for logprob, (ids, values) in zip(chosen, ranked, strict=True)
        ]
    return found
