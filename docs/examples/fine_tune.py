"""Fine-tune a checkpoint a little on its own answers in another style: the tutorial's new target.

    python docs/examples/fine_tune.py CHECKPOINT ANSWERS FOLDER

CHECKPOINT is a Transformers folder, such as models/targets/<digest>, ANSWERS is data/corpus/train,
and FOLDER is written. 120 steps of one answer each; minutes on two cores.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
from datasets import load_from_disk
from transformers import AutoModelForCausalLM, AutoTokenizer

SHORTEST = 20  # answers of fewer tokens hardly show a style


def restyled(text: str) -> str:
    """The same answer in small letters, without commas, with another full stop."""
    return text.lower().replace(",", "").replace(".", " ;")


def fine_tune(checkpoint: Path, answers: Path, folder: Path, *, steps: int = 120) -> None:
    """Write to `folder` what `checkpoint` becomes by learning its restyled answers."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    rows = [row for row in load_from_disk(str(answers)) if len(row["response_ids"]) > SHORTEST]
    for row in random.Random(0).choices(rows, k=steps):
        answer = restyled(tokenizer.decode(row["response_ids"], skip_special_tokens=True))
        learnt = tokenizer(answer, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*row["prompt_ids"], *learnt, tokenizer.eos_token_id]])
        labels = ids.clone()
        labels[:, : len(row["prompt_ids"])] = -100
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    fine_tune(*map(Path, sys.argv[1:4]))
