"""Which of vLLM's arguments ACTOR_ENGINE_ARGS may set: all but those that Penstock sets itself."""

from collections.abc import Iterable

_VARIABLES = {
    "dtype": "ACTOR_DTYPE",
    "enable_expert_parallel": "ACTOR_ENABLE_EXPERT_PARALLEL",
    "enable_prefix_caching": "ACTOR_ENABLE_PREFIX_CACHING",
    "enforce_eager": "ACTOR_ENFORCE_EAGER",
    "gpu_memory_utilization": "ACTOR_GPU_MEMORY_UTILIZATION",
    "kv_cache_memory_bytes": "ACTOR_KV_CACHE_GIB",
    "max_model_len": "ACTOR_MAX_MODEL_LEN",
    "max_num_batched_tokens": "ACTOR_MAX_NUM_BATCHED_TOKENS",
    "max_num_seqs": "ACTOR_MAX_NUM_SEQS",
    "pipeline_parallel_size": "ACTOR_PIPELINE_PARALLEL_SIZE",
    "seed": "LEARNER_SEED",
    "tensor_parallel_size": "ACTOR_TENSOR_PARALLEL_SIZE",
    "trust_remote_code": "ACTOR_TRUST_REMOTE_CODE",
}
"""Arguments with a variable of their own."""

_MODEL = "the learner chooses the model and its tokenizer, by LEARNER_MODEL"
_EXACT = "the learner counts on the log-probabilities of the sampled distribution"
_WEIGHTS = "the actor loads each version of the weights itself, as the learner published it"
_ALONE = "one actor is one engine: start more actors"
_REFUSED = {
    **dict.fromkeys(
        ("model", "model_weights", "tokenizer", "tokenizer_mode", "skip_tokenizer_init", "revision",
         "tokenizer_revision", "hf_config_path", "hf_overrides", "hf_token",
         "served_model_name"), _MODEL,
    ),
    **dict.fromkeys(
        ("logprobs_mode", "max_logprobs", "generation_config", "override_generation_config",
         "logits_processors", "watermark_config", "return_sampling_mask", "disable_log_stats"), _EXACT,
    ),
    **dict.fromkeys(
        ("load_format", "enable_lora", "max_loras", "max_lora_rank", "lora_target_modules",
         "lora_dtype", "default_mm_loras",
         "enable_sleep_mode", "weight_transfer_config", "worker_extension_cls", "worker_cls",
         "use_tqdm_on_load"), _WEIGHTS,
    ),
    "code_revision": _MODEL,
    **dict.fromkeys(
        ("data_parallel_size", "data_parallel_rank", "data_parallel_size_local",
         "data_parallel_start_rank"), _ALONE,
    ),
}  # fmt: skip
"""Arguments that Penstock sets and nobody else may, with the reason."""


def check_engine_args(names: Iterable[str]) -> None:
    """Raise ValueError if one of `names`, arguments of vLLM in ACTOR_ENGINE_ARGS, is set by Penstock.

    The text has the first such name, and the variable to set instead or the reason.
    """
    for name in names:
        if variable := _VARIABLES.get(name):
            raise ValueError(f"{name} cannot be set in ACTOR_ENGINE_ARGS: leave it out, use {variable}")
        if reason := _REFUSED.get(name):
            raise ValueError(f"{name} cannot be set in ACTOR_ENGINE_ARGS: leave it out, as {reason}")
