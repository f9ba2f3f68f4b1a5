"""Who makes the responses of a corpus: the engine here, or endpoints that serve the target."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import PreTrainedModel

from draftsmith.corpus.chat import Chat, make_chat
from draftsmith.corpus.endpoint import KEY_VARIABLE, Endpoint
from draftsmith.corpus.endpoint_decoder import EndpointDecoder
from draftsmith.corpus.prompts import bundled_prompts
from draftsmith.corpus.rollouts import Decoder
from draftsmith.corpus.settings import CorpusConfig
from draftsmith.decoding import Engine, NoProposer, Request, SamplingParams
from draftsmith.errors import ConfigError
from draftsmith.targets.identity import TargetIdentity
from draftsmith.targets.loading import STORED, fits_memory, load_by_digest

_NUM_PROBES = 4
_PROBE_TOKENS = 32


def open_backend(
    config: CorpusConfig, identity: TargetIdentity, root: Path
) -> tuple[Chat, Decoder]:
    """The target's chat, and what decodes.

    Args:
        config: The corpus section.
        identity: Of the target.
        root: Folder of all snapshots.

    Raises:
        TargetError: The target cannot be loaded.
        ConfigError: The endpoints' key is none.
    """
    match config.backend:
        case "local":
            target = load_by_digest(root, identity.digest)
            engine = Engine(target.model, NoProposer(), max_rows=config.batch_size, draft_length=0)
            return make_chat(target.model, target.tokenizer), engine
        case "openai":
            # On the CPU: an accelerator may be full of the very engine that is asked.
            fits = fits_memory(identity)
            dtype = None if fits else STORED
            target = load_by_digest(root, identity.digest, dtype=dtype, device="cpu")
            chat = make_chat(target.model, target.tokenizer)
            reference = target.model if fits else None
            return chat, endpoint_decoder(config, chat, identity.vocab_size, reference)


def endpoint_decoder(
    config: CorpusConfig, chat: Chat, vocab_size: int, reference: PreTrainedModel | None
) -> EndpointDecoder:
    """A decoder that asks the endpoints of the configuration.

    Args:
        config: The corpus section.
        chat: Of the target.
        vocab_size: Rows of its embedding.
        reference: The target, None where it does not fit here.

    Raises:
        ConfigError: The endpoints' key is none.
    """
    key = _key()
    endpoints = [
        Endpoint(url.rstrip("/"), config.endpoint_model, vocab_size, config.endpoint_timeout_s, key)
        for url in config.endpoints
    ]
    return EndpointDecoder(
        endpoints, max_requests=config.batch_size, probes=_probes(config, chat), reference=reference
    )


def _probes(config: CorpusConfig, chat: Chat) -> list[Request]:
    """Greedy requests, from bundled prompts of several domains."""
    prompts = bundled_prompts()
    num_tokens = min(_PROBE_TOKENS, config.max_new_tokens)
    params = SamplingParams(max_new_tokens=num_tokens, stop_token_ids=chat.stop_ids)
    return [
        Request(f"probe-{number}", chat.prompt_ids(prompt)[: config.max_prompt_tokens], params)
        for number, prompt in enumerate(prompts[:: len(prompts) // _NUM_PROBES][:_NUM_PROBES])
    ]


def _key() -> str:
    """The endpoints' key, from the environment alone."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(
            f"reading the endpoints' key from {KEY_VARIABLE}",
            found="characters that no header takes",
            expected="one key of printable ASCII characters",
            remedy="set the variable to the key alone, or unset it",
        )
    return key
