"""The other side of benchmarks/time_to_reward.py: a task with TRL's GRPOTrainer.

    python -m benchmarks.trl_run MODEL QUESTIONS OUT SEED STEPS EVERY TOKENS BATCH

prints `step N` when the training begins (0) and after each step, and saves a checkpoint of every EVERY
steps. TRL has to be importable. The settings are those of deploy/recipes/demo.env by TRL's names.
TOKENS is the longest answer, BATCH the completions of a forward pass.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.exact import is_right
from penstock.deploy.demo.task import read_problems

GROUPS, GENERATIONS = 64, 8


class Printer(TrainerCallback):
    """Prints the steps at once."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        print("step 0", flush=True)

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        print(f"step {state.global_step}", flush=True)


def main() -> None:
    """Train."""
    model, questions, out, seed, steps, every, tokens, batch = sys.argv[1:]
    problems = read_problems(Path(questions))
    rows = [{"prompt": problem.question, "answer": problem.answer} for problem in problems]
    config = GRPOConfig(
        output_dir=out, seed=int(seed), max_steps=int(steps), save_steps=int(every),
        save_only_model=True,
        per_device_train_batch_size=int(batch),
        gradient_accumulation_steps=GROUPS * GENERATIONS // int(batch),
        num_generations=GENERATIONS, max_completion_length=int(tokens), temperature=1.0, beta=0.0,
        learning_rate=1e-4, lr_scheduler_type="constant_with_warmup", warmup_steps=10, adam_beta2=0.95,
        use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", logging_steps=10,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, reward_funcs=is_right, args=config, train_dataset=Dataset.from_list(rows),
        callbacks=[Printer()],
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main()
