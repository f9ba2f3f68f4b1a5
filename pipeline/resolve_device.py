"""Stage resolve_device: what does this machine measure on?"""

from draftsmith import provenance
from draftsmith.artifacts import write_json
from draftsmith.console import run_stage
from pipeline import DEVICE


def main() -> None:
    write_json(DEVICE, provenance.device())


if __name__ == "__main__":
    run_stage(main)
