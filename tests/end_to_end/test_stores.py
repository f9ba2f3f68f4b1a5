"""A pair's life on a team's stores: MLflow on PostgreSQL and S3, DVC's remote on S3.

Set up as docs/stores.md shows. The tests are steps of one story, in their order: the bucket dies in
an upload, the next run goes on; another machine pulls, a third rolls back and loads.
"""

from __future__ import annotations

import re
import secrets
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from draftsmith.artifacts import digest_directory, read_json, short
from tests.end_to_end import store_servers
from tests.end_to_end.conftest import REPOSITORY, Project
from tests.end_to_end.store_servers import Database, ObjectStore
from tests.registry import tracking_server
from tests.registry.tracking_server import Proxy, encoded, noting

pytestmark = [pytest.mark.slow, pytest.mark.stores]

NAME = "team-pair"
CHAMPION = f"models:/{NAME}@champion"
PAGE = (REPOSITORY / "docs/stores.md").read_text(encoding="utf-8")
STATEMENTS, *_ = re.findall(r"```sql\n(.*?)```", PAGE, flags=re.DOTALL)
REMOTE = re.findall(r"^dvc remote .*$", PAGE, flags=re.MULTILINE)
ENDPOINT = "https://s3.example"
ROLE, DATABASE, USERS = "mlflow", "mlflow", "mlflow_users"
PIPELINE, SERVER = "pipeline", "server"  # who hold a key of a bucket
BUCKETS = {PIPELINE: "dvc-cache", SERVER: "mlflow-files"}
TEAM = "team"
PASSWORD = secrets.token_hex(16)
WEIGHTS = "model.safetensors"
HELD = f"artifacts/target/{WEIGHTS}"
EXIT_USER_ERROR, EXIT_REPRO_FAILED = 2, 255
COMMIT = ("git", "-c", "user.name=test", "-c", "user.email=test@example.invalid", "commit", "-qm")


class Stores(NamedTuple):
    """What runs.

    Attributes:
        database: PostgreSQL.
        objects: The S3 store.
        proxy: The way to the MLflow server.
        root: Folder of that server.
    """

    database: Database
    objects: ObjectStore
    proxy: Proxy
    root: Path

    @property
    def variables(self) -> dict[str, str]:
        """What somebody who looks and loads sets."""
        return tracking_server.client_variables(self.proxy.url, TEAM, PASSWORD, self.root)

    @property
    def secrets(self) -> list[str]:
        """What must not be written anywhere."""
        passwords = [self.database.password, PASSWORD, encoded(TEAM, PASSWORD)]
        return [*self.objects.secrets, *passwords]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    root = tmp_path_factory.mktemp("server")
    with (
        store_servers.postgresql(ROLE, STATEMENTS) as database,
        store_servers.object_store(BUCKETS) as objects,
    ):
        variables = {
            **objects.variables(SERVER),
            "MLFLOW_S3_ENDPOINT_URL": objects.url,
            "PGPASSWORD": database.password,
        }
        server = tracking_server.running(
            root,
            database.address(DATABASE),
            users=database.address(USERS),
            artifacts=f"s3://{BUCKETS[SERVER]}",
            variables=variables,
        )
        with server as port, Proxy(port) as proxy:
            tracking_server.add_user(proxy.url, TEAM, PASSWORD)
            yield Stores(database, objects, proxy, root)


