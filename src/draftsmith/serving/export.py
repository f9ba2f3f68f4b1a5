"""A pair's draft on disk as other engines load it: a whole model, or for vLLM a feature head.

The folder holds the draft, a record of the target that it belongs to, and a README with the command
that loads both. What was written is loaded again and its logits are compared with the source's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.artifacts import atomic_directory, write_json, write_text
from draftsmith.decoding.slot_model import SlotModel
from draftsmith.drafts.eagle import EagleHead
from draftsmith.errors import ArtifactError, ConfigError, DraftError
from draftsmith.registry.generation import Pair
from draftsmith.serving.eagle3 import write_head
from draftsmith.serving.eagle3_reference import compared_logits
from draftsmith.targets.components import load_model

_DRAFT, _TARGET, _SPECULATION = "draft", "target.json", "speculative_config.json"
_NUM_TOKENS = 32
# Of the largest logit: another width of the last product may round otherwise.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
_TEXT = "The quick brown fox jumps over the lazy dog, and then it rains all day."


def export_pair(pair: Pair, directory: Path, *, to: str) -> dict[str, Any]:
    """Write `directory`, which must not exist.

    Args:
        pair: Whose draft it is.
        directory: What is made, in one step.
        to: transformers, or vllm.

    Returns:
        `engine`, `draft`, `target`, `draft_length` and `largest_difference` of the logits.

    Raises:
        ConfigError: There is no such engine.
        ArtifactError: The folder exists, or the disk refused.
        DraftError: The draft is of a family that this engine cannot load, or the written one gives
            other logits.
    """
    _require_known(to)
    if directory.exists():
        raise ArtifactError(
            f"writing {directory}",
            found="a file or folder of that name",
            expected="none",
            remedy="choose another name, or remove it",
        )
    length = max(1, pair.chain_length)
    with atomic_directory(directory) as folder:
        if to == "vllm" and isinstance(pair.draft.model, EagleHead):
            write_head(pair.draft.model, pair.draft.token_ids, folder / _DRAFT)
        else:
            _write_draft(pair, folder / _DRAFT, length)
        difference = _largest_difference(pair, folder / _DRAFT)
        target = _target(pair)
        write_json(folder / _TARGET, target)
        # Absolute: whoever serves starts elsewhere.
        place = directory.resolve() / _DRAFT
        speculation = _speculation(pair, place, length)
        if to == "vllm":
            write_json(folder / _SPECULATION, speculation)
        write_text(folder / "README.md", _readme(pair, to, place, speculation))
        _make_readable(folder)
    return {
        "engine": to,
        "draft": str(place),
        "target": target,
        "draft_length": length,
        "largest_difference": difference,
    }


def _make_readable(folder: Path) -> None:
    """Weights are written for their owner alone; a server may run as somebody else."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)


def _require_known(to: str) -> None:
    if to not in ("transformers", "vllm"):
        raise ConfigError(
            "reading --to", found=repr(to), expected="transformers or vllm", remedy="pass one"
        )


def _write_draft(pair: Pair, folder: Path, length: int) -> None:
    model = pair.draft.as_causal_lm(pair.target.model)
    _tie(model)
    model.save_pretrained(folder)
    _generation(pair, length).save_pretrained(folder)
    pair.target.tokenizer.save_pretrained(folder)


