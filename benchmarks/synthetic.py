"""A target and a draft of realistic shape and random weights, with a stated acceptance.

Where no weights can be carried, the cost of a system can still be measured, if drafts are accepted
as often as real ones: by every decoder alike and with nothing replaced inside any of them. So the
weights are random but for two things. What attention and MLP add to the residual stream is made
small, and the output rows are the input embeddings in another order, scaled. The most probable next
token, by far, is then a fixed permutation of the last token. The draft's permutation differs from
the target's in a given share of the tokens: there it is rejected. A walk over a permutation hits
such tokens independently, so acceptance is the stated one at every position and temperature.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from draftsmith.drafts.joined import LoadedDraft
from draftsmith.drafts.manifest import CAUSAL_LM, SCHEMA, DraftManifest

_BRANCH_SCALE = 1e-3
_LOGIT = 40.0  # of the next token; all others are near 0


@dataclass(frozen=True)
class Size:
    """Dimensions of a Llama."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    key_heads: int
    vocab: int


# What a team would serve, and a draft that it would serve it with.
SHAPES = {
    "tiny": (Size(64, 128, 2, 4, 2, 512), Size(32, 64, 1, 2, 1, 512)),
    "1b": (Size(2048, 8192, 16, 32, 8, 128_256), Size(768, 2048, 4, 12, 4, 128_256)),
    "8b": (Size(4096, 14_336, 32, 32, 8, 128_256), Size(2048, 8192, 4, 32, 8, 128_256)),
}


def build_pair(
    shape: str, acceptance: float, *, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> tuple[PreTrainedModel, LoadedDraft]:
    """Target and draft.

    Args:
        shape: One of `SHAPES`.
        acceptance: Share of the tokens after which both expect the same next token.
        device: Where the weights are made.
        dtype: Of the weights.
        seed: Of weights and permutations.
    """
    sizes = SHAPES[shape]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(sizes[0].vocab, generator=generator)
    nexts = torch.empty_like(order)
    nexts[order] = order.roll(-1)  # one cycle: no text repeats itself before all tokens have come
    torch.manual_seed(seed)
    target = _model(sizes[0], nexts, device, dtype)
    guesses = disagreeing(nexts, 1 - acceptance, generator)
    draft = _model(sizes[1], guesses, device, dtype)
    return target, LoadedDraft(draft, None, _manifest(shape))


def disagreeing(nexts: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """A permutation that differs from `nexts` (int64 `[vocab]`) in `share` of its entries."""
    chosen = torch.randperm(len(nexts), generator=generator)[: round(share * len(nexts))]
    other = nexts.clone()
    other[chosen] = nexts[chosen.roll(1)]
    return other


@torch.no_grad()
def _model(size: Size, nexts: Tensor, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    model.to(device).eval().requires_grad_(requires_grad=False)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(_BRANCH_SCALE)
        layer.mlp.down_proj.weight.mul_(_BRANCH_SCALE)
    embedding = model.get_input_embeddings().weight
    typical = float(embedding[:64].float().pow(2).mean().sqrt())
    scaled = embedding * (_LOGIT / (typical * size.hidden))
    model.get_output_embeddings().weight[nexts.to(device)] = scaled
    return model


def _manifest(shape: str) -> DraftManifest:
    """Of a draft that was never trained: what the arms ask for is its family."""
    none = "0" * 64
    return DraftManifest(
        schema=SCHEMA,
        family=CAUSAL_LM,
        recipe=f"synthetic-{shape}",
        recipe_digest=none,
        digest=none,
        weights_digest=none,
        vocabulary_digest=None,
        target_digest=none,
        tokenizer_digest=none,
        corpus_digest=none,
        architecture={},
        training={},
    )


def prompts(vocab_size: int, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of one length."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count, length), generator=generator).tolist()
