"""A real tracking server with basic auth, its users, and a proxy that fails as it is told."""

from __future__ import annotations

import base64
import contextlib
import http.client
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

USER, PASSWORD = "admin", "correct-horse-battery"
_CONFIG = """[mlflow]
default_permission = READ
database_uri = {database}
admin_username = {user}
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
auth_cache_ttl_seconds = 600
"""
_START_TIMEOUT_S = 120.0
# Beginnings of variables that name servers, buckets and their users.
OF_STORES = ("AWS_", "MLFLOW", "PG")
# For clients that need not wait.
IMPATIENCE = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0",
}


def encoded(user, password):
    """What a request carries of a user."""
    return base64.b64encode(f"{user}:{password}".encode()).decode()


def add_user(url, user, password):
    """Make a user who may read what others made, and do everything with things of their own."""
    _administer(url, "2.0/mlflow/users/create", username=user, password=password)


def grant(url, user, permission, **resources):
    """Give a user a permission on each resource, kind=id."""
    for kind, name in resources.items():
        given = {"resource_type": kind, "resource_id": name, "permission": permission}
        _administer(url, "3.0/mlflow/users/permissions/grant", username=user, **given)


def _administer(url, path, **body):
    headers = {
        "Authorization": f"Basic {encoded(USER, PASSWORD)}",
        "Content-Type": "application/json",
    }
    request = urllib.request.Request(f"{url}/api/{path}", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=30).close()


def client_variables(url, user, password, root):
    """What a user of the server sets; what is kept for the user on this machine lies in `root`."""
    return {
        "MLFLOW_TRACKING_URI": url,
        "MLFLOW_TRACKING_USERNAME": user,
        "MLFLOW_TRACKING_PASSWORD": password,
        "XDG_STATE_HOME": str(root / "state"),
        **IMPATIENCE,
    }


@contextlib.contextmanager
def running(root, database, *, users=None, artifacts=None, variables=None):
    """A server on a free port of this machine, with its configuration and its log in `root`.

    Args:
        root: Its folder.
        database: Address of the database of runs and models.
        users: That of the database of users; None for a file in `root`.
        artifacts: Where files are kept; None for a folder in `root`.
        variables: Set for the server.

    Yields:
        Its port.
    """
    port = free_port()
    config = root / "auth.ini"
    users = users or f"sqlite:///{root / 'auth.db'}"
    config.write_text(_CONFIG.format(database=users, user=USER))
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(OF_STORES)}
    environment = inherited | {
        "MLFLOW_AUTH_CONFIG_PATH": str(config),
        "MLFLOW_AUTH_ADMIN_PASSWORD": PASSWORD,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "of-this-test",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        **(variables or {}),
    }
    command = [sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", database]
    command += ["--artifacts-destination", artifacts or str(root / "artifacts")]
    with (root / "server.log").open("w") as log:
        server = subprocess.Popen(
            command, cwd=root, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait_for(port, server, root / "server.log")
        yield port
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def free_port():
    """A port of this machine at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(port, server, log):
    end = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return
        time.sleep(0.1)
    raise AssertionError(f"the server did not start:\n{log.read_text()[-2000:]}")


class Proxy:
    """Passes requests on to the server at `port` and deals with each as `deal` says.

    Attributes:
        deal: (method, path, body) -> `pass`; `down`, no answer and nothing passed on; `error`,
            answered 500 and nothing passed on; `slow`, as `down` after two seconds; `lost`, passed
            on and not answered; `cut`, passed on and answered by half.
        url: Where it listens.
    """

    def __init__(self, port):
        self.port = port
        self.heal()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def heal(self):
        self.deal = lambda method, path, body: "pass"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()


def _handler(proxy):
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # an answer in one packet, at once
        disable_nagle_algorithm = True

        def answer(self):
            body = self._body()
            fault = proxy.deal(self.command, self.path, body)
            if fault in ("pass", "lost", "cut"):
                status, headers, content = self._passed_on(body)
            if fault == "error":
                status, headers, content = 500, {}, b"the database is on fire"
            if fault == "slow":
                time.sleep(2)
            if fault in ("down", "slow", "lost"):
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if fault == "cut":
                content = content[: len(content) // 2]
                self.close_connection = True
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer  # noqa: N815

        def log_message(self, *_):
            pass

        def _body(self):
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _passed_on(self, body):
            hops = ("transfer-encoding", "content-length", "connection")
            headers = {k: v for k, v in self.headers.items() if k.lower() not in hops}
            connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
            with contextlib.closing(connection):
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                content = answer.read()
            kept = {k: v for k, v in answer.getheaders() if k.lower() not in hops}
            return answer.status, kept, content

    return Handler


IN_UPLOAD = {"method": "PUT", "ending": ""}


def after(number, kind, *, method, ending):
    """Deal with request `number` of those to `ending`, and with all after it, as `kind` says."""
    count = 0

    def deal(given, path, _):
        nonlocal count
        if given == method and path.partition("?")[0].endswith(ending):
            count += 1
        return kind if count >= number else "pass"

    return deal


def noting(paths, method):
    """Pass all requests on, and put the paths of those with a method into `paths`."""

    def deal(given, path, _):
        if given == method:
            paths.append(path.partition("?")[0])
        return "pass"

    return deal
