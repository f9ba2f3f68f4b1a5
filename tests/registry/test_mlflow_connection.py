from __future__ import annotations

import os
import re

import mlflow
import pytest

from draftsmith.errors import DraftsmithError, RegistryError
from draftsmith.registry.mlflow_connection import connect, redact, tracking_uri, translated
from draftsmith.registry.mlflow_store import PairStore
from draftsmith.registry.settings import RegistryConfig


def test_the_default_database_is_the_projects_and_absolute(monkeypatch, tmp_path):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri(tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("sqlite:///other/pairs.db", "sqlite:///{root}/other/pairs.db"),
        ("sqlite:////srv/pairs.db", "sqlite:////srv/pairs.db"),
        ("http://server:5000", "http://server:5000"),
    ],
)
def test_the_environment_names_the_registry(monkeypatch, tmp_path, given, expected):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
    assert tracking_uri(tmp_path) == expected.format(root=tmp_path)


def test_a_server_that_does_not_answer_is_one_error_without_credentials(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ann:hidden@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(RegistryError, match="MLFLOW_TRACKING_URI") as caught:
        PairStore(tmp_path, RegistryConfig("demo", "draftsmith"))
    assert "127.0.0.1" in str(caught.value)
    assert "hidden" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_secrets_of_the_environment_are_redacted(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t0ken")
    assert redact("https://a:b@host/x said t0ken") == "https://host/x said ***"


def test_a_signed_address_is_told_without_what_opens_it():
    address = "https://s3/b/k?X-Amz-Credential=me%2Fs3&X-Amz-Expires=300&X-Amz-Signature=0a1b"
    told = redact(f"403 for url: {address} (again)")
    assert told.endswith("Credential=***&X-Amz-Expires=300&X-Amz-Signature=*** (again)")


def test_a_full_disk_is_a_users_error():
    with pytest.raises(DraftsmithError, match="No space left"), translated("registering"):
        raise OSError(28, "No space left on device", "draft")


def test_a_name_that_mlflow_would_misread_is_refused(root):
    with pytest.raises(RegistryError, match=re.escape("registry.name")):
        PairStore(root, RegistryConfig("a/b", "draftsmith"))


def test_the_global_registry_of_the_process_is_left_alone(root, register):
    before = mlflow.get_tracking_uri()
    register()
    assert mlflow.get_tracking_uri() == before
    assert "MLFLOW_TRACKING_URI" not in os.environ


def test_an_address_from_the_environment_stays_one_of_the_environment(root, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root}/mlflow.db")
    with connect(root).bound():
        pass
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/other.db")
    assert mlflow.get_tracking_uri() == f"sqlite:///{tmp_path}/other.db"


def test_connecting_again_keeps_what_is_there(root, store, register):
    register()
    again = connect(root)
    assert len(again.client.search_model_versions("name = 'demo'")) == 1


@pytest.mark.parametrize("text", ["it said pa%2Fss", "it said pa/ss", "http://ann:pa%2Fss@host/x"])
def test_the_password_of_the_address_is_redacted_wherever_it_stands(monkeypatch, text):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ann:pa%2Fss@host")
    assert "ss" not in redact(text)


def test_a_password_that_is_not_quoted_is_redacted_too():
    assert redact("http://ann:p@ss@host/x") == "http://host/x"
