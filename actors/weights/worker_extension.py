"""Code that runs inside vLLM's worker processes. vLLM loads this module by its name."""

from typing import Any


class WorkerExtension:
    """Methods that vLLM adds to its worker class; the engine calls them through `collective_rpc`."""

    model_runner: Any

    def take_weights(self, folder: str) -> None:
        """Replace this worker's weights by those in a model folder. Raise what vLLM raises.

        A tied output head is packed again. On the CPU vLLM multiplies with packed copies of the weights.
        When the output head is tied to the embedding, `reload_weights` (vLLM 0.32) renews the embedding
        and keeps the head's old packed copy: log-probabilities are off by 0.03 to 0.08, and the only log
        line is "ParallelLMHead: Failed to load weights".
        """
        self.model_runner.reload_weights(weights_path=folder)
        model = self.model_runner.get_model()
        if getattr(model.config, "tie_word_embeddings", False):
            model.lm_head.quant_method.process_weights_after_loading(model.lm_head)

    def adapter_layers(self) -> tuple[list[str], list[str]]:
        """Return the names of this worker's layers that can have an adapter, and of the adapter's."""
        manager = self.model_runner.get_model().lora_manager
        return list(manager.modules), list(manager.get_adapter(1).loras)
