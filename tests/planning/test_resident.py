"""What is planned is what real trainings add to their process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.resident import RETURNING
from tests.planning.resident_training import RUNS

ROOT = Path(__file__).resolve().parents[2]
NEAR = 0.25  # 3 % where it was written; other kernels and C libraries round memory otherwise
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 256,
}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own count")
def test_a_training_adds_to_its_process_what_is_planned(config_of):
    """In a process whose C library gives freed blocks back; what it keeps else is its own."""
    places = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    own = {**RETURNING, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.planning.resident_training", str(config_of(**WIDE))]
    done = subprocess.run(
        command, env={**os.environ, **own}, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert set(found) == set(RUNS)
    for name, sizes in found.items():
        assert sizes["planned"] == pytest.approx(sizes["measured"], rel=NEAR), (name, sizes)
