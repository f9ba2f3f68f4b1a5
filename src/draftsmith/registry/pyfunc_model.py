"""The code that MLflow runs to load a registered pair: `mlflow.pyfunc.load_model(uri)`.

Logged as code, so a version holds no pickle. `load_context` refuses a target whose digest is not
the pair's, whatever the configuration at load time says.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow.models import set_model
from mlflow.pyfunc import PythonModel

if TYPE_CHECKING:
    from mlflow.pyfunc import PythonModelContext

    from draftsmith.registry.generation import Pair


class PairModel(PythonModel):
    """A pair behind MLflow's model interface."""

    def load_context(self, context: PythonModelContext) -> None:
        """Load target and draft; `model_config` may override target, root and device.

        Raises:
            DraftsmithError: The target cannot be found, or is not the pair's.
        """
        # Logging a version runs this module, and must not load torch.
        from draftsmith.artifacts import read_json  # noqa: PLC0415
        from draftsmith.errors import TargetError  # noqa: PLC0415
        from draftsmith.registry.loading import load_directory  # noqa: PLC0415
        from draftsmith.registry.pair import PairRecord  # noqa: PLC0415

        config = context.model_config
        target = dict(config.get("target") or {})
        self._max_new_tokens = int(config["max_new_tokens"])
        record = PairRecord.from_json(read_json(Path(context.artifacts["pair"])))
        if config["target_digest"] != record.target_digest:
            raise TargetError(
                "loading the pair",
                found=f"target_digest {config['target_digest']} in the model's configuration",
                expected=f"{record.target_digest}, the target that the pair was measured with",
                remedy="leave target_digest alone; override target.directory to move a target",
            )
        self._pair: Pair = load_directory(
            Path(context.artifacts["draft"]).parent,
            root=Path(config["root"]) if config.get("root") else None,
            target=target.get("directory") or None,
            source=target.get("source") or None,
            device=str(config["device"]),
        )

    def predict(self, model_input: list[Any]) -> list[str]:  # type: ignore[override]  # short form
        """Continue every prompt greedily.

        Args:
            model_input: Texts, or chats, each a list of `{"role": ..., "content": ...}`.

        Returns:
            One text a prompt.
        """
        return [
            self._pair.generate(prompt, max_new_tokens=self._max_new_tokens).text
            for prompt in model_input
        ]


set_model(PairModel())
