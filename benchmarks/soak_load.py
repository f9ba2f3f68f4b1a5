"""Callers that ask a server on and on: requests drawn at random, and a count of what goes wrong."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from draftsmith.decoding.matching import VerifyMode
from draftsmith.registry.generation import Pair

CHAT = "/v1/chat/completions"
CANCELLED, REFUSED = "cancelled", "refused by its own limit"
WHOLE, STREAMED, DIFFERENT = "answered", "answered in a stream", "answered with another text"
PATIENCE_S = 120.0
_SHARE_STREAMED, _SHARE_CANCELLED = 0.5, 0.1
_SHARE_SAMPLED, _SHARE_EXTRA = 0.5, 0.2
_NUM_OVERLONG = 2
_EXTRAS = {
    "frequency_penalty": 0.5,
    "presence_penalty": 0.2,
    "repetition_penalty": 1.1,
    "logit_bias": {"30": 4.0, "40": -3.0},
    "stop": ["."],
    "min_tokens": 2,
}
_ENGINE_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop": "stop_strings",
}
_MOST_SHOWN = 200  # characters of a reason
_LOG = logging.getLogger(__name__)

Body = Mapping[str, Any]


@dataclass(frozen=True)
class Wanted:
    """A request, and the text that it must get; None where it asks for more than there is."""

    body: Body
    text: str | None


def drawn(chats: Sequence[Any], pair: Pair, *, num: int, seed: int) -> list[Wanted]:
    """Requests to be asked again and again: half of them greedy, and a few that ask for too much.

    Args:
        chats: Conversations, as messages.
        pair: Answers them offline.
        num: How many.
        seed: Of what is drawn.
    """
    chance = random.Random(seed)
    bodies = [_drawn_body(chance, chance.choice(chats)) for _ in range(num)]
    overlong = [Wanted({**body, "max_tokens": 1 << 20}, None) for body in bodies[:_NUM_OVERLONG]]
    return [*(Wanted(body, offline(pair, body, "match")) for body in bodies), *overlong]


def _drawn_body(chance: random.Random, messages: Any) -> Body:  # noqa: ANN401  a chat
    body: dict[str, Any] = {"messages": messages, "temperature": 0}
    if chance.random() < _SHARE_SAMPLED:
        body["temperature"] = chance.choice((0.5, 0.8, 1.0, 1.3))
        body["top_p"] = chance.choice((0.7, 0.95, 1.0))
        body["top_k"] = chance.choice((0, 20))
        body["min_p"] = chance.choice((0.0, 0.02))
    extras = {name: value for name, value in _EXTRAS.items() if chance.random() < _SHARE_EXTRA}
    sizes = {"max_tokens": chance.randint(2, 40), "seed": chance.randrange(1 << 31)}
    return {**body, **extras, **sizes}


def offline(pair: Pair, body: Body, verify: VerifyMode) -> str:
    """The pair's own answer to a chat."""
    given = {key: value for key, value in body.items() if key not in ("model", "messages")}
    sampling = {_ENGINE_NAMES.get(key, key): value for key, value in given.items()}
    bias = given.get("logit_bias", {}).items()
    sampling["logit_bias"] = tuple((int(key), value) for key, value in bias)
    return pair.generate(body["messages"], verify=verify, **sampling).text


@dataclass(frozen=True)
class Answer:
    """When a request was sent and its answer was whole, by `time.monotonic`, and of which pair."""

    asked_s: float
    whole_s: float
    fingerprint: str


class WrongAnswerError(Exception):
    """An answer that is none, or not the one that was due."""


