"""A real HTTP server in a thread: OpenAI's completions with faults where a test plans them."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import requests

from draftsmith.decoding import Engine, NoProposer, Request, SamplingParams

MODEL = "demo"
KEY = "sk-never-written-anywhere"
PATIENCE_S = 60.0


class FaultyEndpoint:
    """Answers with `complete(body)`, unless `plan(number)` names a fault for that completion.

    Args:
        complete: Body of a request -> body of its answer, or (status, body).
        plan: Number of the completion, from 1 -> a function of the handler, or None.
        models: What is listed.
    """

    def __init__(self, complete, *, plan=lambda _number: None, models=(MODEL,)):
        self.complete, self.plan, self.models = complete, plan, models
        self.asked = []  # bodies, in the order they came
        self.answered = []  # bodies that were answered
        self.headers = []
        self.num_running = self.most_running = 0
        self.lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.owner = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def stop(self):
        """Nobody listens afterwards; may be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(PATIENCE_S)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.server.owner.headers.append(dict(self.headers))
        self.reply(200, {"object": "list", "data": [{"id": m} for m in self.server.owner.models]})

    def do_POST(self):
        owner = self.server.owner
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with owner.lock:
            owner.asked.append(body)
            owner.headers.append(dict(self.headers))
            number = len(owner.asked)
            owner.num_running += 1
            owner.most_running = max(owner.most_running, owner.num_running)
        try:
            fault = owner.plan(number)
            if fault is not None:
                fault(self)
                return
            answer = owner.complete(body)
        finally:
            with owner.lock:
                owner.num_running -= 1
        status, answer = answer if isinstance(answer, tuple) else (200, answer)
        if status == 200:
            owner.answered.append(body)
        self.reply(status, answer)

    def reply(self, status, data, headers=(), *, cut=0):
        """Send data as JSON, or text as it is, without the last `cut` bytes."""
        content = (data if isinstance(data, str) else json.dumps(data)).encode()
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            for name, value in dict(headers).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) - cut])


def status(code, text="", **headers):
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler: handler.reply(code, text, names)


def broken_json(handler):
    handler.reply(200, '{"choices": [{"token_ids": [1, 2')


def cut_body(handler):
    handler.reply(200, {"choices": []}, cut=3)


def hang_up(handler):
    handler.close_connection = True
    with contextlib.suppress(OSError):  # the client has gone
        handler.connection.shutdown(socket.SHUT_RDWR)


def slow(seconds):
    def fault(handler):
        time.sleep(seconds)
        hang_up(handler)

    return fault


def trickle(pause_s, start=b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"):
    """A byte now and then behind `start`, a hundred of them, which end as no JSON."""

    def fault(handler):
        with contextlib.suppress(OSError):  # the client has gone
            handler.wfile.write(start)
            for _ in range(100):
                handler.wfile.write(b" ")
                time.sleep(pause_s)
        handler.close_connection = True

    return fault


def forwarding(url):
    """Answers of another endpoint, whose address ends with /v1."""

    def complete(body):
        done = requests.post(f"{url}/completions", json=body, timeout=PATIENCE_S)
        return done.status_code, done.json()

    return complete


def answers_of(model, tokenizer=None):
    """What an engine of the model answers, one request at a time; text needs a tokenizer."""
    lock = threading.Lock()

    def complete(body):
        prompt = body["prompt"]
        if isinstance(prompt, str):
            prompt = tokenizer(prompt, add_special_tokens=body["add_special_tokens"]).input_ids
        params = SamplingParams(
            max_new_tokens=body["max_tokens"],
            temperature=body["temperature"],
            seed=body.get("seed", 0),
            stop_token_ids=tuple(body.get("stop_token_ids", ())),
        )
        with lock:
            engine = Engine(model, NoProposer(), max_rows=1, draft_length=0)
            (result,) = engine.generate([Request("", prompt, params)])
        ids = {"prompt_token_ids": prompt, "token_ids": result.token_ids}
        return {"choices": [{"index": 0, "finish_reason": result.finish_reason, **ids}]}

    return complete