@pytest.fixture(scope="module")
def target(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that only this story overwrites."""
    return Path(shutil.copytree(checkpoints / "home", tmp_path_factory.mktemp("target") / "home"))


def _clone(project: Project, folder: Path) -> Project:
    done = project.run("git", "clone", "-q", ".", str(folder))
    assert done.returncode == 0, done.stderr
    return replace(project, root=folder)


@pytest.fixture(scope="module")
def home(
    warm: Project, stores: Stores, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Project:
    """The clone of who runs the pipeline, set up as the page shows."""
    variables = {**stores.variables, **stores.objects.variables(PIPELINE)}
    made = replace(_clone(warm, tmp_path_factory.mktemp("home")), variables=variables, said=[])
    made.configure(
        target={"source": str(target)},
        registry={"name": NAME, "experiment": NAME, "include_target": True},
    )
    assert REMOTE
    for line in REMOTE:
        done = made.run(*shlex.split(line.replace(ENDPOINT, stores.objects.url)))
        assert done.returncode == 0, done.stderr
    return made


@pytest.fixture(scope="module")
def colleague(home: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Another clone, with what was committed after the first promotion and no files of the runs."""
    for command in (["git", "add", "--all"], [*COMMIT, "a pair"]):
        done = home.run(*command)
        assert done.returncode == 0, done.stderr
    return _clone(home, tmp_path_factory.mktemp("colleague"))


@pytest.fixture(scope="module")
def elsewhere(
    colleague: Project, stores: Stores, tmp_path_factory: pytest.TempPathFactory
) -> Project:
    """A clone on a machine that holds no key of a bucket."""
    made = _clone(colleague, tmp_path_factory.mktemp("elsewhere"))
    return replace(made, variables=stores.variables)


def _succeeds(project: Project, *command: str) -> str:
    done = project.run(*command)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def _aliases(project: Project) -> dict[str, list[str]]:
    return {pair["version"]: pair["aliases"] for pair in project.cli("pairs")}


def test_a_bucket_that_dies_in_an_upload_fails_the_run_and_leaves_no_version(
    home: Project, stores: Stores
) -> None:
    arrived: list[str] = []

    def deal(method: str, path: str, _: bytes) -> str:
        if method == "PUT" and arrived:
            stores.objects.stop()
        if method == "PUT" and path.endswith(HELD):
            arrived.append(path)
        return "pass"

    stores.proxy.deal = deal
    done = home.repro()
    stores.proxy.heal()
    told = done.stdout + done.stderr
    assert done.returncode == EXIT_REPRO_FAILED, told[-3000:]
    assert arrived
    assert "draftsmith: registering student: found" in told, told[-3000:]
    assert "Traceback" not in told
    assert home.cli("pairs") == []


def test_the_next_run_goes_on_with_the_upload_and_promotes(home: Project, stores: Stores) -> None:
    stores.objects.start()
    held = stores.objects.sizes(SERVER)
    sent: list[str] = []
    stores.proxy.deal = noting(sent, "PUT")
    _succeeds(home, "dvc", "repro")
    stores.proxy.heal()
    assert any(path.endswith("MLmodel") for path in sent)
    assert not any(path.endswith(HELD) for path in sent)
    assert _aliases(home) == {"1": ["challenger", "champion"]}
    query = "SELECT name, version FROM model_versions"
    assert stores.database.ask(DATABASE, query) == [(NAME, 1)]
    assert stores.database.ask(USERS, f"SELECT username FROM users WHERE username = '{TEAM}'")
    whole = stores.objects.sizes(SERVER)
    (weights,) = (key for key in whole if key.endswith(HELD))
    assert held[weights] == whole[weights]
    assert len(held) < len(whole)
    local = [home.root / name for name in ("mlflow.db", "mlartifacts", "mlruns")]
    assert not any(path.exists() for path in [*local, stores.root / "artifacts"])


def test_a_version_on_the_bucket_is_what_was_registered_and_lossless(home: Project) -> None:
    found = home.cli("verify")
    assert (found["version"], found["holds"], found["model_checked"]) == ("1", True, True)


def test_what_a_run_made_is_pushed_and_another_machine_trains_nothing(
    home: Project, colleague: Project, stores: Stores
) -> None:
    outs = ("data/corpus", "models/drafts/student")
    made = {name: digest_directory(home.root / name) for name in outs}
    assert not any((colleague.root / name).exists() for name in outs)
    _succeeds(home, "dvc", "push")
    assert stores.objects.sizes(PIPELINE)
    _succeeds(colleague, "dvc", "pull")
    assert {name: digest_directory(colleague.root / name) for name in outs} == made
    said = _succeeds(colleague, "dvc", "repro")
    assert "Stage 'corpus' didn't change, skipping" in said
    assert read_json(colleague.root / "build/start.json")["recipes"]["student"]["action"] == "known"
    assert {name: digest_directory(colleague.root / name) for name in outs} == made
    assert _aliases(colleague) == {"1": ["challenger", "champion"]}
    assert "up to date" in _succeeds(colleague, "dvc", "push")


def test_a_checkpoint_overwritten_in_place_gets_a_pair_whose_large_files_pass_by_the_server(
    home: Project, stores: Stores, target: Path, tmp_path: Path
) -> None:
    corpus = home.root / "data/corpus"
    home.world.make_update("light", target=target, corpus=corpus, folder=tmp_path / "light")
    shutil.copytree(tmp_path / "light", target, dirs_exist_ok=True)
    sent: list[str] = []
    stores.proxy.deal = noting(sent, "PUT")
    large = {"MLFLOW_MULTIPART_UPLOAD_MINIMUM_FILE_SIZE": str((target / WEIGHTS).stat().st_size)}
    _succeeds(replace(home, variables={**home.variables, **large}), "dvc", "repro")
    stores.proxy.heal()
    assert _aliases(home) == {"1": [], "2": ["challenger", "champion"]}
    assert any(path.endswith("MLmodel") for path in sent)
    assert not any(path.endswith(HELD) for path in sent)  # it went to the bucket, in parts
    sizes = [size for key, size in stores.objects.sizes(SERVER).items() if key.endswith(HELD)]
    assert sizes == [(target / WEIGHTS).stat().st_size] * 2


def test_a_machine_without_a_key_rolls_back_to_a_target_that_only_the_bucket_holds(
    elsewhere: Project,
) -> None:
    moved = elsewhere.cli("rollback", "--reason", "answers were slow")
    assert (moved["quarantined"], moved["champion"]["version"]) == ("2", "1")
    assert _aliases(elsewhere)["1"] == ["champion"]
    history = elsewhere.cli("history")
    moves = [(move["kind"], move["predecessor"], move["version"]) for move in history]
    assert moves == [("promotion", None, "1"), ("promotion", "1", "2"), ("rollback", "2", "1")]


@pytest.mark.parametrize(
    ("variables", "way"),
    [({}, "presigned"), ({"MLFLOW_ENABLE_PROXY_MULTIPART_DOWNLOAD": "false"}, "artifacts")],
    ids=["past the server", "through the server"],
)
def test_a_pair_is_loaded_from_the_bucket_once_and_kept_by_its_digest(
    elsewhere: Project, stores: Stores, tmp_path: Path, variables: dict[str, str], way: str
) -> None:
    bare = replace(elsewhere, root=tmp_path, variables={**elsewhere.variables, **variables})
    question = (CHAMPION, bare.world.question, "--max-new-tokens", "24")
    answers, fetched = [], []
    for _ in range(2):
        asked: list[str] = []
        stores.proxy.deal = noting(asked, "GET")
        answers.append(bare.cli("generate", *question))
        stores.proxy.heal()
        of_files = [path.partition("/mlflow-artifacts/")[2] for path in asked]
        fetched.append([path for path in of_files if path not in ("", "artifacts")])
    assert any(path.endswith(HELD) for path in fetched[0])
    assert all(path.startswith(f"{way}/") for path in fetched[0])
    assert fetched[1] == []
    assert answers[0]["text"] == answers[1]["text"]
    assert answers[0]["text"].startswith(bare.world.answer_start)
    digest = answers[0]["pair_digest"]
    kept = tmp_path / "models" / "champions" / short(digest)
    assert read_json(kept / "pair.json")["pair_digest"] == digest


def test_a_bucket_that_is_away_is_no_damage_and_an_object_that_is_lost_is(
    elsewhere: Project, stores: Stores
) -> None:
    stores.objects.stop()
    done = elsewhere.draftsmith("verify", "1")
    stores.objects.start()
    assert (done.returncode, done.stdout) == (EXIT_USER_ERROR, "")
    assert "digest differs" not in done.stderr
    assert [pair["state"] for pair in elsewhere.cli("pairs")][0] == "ok"
    model = next(key for key in stores.objects.sizes(SERVER) if key.endswith(HELD))
    lost = model.replace(HELD, f"artifacts/draft/{WEIGHTS}")
    client, bucket = stores.objects.client(SERVER), BUCKETS[SERVER]
    body = client.get_object(Bucket=bucket, Key=lost)["Body"].read()
    client.delete_object(Bucket=bucket, Key=lost)
    damaged = elsewhere.draftsmith("verify", _version_of(stores, model))
    assert damaged.returncode == EXIT_USER_ERROR
    assert "digest differs" in damaged.stderr
    client.put_object(Bucket=bucket, Key=lost, Body=body)
    elsewhere.cli("verify", _version_of(stores, model))


def _version_of(stores: Stores, key: str) -> str:
    """The version whose files lie beside an object."""
    (model_id,) = re.findall(r"models/(m-\w+)/", key)
    query = f"SELECT version FROM model_versions WHERE source LIKE '%{model_id}%'"
    ((version,),) = stores.database.ask(DATABASE, query)
    return str(version)


def test_no_key_is_in_what_was_said_or_written(
    home: Project, colleague: Project, elsewhere: Project, stores: Stores
) -> None:
    folders = [project.root for project in (home, colleague, elsewhere)] + [stores.root]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    texts = [text.encode() for text in home.said] + [path.read_bytes() for path in files]
    assert any(stores.objects.url.encode() in text for text in texts)  # what is no secret is found
    for secret in stores.secrets:
        assert not any(secret.encode() in text for text in texts)
