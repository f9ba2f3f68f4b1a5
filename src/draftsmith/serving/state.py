"""What a running server consists of, and what it says about itself."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from draftsmith.serving.gateway import Gateway


@dataclass(frozen=True)
class Refusal:
    """A pair that does not serve.

    Attributes:
        version: In the registry.
        reason: What went wrong.
        is_final: Whether the pair itself is to blame, so that it is not tried again.
    """

    version: str
    reason: str
    is_final: bool


@dataclass
class SwapState:
    """What became of the alias that is followed.

    Attributes:
        followed: The address, None where nothing is followed.
        refused: The pair that it names and that does not serve; else None.
        unreachable: Why the registry could not be asked the last time; else None.
    """

    followed: str | None = None
    refused: Refusal | None = None
    unreachable: str | None = None


@dataclass(frozen=True)
class ServerState:
    """A server's parts.

    Attributes:
        gateway: Takes calls.
        text_work: Turns text into tokens, one prompt at a time: tokenizers serve one thread.
        swap: What became of the alias.
    """

    gateway: Gateway
    text_work: Executor
    swap: SwapState = field(default_factory=SwapState)

    def described(self) -> dict[str, Any]:
        """The model, as /v1/models shows it."""
        served = self.gateway.served
        return {
            "id": served.name,
            "object": "model",
            "created": served.since_s,
            "owned_by": "draftsmith",
            "max_model_len": served.max_tokens,
            "pair": {"version": served.version, "digest": served.digest},
        }

    def health(self) -> dict[str, Any]:
        """Body of /health."""
        gateway, served = self.gateway, self.gateway.served
        return {
            "status": "ok" if gateway.thread.is_alive else "the engine has ended",
            "model": served.name,
            "version": served.version,
            "pair_digest": served.digest,
            "target_digest": served.pair.record.target_digest,
            "draft_length": served.draft_length,
            "running": gateway.num_running,
            "waiting": gateway.num_waiting,
            "followed": self.swap.followed,
            "refused": vars(self.swap.refused) if self.swap.refused else None,
            "registry": self.swap.unreachable or "ok",
        }

    def exposition(self) -> str:
        """Body of /metrics."""
        gateway, served = self.gateway, self.gateway.served
        return gateway.records.metrics.exposition(
            gauges={
                "num_requests_running": gateway.num_running,
                "num_requests_waiting": gateway.num_waiting,
                "is_draining": gateway.is_draining,
            },
            pair={
                "model": served.name,
                "version": served.version or "",
                "pair_digest": served.digest,
            },
        )
