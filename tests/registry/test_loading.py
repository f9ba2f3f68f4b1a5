from __future__ import annotations

import dataclasses
import shutil
from functools import partial

import mlflow
import pytest
import torch

from draftsmith import load_pair
from draftsmith.artifacts import short, write_json
from draftsmith.errors import ArtifactError, DraftError, RegistryError, TargetError
from draftsmith.registry.loading import target_reachable
from draftsmith.registry.mlflow_store import PairStore
from draftsmith.registry.pair import PairRecord
from draftsmith.registry.settings import RegistryConfig
from draftsmith.targets.identity import identify
from draftsmith.targets.loading import load_target
from tests.registry.small_pairs import TAGS
from tests.registry.tiny_models import save_draft_for, save_target

CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_target(folder / "target")
    save_target(folder / "other", seed=1)
    return folder, save_draft_for(folder / "target", folder / "draft")


@pytest.fixture
def files(pristine, root):
    folder, record = pristine
    shutil.copytree(folder, root, dirs_exist_ok=True)
    return record


@pytest.fixture
def pair(store, root, files):
    """The registered and promoted pair; its target is recorded by path."""
    write_json(root / "benchmark.json", {"draft_length": 3})
    version = store.register(
        files,
        root / "draft",
        evidence={"benchmark.json": root / "benchmark.json"},
        tags=TAGS,
        target_source=str(root / "target"),
    )
    store.promote(version, [])
    return store.resolve(version)


def reference(folder, prompt_ids, *, max_new_tokens):
    """The target's own greedy continuation by plain forwards."""
    model = load_target(folder, dtype="float32").model
    ids = torch.tensor([prompt_ids])
    for _ in range(max_new_tokens):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt_ids) :].tolist()


def test_a_pair_generates_what_its_target_would(root, pair):
    loaded = load_pair("models:/demo@champion", root=root)
    result = loaded.generate(CHAT, max_new_tokens=16)
    tokenizer = load_target(root / "target", dtype="float32").tokenizer
    prompt = "<|start|>user\nhello<|end|>\n<|start|>assistant\n"
    expected = reference(root / "target", tokenizer(prompt).input_ids, max_new_tokens=16)
    if 2 in expected:
        expected = expected[: expected.index(2) + 1]
    assert result.token_ids == expected
    assert result.text == tokenizer.decode(expected, skip_special_tokens=True)
    assert result.num_rounds >= 1
    assert result.block_efficiency == len(expected) / result.num_rounds
    assert result.tokens_per_s > 0
    assert loaded.generate("hello", max_new_tokens=16).token_ids == expected
    assert loaded.generate(CHAT, max_new_tokens=16, draft_length=0).token_ids == expected


def test_the_stream_gives_the_same_text(root, pair):
    loaded = load_pair("models:/demo/1", root=root)
    for temperature in (0.0, 1.0):
        options = {"max_new_tokens": 40, "temperature": temperature, "seed": 3}
        pieces = list(loaded.stream(CHAT, **options))
        assert len(pieces) > 1
        assert "".join(pieces) == loaded.generate(CHAT, **options).text


def test_an_adaptive_length_changes_no_answer_and_keeps_its_measured_costs(root, pair):
    folder = root / "build" / "partial" / "costs"
    texts, contents = set(), set()
    for _ in range(2):
        loaded = load_pair("models:/demo@champion", root=root)
        texts.add(loaded.generate(CHAT, max_new_tokens=16, draft_length="adaptive").text)
        texts.add("".join(loaded.stream(CHAT, max_new_tokens=16, draft_length="adaptive")))
        (path,) = folder.iterdir()
        contents.add(path.read_text())
    assert texts == {loaded.generate(CHAT, max_new_tokens=16, draft_length=0).text}
    assert len(contents) == 1


def test_evidence_comes_with_the_pair_and_sets_the_draft_length(root, pair, files):
    loaded = load_pair("models:/demo@champion", root=root)
    assert loaded.evidence == {"benchmark": {"draft_length": 3}}
    assert loaded.draft_length == 3
    assert loaded.record == files


