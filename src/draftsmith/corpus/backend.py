"""Who makes the responses of a corpus: the engine here, or endpoints that serve the target."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel

from draftsmith.corpus.chat import Chat, make_chat
from draftsmith.corpus.connection import KEY_VARIABLE
from draftsmith.corpus.endpoint import Endpoint
from draftsmith.corpus.endpoint_check import EndpointCheck, Probe
from draftsmith.corpus.endpoint_decoder import EndpointDecoder
from draftsmith.corpus.prompts import bundled_prompts
from draftsmith.corpus.rollouts import Decoder
from draftsmith.corpus.settings import CorpusConfig
from draftsmith.decoding import Engine, NoProposer, Request, SamplingParams
from draftsmith.errors import ConfigError
from draftsmith.targets.identity import TargetIdentity
from draftsmith.targets.loading import STORED, fits_memory, load_by_digest

_NUM_PROBES = 16
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
            target = load_by_digest(root, identity.digest, dtype=STORED, device="cpu")
            chat = make_chat(target.model, target.tokenizer)
            return chat, endpoint_decoder(config, chat, identity, _loader(identity, root))


def endpoint_decoder(
    config: CorpusConfig,
    chat: Chat,
    identity: TargetIdentity,
    load: Callable[[], PreTrainedModel] | None,
) -> EndpointDecoder:
    """A decoder that asks the endpoints of the configuration.

    Args:
        config: The corpus section.
        chat: Of the target.
        identity: Of the target.
        load: Loads the target, None where it does not fit here.

    Raises:
        ConfigError: The endpoints' key is none.
    """
    key, size = _key(), identity.vocab_size
    endpoints = [
        Endpoint(url.rstrip("/"), config.endpoint_model, size, config.endpoint_timeout_s, key)
        for url in config.endpoints
    ]
    return EndpointDecoder(
        endpoints,
        max_requests=config.batch_size,
        check=EndpointCheck(_probes(config, chat), load),
        show=lambda ids: str(chat.tokenizer.decode(ids)),
    )


def _loader(identity: TargetIdentity, root: Path) -> Callable[[], PreTrainedModel] | None:
    """Loads the target on the CPU: an accelerator may be full of the very engine that is asked."""
    if not fits_memory(identity):
        return None
    return lambda: load_by_digest(root, identity.digest, device="cpu").model


def _probes(config: CorpusConfig, chat: Chat) -> list[Probe]:
    """Bundled prompts of all domains: to be continued greedily, and their words alone."""
    prompts = bundled_prompts()
    num_tokens = min(_PROBE_TOKENS, config.max_new_tokens)
    params = SamplingParams(max_new_tokens=num_tokens, stop_token_ids=chat.stop_ids)
    probes = []
    for number, prompt in enumerate(prompts[:: len(prompts) // _NUM_PROBES][:_NUM_PROBES]):
        ids = chat.prompt_ids(prompt)[: config.max_prompt_tokens]
        text = prompt.messages[-1][1][: config.max_prompt_tokens]  # a token has a character or more
        text_ids = list(chat.tokenizer(text, add_special_tokens=False)["input_ids"])
        probes.append(Probe(Request(f"probe-{number}", ids, params), text, text_ids))
    return probes


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
