"""A registered pair of a tiny trained target, and servers of it in threads of their own."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from pathlib import Path

import requests
from openai import AsyncOpenAI, OpenAI

from benchmarks.soak_pairs import draft_of_layers
from draftsmith.registry.pair import PairRecord
from draftsmith.serving.server import PairServer, ServeOptions
from draftsmith.serving.settings import Limits
from draftsmith.serving.source import PairSource
from draftsmith.targets.loading import load_target
from tests import tiny_target

NAME = "demo"
PINNED = "models:/demo/1"
CHAMPION = "models:/demo@champion"
QUESTIONS = [question for _, question, _ in tiny_target.conversations("home")]
TRAINING_STEPS = 60
PATIENCE_S = 60.0
_EXTENSIONS = ("top_k", "min_p", "repetition_penalty", "min_tokens", "bad_words")


def make_target(folder: Path) -> None:
    tokenizer = tiny_target.make_tokenizer()
    model = tiny_target.make_model(tokenizer)
    tiny_target.train(model, tokenizer, "home", TRAINING_STEPS)
    tiny_target.save(model, tokenizer, folder)


def make_draft(target_folder: Path, folder: Path, *, layers: tuple[int, ...]) -> PairRecord:
    """A draft of some of the target's layers, untrained; returns the record of the pair."""
    return draft_of_layers(load_target(target_folder, dtype="float32"), folder, layers)


@contextlib.contextmanager
def serving(root: Path, uri: str = PINNED, **given):
    """A server that runs in a thread; drained at the end."""
    limits = Limits(**{"max_context": 256, **given.pop("limits", {})})
    source = PairSource(uri, root)
    server = PairServer(ServeOptions(source, limits=limits, port=0, **given))
    failures = []

    def run():
        try:
            server.run(ready.set)
        except BaseException as error:
            failures.append(error)
            ready.set()

    ready = threading.Event()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(PATIENCE_S)
    assert failures == []
    try:
        yield server
    finally:
        server.stop()
        thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert failures == []


def client_of(server: PairServer, **options) -> OpenAI:
    return OpenAI(**{"base_url": f"{server.url}/v1", "api_key": "-", "max_retries": 0, **options})


def async_client_of(server: PairServer) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)


def post(server: PairServer, body, path: str = "/v1/chat/completions", **options):
    """A raw request; `body` is sent as it is where it is bytes."""
    content = {"data": body} if isinstance(body, bytes) else {"json": body}
    headers = {"Content-Type": "application/json", **options.pop("headers", {})}
    return requests.post(server.url + path, headers=headers, timeout=PATIENCE_S, **content)


def health(server: PairServer) -> dict:
    return requests.get(f"{server.url}/health", timeout=PATIENCE_S).json()


def wait_until(condition) -> None:
    """Until it holds; fails when it does not within a minute."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_idle(server: PairServer) -> bool:
    """Whether no sample is held."""
    found = health(server)
    return found["running"] == found["waiting"] == 0


@contextlib.contextmanager
def engine_held(server: PairServer):
    """The engine thread does nothing inside the block, so that what is sent stays waiting."""
    begun, released = threading.Event(), threading.Event()

    def chore():
        begun.set()
        released.wait(PATIENCE_S)
        yield

    server.state.gateway.thread.run(chore())
    assert begun.wait(PATIENCE_S)
    try:
        yield
    finally:
        released.set()


def chat(question: str, **given) -> dict:
    """Body of a chat completion."""
    messages = [{"role": "user", "content": question}]
    return {"model": NAME, "messages": messages, "temperature": 0, "max_tokens": 24, **given}


def asked(body: dict) -> dict:
    """The same for OpenAI's client, which takes what its API does not have as `extra_body`."""
    extra = {key: value for key, value in body.items() if key in _EXTENSIONS}
    return {key: value for key, value in body.items() if key not in extra} | {"extra_body": extra}


class open_stream:  # noqa: N801  used as a function
    """A request over a bare socket, whose answer is read when the test says so."""

    def __init__(self, server, body, *, num_withheld=0):
        host, port = server.url.removeprefix("http://").split(":")
        content = json.dumps(body).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._socket.sendall(head.encode() + content[: len(content) - num_withheld])

    def read_some(self):
        return self._socket.recv(10)

    def read_all(self):
        return b"".join(iter(lambda: self._socket.recv(65536), b""))

    def close(self):
        self._socket.close()