def test_a_fetched_folder_loads_without_a_registry(root, store, pair):
    folder = store.fetch(pair.pair, root / "models" / "champions")
    assert load_pair(str(folder), root=root).record.digest == pair.pair.pair_digest


def test_the_snapshot_outlives_a_source_that_was_overwritten(root, pair):
    snapshot = root / "models" / "targets" / short(pair.pair.target_digest)
    shutil.copytree(root / "target", snapshot)
    shutil.rmtree(root / "target")
    shutil.copytree(root / "other", root / "target")
    assert load_pair("models:/demo@champion", root=root).generate("hello", max_new_tokens=2).text
    assert target_reachable(pair, root=root)


def test_another_target_is_refused_by_name(root, pair):
    other = load_target(root / "other", dtype="float32").identity.digest
    with pytest.raises(TargetError, match=other) as caught:
        load_pair("models:/demo@champion", root=root, target=str(root / "other"))
    assert pair.pair.target_digest in str(caught.value)


def test_an_overwritten_source_without_a_snapshot_is_refused(root, pair):
    assert target_reachable(pair, root=root)
    shutil.rmtree(root / "target")
    shutil.copytree(root / "other", root / "target")
    with pytest.raises(TargetError, match=pair.pair.target_digest):
        load_pair("models:/demo@champion", root=root)
    assert not target_reachable(pair, root=root)
    shutil.rmtree(root / "target")
    assert not target_reachable(pair, root=root)
    with pytest.raises(TargetError):
        load_pair("models:/demo@champion", root=root)


