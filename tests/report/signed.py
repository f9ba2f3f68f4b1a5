"""A decision in which somebody signed off on the failing speedup."""

from __future__ import annotations

SIGNED = "Speedup: too low; overridden until 2026-12-31 by Ann Lee: launch week."


def sign_off(reports):
    """The same reports, blocked for another reason, with the speedup overridden."""
    decision = reports["decision"]
    (speedup,) = (check for check in decision["checks"] if check["name"] == "speedup")
    signed = {"who": "Ann Lee", "why": "launch week", "until": "2026-12-31"}
    speedup |= {"verdict": "overridden", "detail": SIGNED, "override": signed}
    decision["reasons"] = ["Another reason."]
    return reports
