"""The folder from which vLLM reads LoRA adapters: the config, and a link to the version's file."""

import json
import tempfile
from pathlib import Path
from typing import Any

from penstock.common.files.reading import ADAPTER
from penstock.common.wire.adapter_spec import AdapterSpec
from penstock.common.wire.messages import ADAPTER_FILE

_RANKS = (8, 16, 32, 64, 128, 256, 512)
"""The ranks for which vLLM 0.25 to 0.32 can reserve memory."""


class AdapterFolder:
    """A temporary folder for one engine, deleted with this object. `spec` is that of the contract.

    A version is one file. The config that vLLM, like peft, reads beside it is made here.
    """

    def __init__(self, spec: AdapterSpec) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-adapter-")
        self.path = Path(self._folder.name)
        config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": spec.rank, "lora_alpha": spec.alpha,
            "target_modules": "all-linear",
        }  # fmt: skip
        (self.path / ADAPTER).write_text(json.dumps(config))

    def point_to(self, version: Path) -> None:
        """Let the link lead to the adapter in the folder of a version. Raise OSError if it cannot."""
        link = self.path / ADAPTER_FILE
        link.unlink(missing_ok=True)
        link.symlink_to(version.absolute() / ADAPTER_FILE)

    @staticmethod
    def arguments(spec: AdapterSpec) -> dict[str, Any]:
        """Return the arguments of vLLM's AsyncEngineArgs for such adapters, one at a time.

        Without the names of the layers vLLM would prepare all, and fail when it scores texts: the
        head's adapter (LogitsProcessorWithLoRA, 0.32) expects one position per request.
        """
        rank = next(rank for rank in _RANKS if rank >= spec.rank)
        return {
            "enable_lora": True, "max_loras": 1, "max_lora_rank": rank,
            "lora_target_modules": list(spec.modules),
        }  # fmt: skip
