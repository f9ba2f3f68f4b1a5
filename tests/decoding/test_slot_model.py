from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
)

from draftsmith.decoding.slot_model import SlotModel, layer_windows
from draftsmith.decoding.steps import Inputs
from draftsmith.errors import DecodingError

KINDS = ["llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt2"]
LENGTH = 24  # three windows of the sliding models

pytestmark = pytest.mark.usefixtures("inference")


@pytest.fixture
def inference():
    with torch.inference_mode():
        yield


def sequences(rows: int, length: int) -> torch.Tensor:
    return torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(rows))


def advance(slots: SlotModel, tokens: torch.Tensor, starts: list[int], width: int) -> torch.Tensor:
    """Feed `width` tokens of every row from its own start."""
    positions = torch.tensor(starts)[:, None] + torch.arange(width)
    chosen = tokens.gather(1, positions)
    return slots.forward(chosen, positions, span=max(starts) + width)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_any_width_give_the_logits_of_one_full_forward(family, kind):
    models = family(kind)
    tokens = sequences(2, LENGTH)
    want = models.reference(tokens, use_cache=False).logits
    slots = SlotModel(models.target)
    slots.reserve(rows=2, slots=LENGTH)
    start = 0
    for width in (1, 2, 7, 1, 5, 8):
        got = advance(slots, tokens, [start, start], width)
        torch.testing.assert_close(got, want[:, start : start + width], rtol=1e-4, atol=1e-4)
        start += width
    assert start == LENGTH


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_rows_give_the_logits_of_their_own_sequences(family, kind):
    models = family(kind)
    tokens = sequences(3, LENGTH)
    want = models.reference(tokens, use_cache=False).logits
    slots = SlotModel(models.target)
    slots.reserve(rows=3, slots=LENGTH)
    starts = [1, 9, 18]
    advance(slots, tokens, [0, 0, 0], max(starts))
    got = advance(slots, tokens, starts, 5)
    for row, start in enumerate(starts):
        torch.testing.assert_close(got[row], want[row, start : start + 5], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_stale_slots_behind_a_row_are_never_seen(family, kind):
    models = family(kind)
    tokens, other = sequences(2, LENGTH), sequences(2, LENGTH).flip(1)
    want = models.reference(tokens, use_cache=False).logits
    slots = SlotModel(models.target)
    slots.reserve(rows=2, slots=LENGTH)
    advance(slots, other, [0, 0], LENGTH)  # a whole other sequence, then rolled back to nothing
    advance(slots, tokens, [0, 0], 10)
    advance(slots, other, [10, 10], 6)  # speculated, then rolled back
    got = advance(slots, tokens, [10, 10], 4)
    torch.testing.assert_close(got, want[:, 10:14], rtol=1e-4, atol=1e-4)


def test_rows_from_first_row_on_leave_the_rows_before_them_alone(llama):
    tokens = sequences(3, 8)
    slots = SlotModel(llama.target)
    slots.reserve(rows=3, slots=8)
    positions = torch.arange(8).expand(3, 8)
    slots.forward(tokens, positions, span=8)
    before = [layer.keys.clone() for layer in slots.cache.layers]
    slots.forward(tokens[:2].flip(1), positions[:2], span=8, first_row=1)
    for old, layer in zip(before, slots.cache.layers, strict=True):
        assert layer.keys[0].equal(old[0])
        assert not layer.keys[1].equal(old[1])


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_masks_are_added_never_boolean(family, kind):
    """Some attention implementations add a boolean mask where they should apply it."""
    positions = torch.tensor([[3], [9]])
    inputs = Inputs(positions, positions, positions)
    masks = SlotModel(family(kind).target)._masks(inputs, 16)
    for mask in masks.values() if isinstance(masks, dict) else [masks]:
        assert mask.dtype == torch.float32
        assert set(mask.unique().tolist()) == {0.0, -torch.inf}


def test_only_the_last_logits_are_kept_on_request(llama):
    tokens = sequences(2, 8)
    slots = SlotModel(llama.target)
    slots.reserve(rows=2, slots=8)
    positions = torch.arange(8).expand(2, 8)
    every = slots.forward(tokens, positions, span=8)
    last = slots.forward(tokens, positions, span=8, keep=2)
    assert last.shape == (2, 2, 64)
    torch.testing.assert_close(last, every[:, -2:], rtol=1e-5, atol=1e-5)


def test_a_prefill_needs_no_logits_and_writes_the_same_cache(llama):
    tokens, positions = sequences(2, 8), torch.arange(8).expand(2, 8)
    caches = []
    for keep in (0, None):
        slots = SlotModel(llama.target)
        slots.reserve(rows=2, slots=8)
        logits = slots.forward(tokens, positions, span=8, keep=keep)
        assert logits.shape == (2, 0 if keep == 0 else 8, 64)
        caches.append(slots.cache.layers)
    for bare, whole in zip(*caches, strict=True):
        assert bare.keys.equal(whole.keys)
        assert bare.values.equal(whole.values)


@pytest.mark.parametrize(("rows", "keep"), [(1, 1), (1, 3), (4, 1), (4, 3)])
def test_the_head_is_never_given_a_slice(llama, rows, keep):
    """A slice of [rows, 8, width] keeps the strides of 8 positions: torch's slow matmul."""
    strides = []
    head = llama.target.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, inputs: strides.append(inputs[0].stride()))
    slots = SlotModel(llama.target)
    slots.reserve(rows=rows, slots=8)
    slots.forward(sequences(rows, 8), torch.arange(8).expand(rows, 8), span=8, keep=keep)
    hook.remove()
    assert strides == [torch.empty(rows, keep, 32).stride()]


