"""Check and measure by one command what needs a GPU.

    make trl; python -m benchmarks.gpu [--parts NAME ...] [--model FOLDER] [--out FOLDER] [--tiny]

Each part is a program of its own, with a time limit. A part that fails does not keep the others from
running. `--out` gets gpu.json, with the figures of all parts, and a log for each. `--model` is the
folder of SmolLM2-135M-Instruct (`penstock convert-smollm2`). `--tiny` runs the same on a CPU, with tiny
shapes: what fails there is no matter of the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.deploy.demo.tiny_llama import make_model, make_tokenizer, save_checkpoint

_LEAVE_S = 20.0
_TIMES_ON_A_CPU = 5


@dataclass(frozen=True, slots=True)
class Part:
    """A program whose last line of output is a JSON object of figures.

    `limit_s` is its longest time on a GPU, and a fifth of its longest on a CPU. `tiny` are the arguments
    that replace `arguments` in a run with tiny shapes. {model} stands for the model's folder.
    """

    name: str
    limit_s: float
    module: str
    arguments: str = ""
    tiny: str = ""


PARTS = (
    Part("names", 60, "gpu_names"),
    Part("learner", 120, "gpu_learner", "", "--tiny"),
    Part("mfu", 90, "gpu_mfu", "0.5B 1.5B", "tiny"),
    Part("together", 300, "gpu_arithmetic", "together --model {model}",
         "together --model {model} --steps 2 --tiny"),
    Part("actor", 240, "actor",
         "--model {model} --dtype bfloat16 --max-tokens 256 --groups 128 --rounds 2 --json",
         "--model {model} --groups 8 --rounds 1 --json"),
    Part("turns", 360, "gpu_arithmetic", "turns --model {model}",
         "turns --model {model} --steps 2 --tiny"),
    Part("TRL", 300, "gpu_arithmetic", "TRL --model {model}",
         "TRL --model {model} --steps 2 --tiny"),
)  # fmt: skip


def stop(process: subprocess.Popen[str]) -> str:
    """End a part with all that it started, after time to report what it has; return its output."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        said, _ = process.communicate(timeout=_LEAVE_S)
    except subprocess.TimeoutExpired:
        said = ""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return said or process.communicate()[0]


def run_part(module: str, arguments: Sequence[str], limit_s: float, log: Path) -> dict[str, Any]:
    """Run a part's program to its end or limit; return its figures, seconds, and what failed."""
    began = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", f"benchmarks.{module}", *arguments],
            stdout=subprocess.PIPE, stderr=output, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=limit_s)
            error = f"exit code {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            said, error = stop(process), f"took over {limit_s:g} s"
    lines = [line for line in said.splitlines() if line.startswith("{")]
    try:
        figures = json.loads(lines[-1]) if lines else {}
    except ValueError:
        figures = {}
    if not figures and not error:
        error = "no figures"
    return {"figures": figures, "seconds": time.monotonic() - began, "error": error}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch
    import transformers

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "gpu": gpu, "cores": os.cpu_count(), "python": sys.version.split()[0],
        "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip


def main() -> int:
    """Run the parts, print and store their figures; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a CPU")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.tiny:
        options.model, tokenizer = options.out / "model", make_tokenizer()
        save_checkpoint(make_model(tokenizer), tokenizer, options.model)
    result: dict[str, Any] = {"machine": machine(), "parts": {}}
    for part in (part for part in PARTS if part.name in options.parts):
        words = (part.tiny if options.tiny and part.tiny else part.arguments).split()
        arguments = [word.format(model=options.model) for word in words]
        limit_s = part.limit_s * (_TIMES_ON_A_CPU if options.tiny else 1)
        found = run_part(part.module, arguments, limit_s, options.out / f"{part.name}.log")
        result["parts"][part.name] = found
        print(f"{part.name}: {json.dumps(found, indent=1)}", flush=True)
        (options.out / "gpu.json").write_text(json.dumps(result, indent=1))
    failed = [name for name, found in result["parts"].items() if found["error"]]
    print(f"failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