def _tie(model: PreTrainedModel) -> None:
    """Say in the configuration whether embedding and head are one, so that one is written."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert isinstance(embedding, Tensor)
    model.config.tie_word_embeddings = head.data_ptr() == embedding.data_ptr()


def _generation(pair: Pair, length: int) -> GenerationConfig:
    """What Transformers' assisted generation reads: as many drafts a round as were measured best.

    Left alone it takes more or fewer after each round, and stops where the draft hesitates.
    """
    own = pair.target.model.generation_config
    return GenerationConfig(
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id,
        num_assistant_tokens=length,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )


def _largest_difference(pair: Pair, folder: Path) -> float:
    """Of the written draft's logits from the source's, over the source's vocabulary.

    Raises:
        DraftError: They differ by more than rounding.
    """
    model = pair.draft.model
    ids = pair.target.tokenizer(_TEXT, add_special_tokens=False).input_ids[:_NUM_TOKENS]
    text = torch.tensor([ids], device=model.device)
    remedy = "report the model class: its checkpoint does not hold all that it computes with"
    if isinstance(model, EagleHead):
        expected, found = compared_logits(
            model, pair.draft.token_ids, pair.target.model, folder, text=text
        )
        remedy = (
            "use a recipe of family student for this target: its class computes layers otherwise "
            "than Llama's, which is all that vLLM's head can"
        )
    else:
        expected, found = _whole_model_logits(pair, folder, text)
    rows = expected.isfinite()  # elsewhere the draft has none
    difference = float(torch.where(found == expected, 0.0, (found - expected).abs()).max())
    allowed = _TOLERANCE[model.dtype] * float(expected[rows].abs().max())
    if not difference <= allowed:
        raise DraftError(
            f"exporting the draft of the pair {pair.record.digest}",
            found=f"logits that differ from the source's by {difference:.3g}",
            expected=f"at most {allowed:.3g}",
            remedy=remedy,
        )
    return difference


@torch.inference_mode()
def _whole_model_logits(pair: Pair, folder: Path, text: Tensor) -> tuple[Tensor, Tensor]:
    """Of the source and of the written draft, `[1, width, entries]`."""
    draft = pair.draft
    dtype = str(draft.model.dtype).removeprefix("torch.")
    written = load_model(folder, dtype=dtype, device=str(text.device))
    slots = SlotModel(draft.model)  # as it drafts here
    slots.reserve(rows=1, slots=text.shape[1])
    positions = torch.arange(text.shape[1], device=text.device)[None]
    expected = slots.forward(text, positions, span=text.shape[1]).float()
    found = written(input_ids=text).logits.float()
    return expected, found if draft.token_ids is None else found[..., draft.token_ids]


def _target(pair: Pair) -> dict[str, Any]:
    """Which target the draft belongs to, and where it lies."""
    record = pair.record
    return {
        "pair_digest": record.digest,
        "digest": record.target_digest,
        "dtype": str(record.target["dtype"]),
        "directory": str(pair.target.directory.resolve()),
    }


def _speculation(pair: Pair, draft: Path, length: int) -> dict[str, Any]:
    """What vLLM's --speculative-config takes."""
    method = "draft_model" if pair.draft.is_causal_lm else "eagle3"
    return {"method": method, "model": str(draft), "num_speculative_tokens": length}


_README = """\
# The draft of pair {pair}

For the target {target}
({dtype}, in `{directory}`), and for no other: with another one it is slow, though never wrong.

{command}

`draft/` moves with this folder; then mend its path above.
"""
_VLLM = """\
```bash
vllm serve {directory} --dtype {dtype} \\
    --speculative-config '{speculation}'
```

The same configuration is in `speculative_config.json`."""
_TRANSFORMERS = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{directory}")
target = AutoModelForCausalLM.from_pretrained("{directory}", dtype="{dtype}")
draft = AutoModelForCausalLM.from_pretrained("{draft}", dtype="{dtype}")
inputs = tokenizer("Why is the sky blue?", return_tensors="pt")
output = target.generate(**inputs, assistant_model=draft, max_new_tokens=64, do_sample=False)
print(tokenizer.decode(output[0]))
```"""


def _readme(pair: Pair, to: str, draft: Path, speculation: dict[str, Any]) -> str:
    target = _target(pair)
    command = (_VLLM if to == "vllm" else _TRANSFORMERS).format(
        directory=target["directory"],
        dtype=target["dtype"],
        draft=draft,
        speculation=json.dumps(speculation),
    )
    return _README.format(
        pair=target["pair_digest"],
        target=target["digest"],
        dtype=target["dtype"],
        directory=target["directory"],
        command=command,
    )
