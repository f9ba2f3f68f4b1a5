"""MLflow's own scoring server loads a registered pair and answers as the pair does."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import requests

from tests.serving.service import PATIENCE_S, PINNED, QUESTIONS, wait_until

NUM_TOKENS = 12


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


@pytest.fixture
def scoring(project, tmp_path):
    """The address of `mlflow models serve`."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "MLFLOW_TRACKING_URI": f"sqlite:///{project.root}/mlflow.db",
        "SERVING_MODEL_CONFIG": json.dumps({"max_new_tokens": NUM_TOKENS}),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "mlflow", "models", "serve", "--model-uri", PINNED]
    options = ["--env-manager", "local", "--host", "127.0.0.1", "--port", str(port)]
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *options],
            cwd=project.root,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(lambda: is_up(url) or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(PATIENCE_S)


def is_up(url):
    try:
        return requests.get(f"{url}/ping", timeout=PATIENCE_S).status_code == 200
    except requests.ConnectionError:
        return False


@pytest.mark.slow
def test_texts_and_chats_are_continued_greedily(scoring, pair):
    chat = [{"role": "user", "content": QUESTIONS[1]}]
    body = {"inputs": [QUESTIONS[0], chat]}
    done = requests.post(f"{scoring}/invocations", json=body, timeout=PATIENCE_S)
    expected = [pair.generate(asked, max_new_tokens=NUM_TOKENS).text for asked in body["inputs"]]
    assert (done.status_code, done.json()) == (200, {"predictions": expected})
    body = {"instances": ["a"]}
    refused = requests.post(f"{scoring}/invocations", json=body, timeout=PATIENCE_S)
    assert refused.status_code == 400
