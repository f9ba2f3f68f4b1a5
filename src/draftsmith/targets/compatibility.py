"""Whether a target can be served here at all, and whether something else belongs to it.

Pure checks on identities, configs and tokenizers; reads no files.
"""

from __future__ import annotations

from pathlib import Path

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedTokenizerFast

from draftsmith.errors import DraftError, DraftMisfitError, TargetError
from draftsmith.targets.checkpoint import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE
from draftsmith.targets.identity import TargetIdentity

# Layers whose only state is keys and values by position: moving the length back undoes a token.
_ROLLBACK_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})

# Recurrent families whose configs need not list layer types.
_RECURRENT_TYPES = frozenset(
    {"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma"}
)


def require_target(identity: TargetIdentity, expected_digest: str, *, what: str = "pair") -> None:
    """Check that the target at hand is the one that `what` was made for.

    Raises:
        TargetError: Another target; both digests are named.
    """
    if identity.digest != expected_digest:
        raise TargetError(
            f"matching the target with the {what}",
            found=f"target {identity.digest}",
            expected=f"target {expected_digest}",
            remedy=f"load the target that the {what} was made for, or run `dvc repro` on this one",
        )


def require_same_tokenizer(
    identity: TargetIdentity, tokenizer_digest: str, *, what: str = "draft"
) -> None:
    """Check that `what` reads text as the target does: token ids must mean the same.

    Raises:
        DraftError: Another tokenizer; both digests are named.
    """
    if identity.tokenizer_digest != tokenizer_digest:
        raise DraftError(
            f"matching the tokenizer of the {what} with the target's",
            found=f"tokenizer {tokenizer_digest}",
            expected=f"tokenizer {identity.tokenizer_digest}",
            remedy=f"distil the {what} from this target, or load the target it was distilled from",
        )


def require_same_rows(rows: int, wanted: int, directory: Path) -> None:
    """Check that a whole model in `directory` gives every one of the target's ids a probability.

    Raises:
        DraftMisfitError: It has more or fewer rows in its vocabulary.
    """
    if rows != wanted:
        raise DraftMisfitError(
            f"joining the draft in {directory} to its target",
            found=f"{rows} output rows",
            expected=f"{wanted}, as the target has",
            remedy="take a draft of the target's own family and vocabulary",
        )


def refuse_unservable(config: PreTrainedConfig, directory: Path) -> None:
    """Refuse architectures that speculative decoding with exact rollback cannot serve.

    Raises:
        TargetError: Recurrent or linear-attention layers, an encoder-decoder, quantised weights.
    """
    reason = _recurrence(config)
    if reason is not None:
        raise TargetError(
            f"accepting the target {directory}",
            found=f"{reason}: this state cannot be rolled back after a rejected draft token",
            expected="attention layers with a key-value cache only",
            remedy="use a target without recurrent or linear-attention layers",
        )
    if config.is_encoder_decoder:
        raise TargetError(
            f"accepting the target {directory}",
            found=f"an encoder-decoder ({config.model_type})",
            expected="a decoder-only causal language model",
            remedy="use a decoder-only model",
        )
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        raise TargetError(
            f"accepting the target {directory}",
            found="quantised safetensors weights (quantization_config in config.json)",
            expected="bfloat16, float16 or float32 weights, or a GGUF file",
            remedy="point target.source at the checkpoint before quantisation, or at a GGUF file",
        )


def _recurrence(config: PreTrainedConfig) -> str | None:
    """What in the architecture carries state from token to token, or None."""
    text_config = config.get_text_config()
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    foreign = sorted(layer_types - _ROLLBACK_LAYERS)
    if foreign:
        return f"{config.model_type} with {', '.join(foreign)} layers"
    if config.model_type in _RECURRENT_TYPES or text_config.model_type in _RECURRENT_TYPES:
        return f"the recurrent model {config.model_type}"
    for kind in (type(config), type(text_config)):
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)
        if getattr(model_class, "_is_stateful", False):
            return f"the stateful model {config.model_type}"
    return None


def require_vocabulary(
    identity: TargetIdentity, tokenizer: PreTrainedTokenizerFast, source: Path
) -> None:
    """Check that every token id has an embedding row; more rows than tokens (padding) is fine.

    Example: 151,936 rows for 151,669 tokens passes, 151,665 rows does not.

    Raises:
        TargetError: The tokenizer knows ids that the model does not.
    """
    num_ids = max([identity.tokenizer_size, *(i + 1 for i in tokenizer.get_vocab().values())])
    if identity.vocab_size < num_ids:
        raise TargetError(
            f"matching the tokenizer of {source} with its weights",
            found=f"{num_ids} token ids and {identity.vocab_size} embedding rows",
            expected="at least one row for each token id",
            remedy="use the tokenizer that was saved with these weights, or call "
            "`model.resize_token_embeddings(len(tokenizer))` and save both again",
        )


def require_chat_template(tokenizer: PreTrainedTokenizerFast, source: Path) -> None:
    """Check that the tokenizer brings a chat template: prompts are conversations.

    Raises:
        TargetError: There is none, or none called "default".
    """
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        return
    if source.suffix.lower() == ".gguf":
        remedy = (
            "convert the model to GGUF again with its chat template, or use the "
            "Transformers checkpoint as target.source"
        )
        where = f"tokenizer.chat_template in the metadata of {source}"
    else:
        remedy = (
            f"write the Jinja template that the target was trained with to "
            f"{source / TEMPLATE_FILE} (the model's card or its base model has it)"
        )
        where = f"{source / TEMPLATE_FILE}, or the key chat_template in {TOKENIZER_CONFIG_FILE}"
    raise TargetError(
        f"reading the chat template of {source}", found="none", expected=where, remedy=remedy
    )
