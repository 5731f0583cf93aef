"""What runs inside vLLM's worker processes, which load it by name."""

from typing import Any


class WorkerExtension:
    """Methods added to vLLM's worker; called through `collective_rpc`."""

    model_runner: Any

    def take_weights(self, folder: str) -> None:
        """Load a model folder in place of the present weights.

        On the CPU vLLM multiplies with packed copies of the weights. When the output head is tied to
        the embedding, `reload_weights` (0.32) renews the embedding and leaves the head's packed copy
        as it was: new body, old head, log-probabilities off by 0.03 to 0.08 and not a word in the
        logs but "ParallelLMHead: Failed to load weights". So a tied head is packed again.
        """
        self.model_runner.reload_weights(weights_path=folder)
        model = self.model_runner.get_model()
        if getattr(model.config, "tie_word_embeddings", False):
            model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
