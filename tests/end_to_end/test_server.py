"""A pair's life on a tracking server: of the registry, a machine knows the address and its user.

The tests are steps of one story, in their order. A run whose upload breaks off is taken up again;
then the target's checkpoint is gone here, and other machines look, serve, promote, roll back and
prune: one with what Git brings, one with nothing at all.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from draftsmith.artifacts import digest_directory, read_json, short, write_json
from draftsmith.registry import mlflow_upload
from draftsmith.registry.mlflow_store import PairStore
from draftsmith.registry.pair import PairRecord
from draftsmith.registry.settings import RegistryConfig
from draftsmith.serving.server import PairServer
from tests.end_to_end.conftest import Project
from tests.registry import tracking_server
from tests.registry.measurements import measurement
from tests.registry.small_pairs import SOURCE, TAGS, make_files, make_little_code, make_record
from tests.registry.tracking_server import IN_UPLOAD, Proxy, after, encoded, free_port
from tests.serving.service import chat, health, make_draft, post, serving, wait_until

pytestmark = pytest.mark.slow

NAME = "served-pair"
CHAMPION = f"models:/{NAME}@champion"
CI, READER = "ci", "reader"
# Drawn anew: the project is a copy of the working tree, which must not hold them.
PASSWORDS = {user: secrets.token_hex(16) for user in (CI, READER)}
WRONG = secrets.token_hex(16)
EXIT_USER_ERROR, EXIT_BLOCKED, EXIT_REPRO_FAILED = 2, 3, 255
UNREACHABLE = re.compile(
    r"(Error|draftsmith): connecting to the registry: found \S(?s:.*); "
    r"expected a registry that answers, at http://127\.0\.0\.1:\d+\. "
    r"To mend it: check MLFLOW_TRACKING_URI, .*\n"
)


class Server(NamedTuple):
    """A running server.

    Attributes:
        root: Folder of its database, files and log.
        proxy: The way to it.
    """

    root: Path
    proxy: Proxy

    def variables(self, user: str) -> dict[str, str]:
        """What a user of it sets."""
        return tracking_server.client_variables(self.proxy.url, user, PASSWORDS[user], self.root)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With two users, neither of whom administers it."""
    pytest.importorskip("flask_wtf", reason="MLflow's basic auth needs Flask-WTF")
    root = tmp_path_factory.mktemp("server")
    database = f"sqlite:///{root}/server.db"
    with tracking_server.running(root, database) as port, Proxy(port) as proxy:
        for user, password in PASSWORDS.items():
            tracking_server.add_user(proxy.url, user, password)
        yield Server(root, proxy)