def test_an_incomplete_draft_is_refused(root, store, pair):
    folder = store.fetch(pair.pair, root / "fetched")
    (folder / "draft" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(DraftError, match="model.safetensors"):
        load_pair(str(folder), root=root)


@pytest.mark.parametrize(
    "uri", ["models:/demo", "models:/demo/1/2", "models:demo@champion", "models:/demo@a@b"]
)
def test_an_address_of_another_form_is_refused(root, uri):
    with pytest.raises(RegistryError, match="models:/<name>@<alias>"):
        load_pair(uri, root=root)


def test_a_folder_without_a_pair_is_refused(root):
    with pytest.raises(ArtifactError, match="pair.json"):
        load_pair(str(root), root=root)


def test_mlflow_loads_the_pair_by_itself(root, store, pair, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root}/mlflow.db")
    monkeypatch.chdir(root)
    loaded = mlflow.pyfunc.load_model("models:/demo@champion", model_config={"max_new_tokens": 8})
    expected = load_pair("models:/demo@champion", root=root).generate(CHAT, max_new_tokens=8).text
    assert loaded.predict(["hello"]) == [expected]
    assert loaded.predict([CHAT, [*CHAT, *CHAT]])[0] == expected
    assert store.check_model(pair.pair)  # where it loaded, it left files of its own


def test_mlflow_takes_the_target_from_elsewhere_but_no_other_target(root, pair, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root}/mlflow.db")
    monkeypatch.chdir(root)
    shutil.move(root / "target", root / "moved")
    uri = "models:/demo@champion"
    moved = {"target": {"directory": str(root / "moved")}, "max_new_tokens": 2}
    assert len(mlflow.pyfunc.load_model(uri, model_config=moved).predict(["hello"])) == 1
    other = load_target(root / "other", dtype="float32").identity.digest
    with pytest.raises(TargetError, match=other):
        mlflow.pyfunc.load_model(uri, model_config={"target": {"directory": str(root / "other")}})
    with pytest.raises(TargetError, match="target_digest"):
        mlflow.pyfunc.load_model(uri, model_config={**moved, "target_digest": other})


def test_a_reused_draft_loads_beside_the_new_target(root, store, files):
    """The draft keeps the target it was distilled from; the pair's own target is another."""
    new_target = identify(root / "other", "float32")
    reused = PairRecord(target=dataclasses.asdict(new_target), draft=files.draft)
    arguments = {"evidence": {}, "tags": TAGS, "target_source": str(root / "other")}
    version = store.register(reused, root / "draft", **arguments)
    loaded = load_pair(f"models:/demo/{version}", root=root)
    assert loaded.record.target_digest == new_target.digest
    assert loaded.record.draft.target_digest != new_target.digest
    assert loaded.generate("hello", max_new_tokens=4).num_rounds > 0


def test_a_target_that_lives_in_the_registry_is_fetched_into_a_snapshot(root, store, files):
    """A version that holds its target serves as the source of another pair's."""
    snapshot = root / "models" / "targets" / short(files.target_digest)
    shutil.copytree(root / "target", snapshot)
    holder = PairStore(root, RegistryConfig("holder", "draftsmith", include_target=True))
    arguments = {"evidence": {}, "tags": TAGS}
    holder.register(files, root / "draft", target_source="", **arguments)
    shutil.rmtree(snapshot)
    shutil.rmtree(root / "target")
    store.register(files, root / "draft", target_source="models:/holder/1", **arguments)
    assert target_reachable(store.resolve("1"), root=root)
    assert load_pair("models:/demo/1", root=root).generate("hello", max_new_tokens=2).num_rounds
    assert snapshot.is_dir()


@pytest.fixture
def whole(root, files):
    """A version that holds its target, on a machine with neither the snapshot nor the source."""
    snapshot = root / "models" / "targets" / short(files.target_digest)
    shutil.copytree(root / "target", snapshot)
    store = PairStore(root, RegistryConfig("demo", "draftsmith", include_target=True))
    arguments = {"evidence": {}, "tags": TAGS, "target_source": str(root / "target")}
    version = store.register(files, root / "draft", **arguments)
    store.promote(version, [])
    shutil.rmtree(root / "models")
    shutil.rmtree(root / "target")
    return store.resolve(version)


def test_a_version_that_holds_its_target_needs_no_other_place(root, whole):
    assert target_reachable(whole, root=root)
    shutil.rmtree(root / "models")
    loaded = load_pair("models:/demo@champion", root=root)
    assert loaded.generate("hello", max_new_tokens=2).num_rounds
    assert (root / "models" / "targets" / short(whole.pair.target_digest)).is_dir()


def test_a_rollback_finds_the_target_in_the_version(root, store, files, whole):
    """It holds the registry's lock while it looks."""
    other = dataclasses.asdict(identify(root / "other", "float32"))
    arguments = {"evidence": {}, "tags": TAGS, "target_source": str(root / "other")}
    later = PairRecord(target=other, draft=files.draft)
    store.promote(store.register(later, root / "draft", **arguments), [])
    reachable = partial(target_reachable, root=root)
    assert (
        store.rollback(reason="slow", is_reachable=reachable).champion.version == whole.pair.version
    )


def test_mlflow_loads_a_version_that_holds_its_target(root, whole, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root}/mlflow.db")
    monkeypatch.chdir(root)
    loaded = mlflow.pyfunc.load_model("models:/demo@champion", model_config={"max_new_tokens": 2})
    assert len(loaded.predict(["hello"])) == 1


def test_another_target_in_the_version_is_refused_by_name(root, whole):
    (held,) = (root / "mlartifacts").rglob("artifacts/target")
    shutil.copytree(root / "other", held, dirs_exist_ok=True)
    with pytest.raises(TargetError, match=identify(held, "float32").digest) as caught:
        load_pair("models:/demo@champion", root=root)
    assert whole.pair.target_digest in str(caught.value)
    assert not target_reachable(whole, root=root)


def test_a_target_that_is_nowhere_names_every_place_that_was_tried(root, pair):
    shutil.rmtree(root / "target")
    with pytest.raises(TargetError) as caught:
        load_pair("models:/demo@champion", root=root)
    snapshot = root / "models" / "targets" / short(pair.pair.target_digest)
    for place in (str(snapshot), str(root / "target"), "models:/demo/1: a pair that holds"):
        assert place in str(caught.value)
