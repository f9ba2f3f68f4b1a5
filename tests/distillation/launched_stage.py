"""Stage distill of several recipes, one after the other in the processes that a launcher started.

Usage: python -m tests.distillation.launched_stage RECIPE...
"""

from __future__ import annotations

import runpy
import sys


def run(recipe):
    """As `python -m pipeline.distill RECIPE` runs it."""
    sys.argv[1:] = [recipe]
    try:
        runpy.run_module("pipeline.distill", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run(name)
