"""`python -m docsite` writes the site's source to build/site-source."""

from __future__ import annotations

from pathlib import Path

from docsite.assembly import assemble

if __name__ == "__main__":
    assemble(Path(), Path("build", "site-source"))
