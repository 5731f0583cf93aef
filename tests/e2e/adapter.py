"""Does a run's merged export answer as its base model with the adapter does?

    python -m tests.e2e.adapter CHECKPOINT/model BASE_MODEL QUESTIONS.jsonl

prints how many of 50 greedy answers are identical, token for token in fp32, and the adapter's bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTIONS = 50


def greedy(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """The model's greedy continuations, one by one."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def compare(merged: Path, base: Path, questions: Path) -> dict[str, int]:
    """Answers compared, and how many are identical."""
    tokenizer = AutoTokenizer.from_pretrained(merged)
    lines = questions.read_text().splitlines()[:QUESTIONS]
    prompts = [tokenizer(json.loads(line)["question"])["input_ids"] for line in lines]
    whole = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = greedy(plain, prompts)
    parts = PeftModel.from_pretrained(plain, str(merged / "adapter"))
    ours, theirs = greedy(whole, prompts), greedy(parts, prompts)
    return {
        "questions": len(prompts),
        "identical": sum(one == other for one, other in zip(ours, theirs, strict=True)),
        "changed by the adapter": sum(one != other for one, other in zip(ours, before, strict=True)),
        "adapter bytes": (merged / "adapter" / "adapter_model.safetensors").stat().st_size,
        "model bytes": (merged / "model.safetensors").stat().st_size,
    }


def main() -> int:
    """Exit code 0 if all answers are identical."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("merged", "base", "questions"):
        parser.add_argument(name, type=Path)
    found = compare(**vars(parser.parse_args()))
    print(json.dumps(found, indent=1))
    return 0 if found["identical"] == found["questions"] else 1


if __name__ == "__main__":
    sys.exit(main())
