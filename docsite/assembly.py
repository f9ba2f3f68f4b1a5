"""The site's source: docs/ with every marked place filled by what the code says of itself.

A place is marked with a comment, so that a page reads whole where nothing fills it.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from docsite.command_line import command_line
from docsite.configuration import configuration
from docsite.formats import record, request
from draftsmith.drafts.manifest import DraftManifest
from draftsmith.drift.comparison import Comparison
from draftsmith.drift.telemetry import ServedRequest
from draftsmith.evaluation.intervals import Estimate
from draftsmith.serving.schema import ChatRequest, CompletionRequest
from draftsmith.targets.identity import TargetIdentity

MARKER = re.compile(r"^<!-- made by docsite: (.+) -->$", re.MULTILINE)


def sections(root: Path) -> dict[str, str]:
    """Markdown by the name that pages mark its place with."""
    return {
        "configuration": configuration(root),
        "command line": command_line(),
        "target.json": record(TargetIdentity),
        "draft.json": record(DraftManifest),
        "estimate": record(Estimate),
        "comparison": record(Comparison),
        "telemetry": record(ServedRequest),
        "chat completions": request(ChatRequest),
        "completions": request(CompletionRequest),
    }


def assemble(root: Path, folder: Path) -> None:
    """Write the source of the project at `root` to `folder`, which is replaced.

    Raises:
        KeyError: A page marks a place for a section that does not exist.
    """
    made = sections(root)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root / "docs", folder, ignore=shutil.ignore_patterns("*.lock", "__pycache__"))
    for page in folder.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        page.write_text(MARKER.sub(lambda found: made[found.group(1)], text), encoding="utf-8")