def test_a_larger_cache_is_kept_and_a_smaller_one_replaced(llama):
    slots = SlotModel(llama.target)
    slots.reserve(rows=4, slots=100)
    first = slots.cache
    assert (first.rows, first.slots) == (4, 128)  # slots come in units of 64
    slots.reserve(rows=2, slots=128)
    assert slots.cache is first
    slots.reserve(rows=5, slots=10)
    assert slots.cache is not first


@pytest.mark.parametrize("kind", KINDS)
def test_a_cleared_row_is_as_good_as_new(family, kind):
    models = family(kind)
    tokens = sequences(2, LENGTH)
    want = models.reference(tokens, use_cache=False).logits
    slots = SlotModel(models.target)
    slots.reserve(rows=2, slots=LENGTH)
    advance(slots, tokens, [0, 0], LENGTH)
    for layer in slots.cache.layers:
        layer.keys[1], layer.values[1] = torch.nan, torch.nan
    slots.clear_row(1)
    got = advance(slots, tokens, [0, 0], 5)  # masked slots lie behind these
    torch.testing.assert_close(got, want[:, :5], rtol=1e-4, atol=1e-4)


def test_the_position_limit_is_the_models(family):
    assert SlotModel(family("llama", max_positions=32).target).max_positions == 32
    assert SlotModel(family("gpt2", max_positions=32).target).max_positions == 32


def test_layer_kinds_and_windows_come_from_the_configuration():
    full, sliding = "full_attention", "sliding_attention"
    assert layer_windows(LlamaConfig()) == {full: None}
    assert layer_windows(MistralConfig(sliding_window=8)) == {sliding: 8}
    assert layer_windows(MistralConfig(sliding_window=None)) == {full: None}
    mixed = Gemma3TextConfig(num_hidden_layers=2, sliding_window=8, layer_types=[sliding, full])
    assert layer_windows(mixed) == {full: None, sliding: 8}


def _sizes(**special):
    return {
        "vocab_size": 16,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        **special,
    }


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (Qwen3NextConfig(**_sizes(num_experts=2)), "linear_attention"),
        (RecurrentGemmaConfig(**_sizes()), "linear_attention"),
        (MambaConfig(vocab_size=16, hidden_size=16, num_hidden_layers=2), "linear_attention"),
        (Llama4TextConfig(**_sizes(head_dim=8)), "chunked_attention"),
    ],
)
def test_kinds_whose_state_cannot_be_rolled_back_are_refused(config, found):
    with pytest.raises(DecodingError, match=found):
        layer_windows(config)


def test_a_recurrent_model_is_refused_before_it_is_changed():
    config = MambaConfig(vocab_size=16, hidden_size=16, num_hidden_layers=2, state_size=4)
    model = AutoModelForCausalLM.from_config(config)
    before = model.config._attn_implementation
    with pytest.raises(DecodingError, match="cannot be rolled back|can be rolled back"):
        SlotModel(model)
    assert model.config._attn_implementation == before


def test_a_class_with_attention_of_its_own_is_refused_by_name():
    config = GPTNeoConfig(
        vocab_size=32,
        hidden_size=16,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        num_heads=2,
        max_position_embeddings=32,
    )
    with pytest.raises(DecodingError, match="GPTNeoForCausalLM"):
        SlotModel(GPTNeoForCausalLM(config))
