"""The other side of benchmarks/gpu_arithmetic.py: TRL's GRPOTrainer with colocated vLLM.

    python -m benchmarks.gpu_trl MODEL QUESTIONS FOLDER STEPS

appends a line with its reward to FOLDER/rewards.jsonl after each step. TRL has to be importable.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.gpu_arithmetic import GENERATIONS, GROUPS, is_right

TINY = bool(os.environ.get("GPU_TRL_TINY"))
"""On a CPU, with few short completions that transformers generates."""


class Reporter(TrainerCallback):
    """Writes the rewards at once."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_log(self, _: Any, __: Any, ___: Any, logs: dict[str, Any], **____: Any) -> None:
        if "reward" in logs:
            with self._path.open("a") as file:
                file.write(json.dumps(logs) + "\n")


def main() -> None:
    """Train."""
    model, questions, folder, steps = sys.argv[1:]
    rows = [json.loads(line) for line in Path(questions).read_text().splitlines()]
    rows = [
        {"prompt": row["question"] if TINY else [{"role": "user", "content": row["question"]}],
         "answer": row["answer"]}
        for row in rows
    ]  # fmt: skip
    if TINY:
        device: dict[str, Any] = {"use_cpu": True, "bf16": False, "per_device_train_batch_size": 64}
    else:
        device = {
            "bf16": True, "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3,
            "vllm_max_model_length": 160, "per_device_train_batch_size": 128,
            "gradient_accumulation_steps": GROUPS * GENERATIONS // 128,
        }  # fmt: skip
    config = GRPOConfig(
        output_dir=str(Path(folder) / "trl"), seed=1, max_steps=int(steps), save_strategy="no",
        num_generations=GENERATIONS, max_completion_length=8 if TINY else 64, temperature=1.0, beta=0.0,
        learning_rate=1e-5, lr_scheduler_type="constant", gradient_checkpointing=False,
        report_to="none", logging_steps=1, disable_tqdm=True, **device,
    )  # fmt: skip
    GRPOTrainer(
        model=model, reward_funcs=is_right, args=config, train_dataset=Dataset.from_list(rows),
        callbacks=[Reporter(Path(folder) / "rewards.jsonl")],
    ).train()  # fmt: skip


if __name__ == "__main__":
    main()