@pytest.fixture(scope="module")
def target(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that only this story moves away."""
    return Path(shutil.copytree(checkpoints / "home", tmp_path_factory.mktemp("target") / "home"))


@pytest.fixture(scope="module")
def home(warm: Project, server: Server, target: Path) -> Project:
    """The project where the pipeline runs."""
    made = replace(warm, variables=server.variables(CI), said=[])
    made.configure(
        target={"source": str(target)},
        registry={"name": NAME, "experiment": NAME, "include_target": True},
    )
    return made


@pytest.fixture(scope="module")
def moved_target(target: Path) -> Path:
    """The checkpoint, where no version's record says that it is."""
    return target.rename(target.with_name("moved"))


@pytest.fixture(scope="module")
def clone(home: Project, moved_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Another machine of the same user, with the file that the commands need of a checkout."""
    root = tmp_path_factory.mktemp("clone")
    (root / "build").mkdir()
    shutil.copy2(home.root / "build" / "config.yaml", root / "build")
    return replace(home, root=root)


@pytest.fixture(scope="module")
def reader(clone: Project, server: Server) -> Project:
    """The clone, used by one who may read."""
    return replace(clone, variables=server.variables(READER))


@pytest.fixture(scope="module")
def bare(reader: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A machine with nothing but the address, for one who may read."""
    return replace(reader, root=tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def store(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PairStore]:
    """The registry from within this process, for the pipeline's user."""
    root = tmp_path_factory.mktemp("inside")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.variables(CI).items():
            patch.setenv(name, value)
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setattr(mlflow_upload, "_PACKAGE", make_little_code(root))
        yield PairStore(root, RegistryConfig(NAME, NAME))


@pytest.fixture(scope="module")
def more_versions(
    store: PairStore, moved_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Version 2, another draft of the same target; 3 and 4, whose files are no models."""
    root = tmp_path_factory.mktemp("more")
    record = make_draft(moved_target, root / "second", layers=(0, 3))
    evidence = {"benchmark.json": root / "benchmark.json"}
    write_json(root / "benchmark.json", {"draft_length": 3})
    made = {"tags": TAGS, "evidence": evidence}
    store.register(record, root / "second", target_source="", **made)
    for draft in ("d3", "d4"):
        draft_dir, _ = make_files(root / draft, draft)
        store.register(make_record("t", draft), draft_dir, target_source=SOURCE, **made)


@pytest.fixture(scope="module")
def service(store: PairStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PairServer]:
    """Follows the champion, on a machine with nothing."""
    with serving(tmp_path_factory.mktemp("service"), CHAMPION, poll_s=0.5) as running:
        yield running


def _receipts(project: Project) -> dict[str, bytes]:
    """What the stages that write to the registry leave."""
    found = (project.root / "reports").glob("*.json")
    names = ("registration", "decision", "promotion")
    return {path.name: path.read_bytes() for path in found if path.stem in names}


def test_an_upload_that_breaks_off_fails_the_run_and_leaves_nothing_behind(
    home: Project, server: Server
) -> None:
    before = _receipts(home)
    server.proxy.deal = after(5, "down", **IN_UPLOAD)
    done = home.repro()
    server.proxy.heal()
    assert done.returncode == EXIT_REPRO_FAILED
    told = done.stdout + done.stderr
    assert "draftsmith: registering student: found" in told, told[-3000:]
    assert "To mend it: check MLFLOW_TRACKING_URI, the server and its credentials" in told
    assert "Traceback" not in told
    assert _receipts(home) == before
    assert home.cli("pairs") == []


def test_the_next_run_registers_one_version_there_and_promotes_it(home: Project) -> None:
    done = home.repro()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    (pair,) = home.cli("pairs")
    assert (pair["version"], pair["aliases"]) == ("1", ["challenger", "champion"])
    assert home.report("reports/promotion.json")["promoted"] is True
    local = home.root / "mlflow.db"
    assert not local.exists() or NAME.encode() not in local.read_bytes()


def test_stages_that_ask_the_server_again_find_all_settled(home: Project) -> None:
    before = home.cli("pairs")
    for stage in ("resolve_champion", "start", "register", "promote"):
        done = home.run("python", "-m", f"pipeline.{stage}")
        assert done.returncode == 0, stage + done.stderr[-3000:]
    assert home.report("build/champion.json")["champion"]["version"] == "1"
    assert home.report("build/start.json")["recipes"]["student"]["action"] == "known"
    assert home.cli("pairs") == before


def test_who_may_read_sees_everything_from_another_machine(reader: Project) -> None:
    (pair,), seen = reader.cli("pairs"), reader.cli("status")
    assert seen["champion"] == seen["challenger"] == pair
    assert seen["target"] is seen["decision"] is None  # files of the project, which is elsewhere
    (move,), (speed,) = reader.cli("history"), reader.cli("evidence", "list")
    assert (move["kind"], move["predecessor"], move["version"]) == ("promotion", None, "1")
    assert speed["origin"] == "pipeline"
    found = reader.cli("verify")
    assert (found["holds"], found["model_checked"]) == (True, True)
    for command in ("pairs", "status", "history", "evidence list"):
        done = reader.draftsmith(*command.split())
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout


def test_a_machine_that_has_only_the_address_gets_the_targets_answer(bare: Project) -> None:
    answer = bare.cli("generate", CHAMPION, bare.world.question, "--max-new-tokens", "24")
    assert answer["text"].startswith(bare.world.answer_start)
    assert answer["block_efficiency"] > 1
    assert len(list((bare.root / "models" / "targets").glob("*/model.safetensors"))) == 1


def test_speed_of_another_machine_is_attached_by_who_may_write(
    home: Project, clone: Project, reader: Project
) -> None:
    digest = clone.cli("pairs")[0]["pair_digest"]
    path = home.root / "models" / "champions" / short(digest) / "pair.json"
    write_json(clone.root / "speed.json", measurement(PairRecord.from_json(read_json(path))))
    refused = reader.draftsmith("evidence", "import", "speed.json")
    assert (refused.returncode, refused.stdout) == (EXIT_USER_ERROR, "")
    assert "Error: attaching evidence of a device: found" in refused.stderr
    assert not (clone.root / "evidence").exists()
    done = clone.cli("evidence", "import", "speed.json")
    assert read_json(clone.root / done["file"])["device"]["name"] == done["device"]
    origins = [entry["origin"] for entry in reader.cli("evidence", "list", "--version", "1")]
    assert origins == ["imported", "pipeline"]
    asked = reader.cli("generate", f"models:/{NAME}/1", reader.world.question)
    assert asked["pair_digest"] == digest


@pytest.mark.usefixtures("more_versions")
def test_a_version_is_promoted_by_its_decision_and_by_who_may_write(
    clone: Project, reader: Project, store: PairStore, tmp_path: Path
) -> None:
    digests = {item["version"]: item["target_digest"] for item in clone.cli("pairs")}
    assert digests["1"] == digests["2"]
    assert "draft_digest" in reader.cli("diff", "1", "2")
    undecided = clone.draftsmith("promote", "2")
    assert undecided.returncode == EXIT_BLOCKED
    assert "no decision is recorded" in undecided.stderr
    write_json(tmp_path / "decision.json", {"verdict": "promote", "reasons": ["it is faster"]})
    store.attach_decision("2", tmp_path / "decision.json", tmp_path / "decision.json")
    refused = reader.draftsmith("promote", "2")
    assert (refused.returncode, refused.stdout) == (EXIT_USER_ERROR, "")
    assert "Permission denied" in refused.stderr
    assert reader.cli("status")["champion"]["version"] == "1"
    assert [move["version"] for move in reader.cli("history")] == ["1"]


@pytest.mark.usefixtures("more_versions")
def test_a_service_follows_what_is_promoted_and_rolled_back_elsewhere(
    clone: Project, service: PairServer
) -> None:
    assert health(service)["version"] == "1"
    moved = clone.cli("promote", "2")
    assert (moved["promoted"], moved["predecessor"]) == (True, "1")
    wait_until(lambda: health(service)["version"] == "2")
    asked = chat(clone.world.question, model=NAME)
    assert post(service, asked).status_code == 200
    moved = clone.cli("rollback", "--reason", f"slow: {PASSWORDS[CI]}")
    assert (moved["quarantined"], moved["champion"]["version"]) == ("2", "1")
    wait_until(lambda: health(service)["version"] == "1")
    assert (health(service)["refused"], health(service)["registry"]) == (None, "ok")
    assert clone.cli("pairs")[1]["quarantine"] == "slow: ***"
    assert [move["reason"] for move in clone.cli("history")][1:] == ["it is faster", "slow: ***"]


@pytest.mark.parametrize(
    ("fault", "found"), [("away", "failed with exception"), ("shut", "not authenticated")]
)
def test_a_service_that_gets_no_answer_serves_on_and_says_so(
    service: PairServer,
    server: Server,
    clone: Project,
    caplog: pytest.LogCaptureFixture,
    fault: str,
    found: str,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if fault == "shut":
            patch.setenv("MLFLOW_TRACKING_PASSWORD", WRONG)
        else:
            server.proxy.deal = lambda *_: "down"
        wait_until(lambda: found in health(service)["registry"])
        told = health(service)["registry"] + caplog.text
        assert post(service, chat(clone.world.question, model=NAME)).status_code == 200
    server.proxy.heal()
    wait_until(lambda: health(service)["registry"] == "ok")
    assert health(service)["version"] == "1"
    assert "event=registry_unreachable" in told
    assert not any(secret in told for secret in (WRONG, *PASSWORDS.values()))


@pytest.mark.usefixtures("more_versions")
def test_prune_deletes_what_nothing_needs(clone: Project) -> None:
    planned = clone.cli("prune", "--keep", "2", "--dry-run")
    assert planned["removed"] == ["3"]
    assert clone.cli("prune", "--keep", "2")["removed"] == ["3"]
    assert [item["version"] for item in clone.cli("pairs")] == ["1", "2", "4"]


@pytest.fixture(params=["wrong password", "no server"])
def changed(request: pytest.FixtureRequest) -> dict[str, str]:
    """What keeps a user out."""
    if request.param == "wrong password":
        return {"MLFLOW_TRACKING_PASSWORD": WRONG}
    return {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{free_port()}"}


def test_every_command_that_gets_no_answer_tells_one_error_and_changes_nothing(
    clone: Project, changed: dict[str, str]
) -> None:
    outside = replace(clone, variables={**clone.variables, **changed})
    commands = ["pairs", "status", "history", "diff 1 2", "verify", "promote 1", "rollback"]
    commands += ["prune", "evidence list", "evidence import speed.json", f"generate {CHAMPION} a"]
    before = digest_directory(outside.root)
    for command in commands:
        done = outside.draftsmith(*command.split(), "--json")
        assert (done.returncode, done.stdout) == (EXIT_USER_ERROR, ""), command
        assert UNREACHABLE.fullmatch(done.stderr), done.stderr
    assert digest_directory(outside.root) == before


def test_every_stage_that_gets_no_answer_tells_one_error_and_changes_nothing(
    home: Project, changed: dict[str, str]
) -> None:
    outside = replace(home, variables={**home.variables, **changed})
    written = [home.root / name for name in ("build", "reports", "models")]
    before = [digest_directory(folder) for folder in written]
    for stage in ("resolve_champion", "start", "register", "promote"):
        done = outside.run("python", "-m", f"pipeline.{stage}")
        assert (done.returncode, done.stdout) == (EXIT_USER_ERROR, ""), stage
        assert UNREACHABLE.fullmatch(done.stderr.lstrip()), done.stderr
    assert [digest_directory(folder) for folder in written] == before
    assert [item["version"] for item in home.cli("pairs")] == ["1", "2", "4"]


def test_no_password_is_in_what_was_said_or_written(
    home: Project, clone: Project, bare: Project, server: Server
) -> None:
    folders = [project.root for project in (home, clone, bare)] + [server.root]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    texts = [text.encode() for text in home.said] + [path.read_bytes() for path in files]
    assert sum(b"not authenticated" in text for text in texts) > len(PASSWORDS)
    hidden = [WRONG, encoded(CI, WRONG), *PASSWORDS.values()]
    for secret in [*hidden, *(encoded(*user) for user in PASSWORDS.items())]:
        assert not any(secret.encode() in text for text in texts)