class Load:
    """Callers at work while the block lasts.

    Args:
        url: Of the server.
        model: Its name there.
        wanted: What is asked, drawn anew each time.
        callers: How many ask at once.
        is_exact: Whether another text than the expected one is a failure.

    Attributes:
        counts: Requests by what became of them.
        failures: Requests by what went wrong.
        answers: In the order in which they were whole.
    """

    def __init__(
        self, url: str, model: str, wanted: Sequence[Wanted], *, callers: int, is_exact: bool = True
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.answers: list[Answer] = []
        self._place, self._model, self._wanted = urlsplit(url).netloc, model, wanted
        self._is_exact = is_exact
        self._lock, self._over = threading.Lock(), threading.Event()
        self._callers = [threading.Thread(target=self._ask_on, args=(n,)) for n in range(callers)]

    def __enter__(self) -> Self:
        """Begin."""
        for caller in self._callers:
            caller.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Let every caller have its last answer."""
        self._over.set()
        for caller in self._callers:
            caller.join()

    def answers_of(self, fingerprint: str, since_s: float) -> list[Answer]:
        """Answers of a pair that were whole behind a moment."""
        later = (answer for answer in self.answers if answer.whole_s > since_s)
        return [answer for answer in later if answer.fingerprint == fingerprint]

    def _ask_on(self, number: int) -> None:
        chance = random.Random(number)
        while not self._over.is_set():
            wanted = chance.choice(self._wanted)
            is_streamed = chance.random() < _SHARE_STREAMED
            is_cancelled = chance.random() < _SHARE_CANCELLED
            try:
                outcome = self._ask(wanted, is_streamed=is_streamed, is_cancelled=is_cancelled)
            except Exception as error:  # whatever it is, it is what is looked for
                self._fail(f"{type(error).__name__}: {error}"[:_MOST_SHOWN])
            else:
                with self._lock:
                    self.counts[outcome] += 1

    def _fail(self, reason: str) -> None:
        with self._lock:
            self.failures[reason] += 1
        _LOG.warning("event=failed reason=%s", reason)
        self._over.wait(0.1)

    def _ask(self, wanted: Wanted, *, is_streamed: bool, is_cancelled: bool) -> str:
        body = {**wanted.body, "model": self._model, "stream": is_streamed}
        asked_s = time.monotonic()
        with asked(self._place, body) as caller:
            if is_cancelled and not is_streamed:
                return CANCELLED
            with caller.getresponse() as response:
                if is_cancelled:
                    response.readline()
                    return CANCELLED
                said = response.read()
        status = response.status
        return self._judged(wanted, status, said, asked_s=asked_s, is_streamed=is_streamed)

    def _judged(
        self, wanted: Wanted, status: int, said: bytes, *, asked_s: float, is_streamed: bool
    ) -> str:
        if wanted.text is None:
            if status == http.client.BAD_REQUEST and b'"context_length_exceeded"' in said:
                return REFUSED
            raise WrongAnswerError(f"status {status} to what asks for too much")
        if status != http.client.OK:
            raise WrongAnswerError(f"status {status}: {said.decode(errors='replace')}")
        text, fingerprint = read_stream(said) if is_streamed else _read_whole(said)
        self.answers.append(Answer(asked_s, time.monotonic(), fingerprint))
        if text == wanted.text:
            return STREAMED if is_streamed else WHOLE
        if self._is_exact:
            raise WrongAnswerError(f"found {text!r}; expected {wanted.text!r}")
        return DIFFERENT


@contextlib.contextmanager
def asked(place: str, body: Body) -> Iterator[http.client.HTTPConnection]:
    """A connection with a request under way; it is closed whatever has come."""
    with contextlib.closing(http.client.HTTPConnection(place, timeout=PATIENCE_S)) as caller:
        caller.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
        yield caller


def read_stream(said: bytes) -> tuple[str, str]:
    """Text and fingerprint of a stream of chunks.

    Raises:
        WrongAnswerError: It ends with an error, or without its end.
    """
    events = [line.removeprefix(b"data: ") for line in said.splitlines() if line]
    if not events or events.pop() != b"[DONE]":
        raise WrongAnswerError(f"a stream that ends with {said[-_MOST_SHOWN:]!r}")
    chunks = [json.loads(event) for event in events]
    pieces = (choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"])
    return "".join(piece or "" for piece in pieces), chunks[0]["system_fingerprint"]


def _read_whole(said: bytes) -> tuple[str, str]:
    answer = json.loads(said)
    return answer["choices"][0]["message"]["content"], answer["system_fingerprint"]
