"""A `python` whose stages start at once: forked from a process that has imported everything.

DVC runs `python -m pipeline.<stage>`, and importing Transformers and MLflow takes longer than a
stage's work on a tiny target. Each stage still gets a process of its own with untouched modules.
Started as `python warm_python.py SOCKET` in the project's folder; `write_shim` makes the command.
"""

from __future__ import annotations

import atexit
import importlib
import os
import runpy
import signal
import socket
import stat
import sys
import traceback
from pathlib import Path

_SHIM = """#!{python} -IS
import os, socket, sys
if sys.argv[1:2] != ["-m"]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
fields = [os.getcwd(), *sys.argv[2:], "", *(f"{{k}}={{v}}" for k, v in os.environ.items())]
message = "\\0".join(fields).encode()
socket.send_fds(connection, [len(message).to_bytes(8, "big")], [0, 1, 2])
connection.sendall(message)
status = connection.recv(1)
sys.exit(status[0] if status else 137)
"""
_PRELOADED = (
    "accelerate",
    "datasets",
    "matplotlib.figure",
    "mlflow.pyfunc",
    "scipy.stats",
    "transformers.models.llama.modeling_llama",
)
_COMMANDS = ("draftsmith.cli",)


def write_shim(path: Path, address: str) -> None:
    """Write a `python` that hands `-m` runs to the server at `address`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_SHIM.format(python=sys.executable, address=address), encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def serve(address: str) -> None:
    """Import everything, then fork for every connection; the socket appears when it is ready."""
    sys.path[0] = str(Path.cwd())
    for name in (*_PRELOADED, *_COMMANDS, *_stages()):
        importlib.import_module(name)
    for name in (*_COMMANDS, *_stages(), "pipeline"):
        del sys.modules[name]  # each is run afresh, in its own folder; what they import stays
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{address}.new")
    server.listen()
    Path(f"{address}.new").rename(address)
    while True:
        connection, _ = server.accept()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            server.close()
            _answer(connection)
        connection.close()


def _stages() -> list[str]:
    names = (path.stem for path in Path("pipeline").glob("*.py"))
    return [f"pipeline.{name}" for name in names if name != "__init__"]


def _answer(connection: socket.socket) -> None:
    """Run what the shim asks for, with its files, folder and environment; never returns."""
    header, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
    size, message = int.from_bytes(header, "big"), b""
    while len(message) < size:
        message += connection.recv(1 << 16)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    folder, *fields = message.decode().split("\0")
    end = fields.index("")
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(dict(field.split("=", 1) for field in fields[end + 1 :]))
    sys.argv = [fields[0], *fields[1:end]]
    connection.sendall(bytes([_run(fields[0])]))
    os._exit(0)


def _run(module: str) -> int:
    status: int | str | None = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if end.code is None or isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001  as the interpreter does
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return int(status or 0)


if __name__ == "__main__":
    serve(sys.argv[1])
