"""The `target` section."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.errors import ConfigError

DTYPE_NAMES = ("bfloat16", "float16", "float32")
_SNAPSHOTS = ("copy", "none")


@dataclass(frozen=True)
class TargetConfig:
    """Section `target` of the configuration.

    Attributes:
        name: What people call it; part of no digest.
        source: A checkpoint directory, a .gguf file, `package:<package>/<file>`,
            `hf:<org>/<name>` or `<org>/<name>`, `models:/<name>/<version>` or
            `models:/<name>@<alias>`.
        revision: Of a Hub source: branch, tag or commit; None elsewhere.
        dtype: "auto", bfloat16, float16 or float32.
        snapshot: "copy", or "none" to link to a directory that is never overwritten.
    """

    name: str
    source: str
    revision: str | None
    dtype: str
    snapshot: str

    def __post_init__(self) -> None:
        """Check the values that are chosen from a list.

        Raises:
            ConfigError: One of them is not in its list.
        """
        _require_one_of("target.dtype", self.dtype, ("auto", *DTYPE_NAMES))
        _require_one_of("target.snapshot", self.snapshot, _SNAPSHOTS)


def _require_one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(
            f"reading {key}",
            found=repr(value),
            expected=", ".join(choices),
            remedy=f"set {key} to one of these",
        )
