"""Settings of TRL, verl, ms-swift and prime-rl, and how the same is set here. Pure.

An unknown variable or flag of one of these names is answered from this table, and docs/coming-from.md
shows it. Names that Penstock has with the same meaning are left out.
"""

from collections.abc import Mapping

_BATCH = "LEARNER_GROUPS_PER_STEP x LEARNER_NUM_GENERATIONS"
_MEMORY = "memory: LEARNER_MICRO_BATCH_TOKENS"
_PHASES = "no setting: actors and learner are processes of their own"

OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    "TRL": {
        "per_device_train_batch_size": f"{_BATCH}; {_MEMORY}",
        "gradient_accumulation_steps": f"{_BATCH}; {_MEMORY}",
        "generation_batch_size": _BATCH,
        "steps_per_generation": "LEARNER_NUM_MINI_BATCHES",
        "per_device_eval_batch_size": "no setting: actors answer as many at once as fit",
        "num_generations_eval": "LEARNER_EVAL_NUM_GENERATIONS",
        "model_name_or_path": "LEARNER_MODEL",
        "model_init_kwargs": "LEARNER_DTYPE, LEARNER_ATTN_IMPLEMENTATION, LEARNER_MODEL_REVISION",
        "torch_dtype": "LEARNER_DTYPE",
        "bf16": "LEARNER_DTYPE=bfloat16",
        "fp16": "LEARNER_DTYPE=bfloat16; there is no float16",
        "dataset_name": "LEARNER_DATASET",
        "dataset_config": "LEARNER_DATASET=ID:CONFIG",
        "dataset_train_split": "LEARNER_DATASET_SPLIT",
        "dataset_test_split": "LEARNER_EVAL_SPLIT",
        "shuffle_dataset": "LEARNER_DATASET_SHUFFLE",
        "remove_unused_columns": "no setting: rewards get every column",
        "dataloader_num_workers": "no setting: there are no data loaders",
        "reward_funcs": "LEARNER_REWARDS",
        "reward_model_name_or_path": "LEARNER_REWARDS=model:NAME=FOLDER-or-id",
        "output_dir": "RUN_DIR and RUN_NAME: the run's folder is RUN_DIR/RUN_NAME",
        "run_name": "RUN_NAME",
        "resume_from_checkpoint": "a run goes on by its RUN_NAME; LEARNER_RESUME names a checkpoint",
        "overwrite_output_dir": "LEARNER_RESUME=new",
        "logging_steps": "no setting: every step is logged",
        "save_strategy": "LEARNER_SAVE_STEPS",
        "eval_strategy": "LEARNER_EVAL_STEPS",
        "load_best_model_at_end": "LEARNER_SAVE_BEST_MODEL",
        "hub_token": "HF_TOKEN",
        "optim": "no setting: AdamW, by LEARNER_ADAM_BETA1 and so on",
        "lr_scheduler_kwargs": "LEARNER_MIN_LR",
        "deepspeed": "LEARNER_ZERO_STAGE, LEARNER_OFFLOAD_OPTIMIZER, LEARNER_OFFLOAD_PARAM",
        "use_peft": "LEARNER_LORA_RANK above 0",
        "lora_r": "LEARNER_LORA_RANK",
        "lora_dropout": "no setting: an adapter has no dropout",
        "use_liger_loss": "LEARNER_LOGPROB_CHUNK bounds the memory of logits",
        "disable_dropout": "no setting: there is no dropout",
        "use_vllm": _PHASES,
        "vllm_mode": f"{_PHASES}; by turns on one device: LEARNER_SHARE_DEVICE",
        "vllm_server_host": "REDIS_URL: actors and learner meet on the queue server",
        "vllm_server_base_url": "REDIS_URL: actors and learner meet on the queue server",
        "vllm_server_timeout": "RUN_JOIN_TIMEOUT_S",
        "vllm_gpu_memory_utilization": "ACTOR_GPU_MEMORY_UTILIZATION",
        "vllm_max_model_length": "ACTOR_MAX_MODEL_LEN",
        "vllm_tensor_parallel_size": "ACTOR_TENSOR_PARALLEL_SIZE",
        "vllm_enable_sleep_mode": "LEARNER_SHARE_DEVICE and ACTOR_SLEEP_LEVEL",
        "vllm_importance_sampling_correction": "LEARNER_IMPORTANCE_SAMPLING_CORRECTION",
        "vllm_importance_sampling_mode": "LEARNER_IMPORTANCE_SAMPLING_MODE, _CORRECTION",
        "vllm_importance_sampling_cap": "LEARNER_IMPORTANCE_SAMPLING_CAP",
        "vllm_importance_sampling_clip_max": "LEARNER_IMPORTANCE_SAMPLING_CAP",
        "vllm_importance_sampling_clip_min": "LEARNER_IMPORTANCE_SAMPLING_MIN",
        "vllm_structured_outputs_regex": "LEARNER_GENERATION_KWARGS",
        "vllm_guided_decoding_regex": "LEARNER_GENERATION_KWARGS",
        "repetition_penalty": "LEARNER_GENERATION_KWARGS",
        "num_completions_to_print": "no setting: `penstock samples RUN --best --count 5`",
        "wandb_log_unique_prompts": "no setting: LEARNER_LOG_COMPLETIONS writes all",
        "ds3_gather_for_generation": "no setting: weights are gathered for each version",
    },
    "verl": {
        "train_batch_size": "LEARNER_GROUPS_PER_STEP (prompts)",
        "gen_batch_size": "LEARNER_GROUPS_PER_STEP and LEARNER_MAX_RESAMPLE_TIMES",
        "rollout_n": "LEARNER_NUM_GENERATIONS",
        "ppo_mini_batch_size": "LEARNER_NUM_MINI_BATCHES: optimizer steps per batch, no size",
        "ppo_micro_batch_size_per_gpu": "LEARNER_MICRO_BATCH_TOKENS",
        "log_prob_micro_batch_size_per_gpu": "LEARNER_MICRO_BATCH_TOKENS",
        "ppo_max_token_len_per_gpu": "LEARNER_MICRO_BATCH_TOKENS",
        "use_dynamic_bsz": "LEARNER_PACKING, on by default",
        "use_remove_padding": "LEARNER_PACKING, on by default",
        "ppo_epochs": "LEARNER_NUM_ITERATIONS",
        "max_response_length": "LEARNER_MAX_COMPLETION_LENGTH",
        "filter_overlong_prompts": "LEARNER_OVERLONG_PROMPTS=drop",
        "truncation": "LEARNER_OVERLONG_PROMPTS",
        "train_files": "LEARNER_DATASET",
        "val_files": "LEARNER_EVAL_DATASET",
        "prompt_key": "LEARNER_PROMPT_COLUMN",
        "lr": "LEARNER_LEARNING_RATE",
        "lr_warmup_steps": "LEARNER_WARMUP_STEPS",
        "grad_clip": "LEARNER_MAX_GRAD_NORM",
        "clip_ratio": "LEARNER_EPSILON and LEARNER_EPSILON_HIGH",
        "clip_ratio_low": "LEARNER_EPSILON",
        "clip_ratio_high": "LEARNER_EPSILON_HIGH",
        "clip_ratio_c": "LEARNER_DELTA",
        "loss_agg_mode": "LEARNER_LOSS_TYPE",
        "adv_estimator": "LEARNER_ADVANTAGE_ESTIMATOR",
        "norm_adv_by_std_in_grpo": "LEARNER_SCALE_REWARDS=none for false",
        "use_kl_loss": "LEARNER_BETA above 0",
        "kl_loss_coef": "LEARNER_BETA",
        "kl_loss_type": "LEARNER_KL_ESTIMATOR",
        "entropy_coeff": "LEARNER_ENTROPY_COEF",
        "filter_groups": "LEARNER_FILTER_ZERO_STD, on by default",
        "max_num_gen_batches": "LEARNER_MAX_RESAMPLE_TIMES",
        "overlong_buffer_len": "LEARNER_SOFT_CACHE_LENGTH with LEARNER_REWARDS=..,soft_overlong",
        "custom_reward_function": "LEARNER_REWARDS=FILE.py:FUNCTION",
        "total_epochs": "LEARNER_NUM_TRAIN_EPOCHS",
        "total_training_steps": "LEARNER_MAX_STEPS",
        "test_freq": "LEARNER_EVAL_STEPS",
        "save_freq": "LEARNER_SAVE_STEPS",
        "project_name": "WANDB_PROJECT",
        "experiment_name": "RUN_NAME",
        "logger": "LEARNER_REPORT_TO",
        "tensor_model_parallel_size": "ACTOR_TENSOR_PARALLEL_SIZE",
        "free_cache_engine": "LEARNER_SHARE_DEVICE and ACTOR_SLEEP_LEVEL",
        "param_offload": "LEARNER_OFFLOAD_PARAM",
        "optimizer_offload": "LEARNER_OFFLOAD_OPTIMIZER",
        "n_gpus_per_node": "`penstock up --actors N --devices ..`; the learner has the rest",
        "nnodes": "torchrun for the learner; actors on any host",
    },
    "ms-swift": {
        "train_type": "LEARNER_LORA_RANK: 0 trains all weights",
        "tuner_type": "LEARNER_LORA_RANK: 0 trains all weights",
        "target_modules": "LEARNER_LORA_TARGET_MODULES",
        "max_length": "LEARNER_MAX_PROMPT_LENGTH",
        "system": "LEARNER_SYSTEM_PROMPT",
        "template": "LEARNER_PROMPT_TEMPLATE",
        "stop_words": "LEARNER_GENERATION_KWARGS",
        "val_dataset": "LEARNER_EVAL_DATASET",
        "split_dataset_ratio": "LEARNER_EVAL_HOLDOUT",
        "external_plugins": "LEARNER_REWARDS=plugin.py:NAME",
        "reward_model": "LEARNER_REWARDS=model:NAME=FOLDER-or-id",
        "dynamic_sample": "LEARNER_FILTER_ZERO_STD, on by default",
        "overlong_filter": "LEARNER_MASK_TRUNCATED_COMPLETIONS",
        "multi_turn_func": "LEARNER_ENVIRONMENT, LEARNER_TOOLS or LEARNER_AGENT",
        "multi_turn_scheduler": "LEARNER_ENVIRONMENT, LEARNER_TOOLS or LEARNER_AGENT",
        "max_turns": "LEARNER_MAX_TOOL_CALLING_ITERATIONS",
        "async_generate": "LEARNER_MAX_STALENESS: 0 is synchronous",
        "num_infer_workers": "`penstock up --actors N`",
        "offload_model": "LEARNER_SHARE_DEVICE",
        "vllm_max_num_seqs": "ACTOR_MAX_NUM_SEQS",
        "vllm_max_model_len": "ACTOR_MAX_MODEL_LEN",
        "vllm_enforce_eager": "ACTOR_ENFORCE_EAGER",
        "vllm_enable_prefix_caching": "ACTOR_ENABLE_PREFIX_CACHING",
        "move_model_batches": "no setting: weights are gathered for each version",
    },
    "prime-rl": {
        "batch_size": "LEARNER_GROUPS_PER_STEP x LEARNER_NUM_GENERATIONS",
        "rollouts_per_example": "LEARNER_NUM_GENERATIONS",
        "seq_len": "LEARNER_MAX_PROMPT_LENGTH + LEARNER_MAX_COMPLETION_LENGTH",
        "max_tokens": "LEARNER_MAX_COMPLETION_LENGTH",
        "micro_batch_size": "LEARNER_MICRO_BATCH_TOKENS",
        "max_async_level": "LEARNER_MAX_STALENESS",
        "async_level": "LEARNER_MAX_STALENESS",
        "max_off_policy_steps": "LEARNER_MAX_STALENESS",
        "oversampling_factor": "LEARNER_MAX_RESAMPLE_TIMES",
        "max_concurrent": "ACTOR_MAX_NUM_SEQS",
        "max_norm": "LEARNER_MAX_GRAD_NORM",
        "mask_ratio_high": "LEARNER_IMPORTANCE_SAMPLING_CAP with LEARNER_IMPORTANCE_SAMPLING_MODE=mask",
        "mask_ratio_low": "LEARNER_IMPORTANCE_SAMPLING_MIN with LEARNER_IMPORTANCE_SAMPLING_MODE=mask",
        "kl_tau": "LEARNER_BETA",
        "ckpt_interval": "LEARNER_SAVE_STEPS",
        "eval_interval": "LEARNER_EVAL_STEPS",
    },
}
"""By system: by name, in small letters with underscores, the setting of Penstock."""


def same_here(name: str) -> str:
    """Return what to set here for another system's setting `name`, or "" if no system has the name.

    `name` is without prefix, in any case, with underscores, hyphens or dots.
    Example:
        >>> same_here("clip-ratio-low")
        "verl's clip_ratio_low is here: LEARNER_EPSILON"
    """
    plain = name.lower().replace("-", "_").replace(".", "_")
    found = [
        f"{system}'s {plain} is here: {names[plain]}"
        for system, names in OTHER_NAMES.items()
        if plain in names
    ]
    return found[0] if found else ""
