"""What cannot be served or does not belong together is refused with the reason."""

from __future__ import annotations

import pytest
from transformers import (
    FalconMambaConfig,
    Gemma3TextConfig,
    GPT2Config,
    JambaConfig,
    LlamaConfig,
    MambaConfig,
    MiniMaxConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
    RwkvConfig,
    T5Config,
)

from draftsmith.errors import DraftError, TargetError
from draftsmith.targets.compatibility import (
    refuse_unservable,
    require_same_tokenizer,
    require_target,
    require_vocabulary,
)
from draftsmith.targets.components import load_tokenizer
from draftsmith.targets.identity import identify

from .conftest import make_model


@pytest.mark.parametrize(
    "kind",
    [MambaConfig, FalconMambaConfig, RwkvConfig, JambaConfig, Qwen3NextConfig, MiniMaxConfig],
)
def test_models_whose_state_cannot_be_rolled_back_are_refused(kind, tmp_path):
    with pytest.raises(TargetError, match="rolled back"):
        refuse_unservable(kind(), tmp_path)


@pytest.mark.parametrize(
    "kind",
    [LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig, Gemma3TextConfig, GPT2Config],
)
def test_attention_models_are_accepted(kind, tmp_path):
    refuse_unservable(kind(), tmp_path)


def test_encoder_decoders_are_refused(tmp_path):
    with pytest.raises(TargetError, match="encoder-decoder"):
        refuse_unservable(T5Config(), tmp_path)


def test_quantised_safetensors_are_refused(tmp_path):
    config = LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(TargetError, match="quantised"):
        refuse_unservable(config, tmp_path)


def test_another_target_is_refused_with_both_digests(checkpoint):
    identity = identify(checkpoint, "auto")
    require_target(identity, identity.digest)
    with pytest.raises(TargetError, match=f"{identity.digest}.*{'a' * 64}"):
        require_target(identity, "a" * 64)


def test_another_tokenizer_is_refused_with_both_digests(checkpoint):
    identity = identify(checkpoint, "auto")
    require_same_tokenizer(identity, identity.tokenizer_digest)
    with pytest.raises(DraftError, match=f"{'b' * 64}.*{identity.tokenizer_digest}"):
        require_same_tokenizer(identity, "b" * 64)


@pytest.mark.parametrize(("rows", "fits"), [(259, False), (260, True), (320, True)])
def test_embedding_rows_may_exceed_token_ids_but_not_fall_short(checkpoint, rows, fits):
    make_model(rows=rows).save_pretrained(checkpoint)
    identity = identify(checkpoint, "auto")
    tokenizer = load_tokenizer(checkpoint)
    assert (identity.vocab_size, identity.tokenizer_size) == (rows, 260)
    if fits:
        require_vocabulary(identity, tokenizer, checkpoint)
        return
    with pytest.raises(TargetError, match="260 token ids and 259 embedding rows"):
        require_vocabulary(identity, tokenizer, checkpoint)
