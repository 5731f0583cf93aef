"""Check that the installed vLLM has every name that the actor uses, with the parameters it passes.

    python -m benchmarks.gpu_names

prints one JSON object: vLLM's version and what is missing. The table was recorded from 0.32 and compared
with 0.25.1; tests/actors/test_vllm_engine.py checks what the names do.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES: dict[str, tuple[str, ...]] = {
    "vllm.SamplingParams": (
        "n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop_token_ids",
        "logprobs", "prompt_logprobs", "flat_logprobs", "stop", "detokenize", "skip_special_tokens",
        "repetition_penalty", "structured_outputs", "output_kind",
    ),
    "vllm.inputs.tokens_input": ("cache_salt",),
    "vllm.sampling_params.StructuredOutputsParams": ("regex", "choice"),
    "vllm.sampling_params.RequestOutputKind.FINAL_ONLY": (),
    "vllm.platforms.current_platform.is_cpu": (),
    "vllm.exceptions": (),
    "vllm.v1.engine.exceptions.EngineGenerateError": (),
    "vllm.v1.metrics.loggers.StatLoggerBase.record": ("scheduler_stats", "iteration_stats"),
    "vllm.v1.metrics.loggers.StatLoggerBase.log_engine_initialized": (),
    "vllm.v1.metrics.stats.IterationStats": ("finished_requests", "num_generation_tokens"),
    "vllm.v1.metrics.stats.SchedulerStats": ("prefix_cache_stats",),
    "vllm.v1.engine.async_llm.AsyncLLM.from_engine_args": ("engine_args", "stat_loggers"),
    "vllm.v1.engine.async_llm.AsyncLLM.generate": (
        "prompt", "sampling_params", "request_id", "lora_request",
    ),
    "vllm.v1.engine.async_llm.AsyncLLM.abort": ("request_id",),
    "vllm.v1.engine.async_llm.AsyncLLM.pause_generation": ("mode", "clear_cache"),
    "vllm.v1.engine.async_llm.AsyncLLM.resume_generation": (),
    "vllm.v1.engine.async_llm.AsyncLLM.collective_rpc": ("method", "args"),
    "vllm.v1.engine.async_llm.AsyncLLM.add_lora": ("lora_request",),
    "vllm.lora.request.LoRARequest": ("lora_name", "lora_int_id", "lora_path", "load_inplace"),
    "vllm.v1.engine.async_llm.AsyncLLM.sleep": ("level",),
    "vllm.v1.engine.async_llm.AsyncLLM.wake_up": (),
    "vllm.v1.engine.async_llm.AsyncLLM.shutdown": (),
    "vllm.v1.engine.async_llm.AsyncLLM.errored": (),
    "vllm.v1.engine.output_processor.OutputProcessor.get_num_unfinished_requests": (),
    "vllm.v1.engine.output_processor.RequestState": ("parent_req", "request_index"),
    "vllm.v1.engine.EngineCoreOutput": ("request_id", "new_token_ids"),
    "vllm.v1.engine.core_client.AsyncMPClient.get_output_async": (),
}  # fmt: skip
"""By name: parameters, or fields, that the actor passes or reads."""


def find(name: str) -> Any:
    """The object with this dotted name. Raise ImportError or AttributeError if there is none."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


def known_fields(found: Any) -> set[str]:
    """The parameters that a callable takes, and the fields of a class."""
    fields = (
        {spec.name for spec in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
    )
    fields |= set(getattr(found, "__struct_fields__", ()))
    if inspect.isclass(found) and inspect.isfunction(found.__init__):
        fields |= set(found.__init__.__code__.co_names)  # attributes that it sets
    return fields | set(inspect.signature(found).parameters)


def missing() -> Iterator[str]:
    """What the installed vLLM lacks, as `name` or `name(field)`."""
    for name, fields in NAMES.items():
        try:
            found = find(name)
        except (ImportError, AttributeError):
            yield name
            continue
        known = known_fields(found) if fields else set()
        yield from (f"{name}({field})" for field in fields if field not in known)


def engine_arguments() -> Iterator[str]:
    """Arguments that the actor passes to vLLM, and that it lacks."""
    from vllm import AsyncEngineArgs

    from penstock.actors.vllm_engine import engine_arguments
    from penstock.common.config.settings import ActorSettings
    from penstock.common.wire.adapter_spec import AdapterSpec
    from penstock.common.wire.contract import Contract
    from penstock.common.wire.reward_spec import RewardSpec

    adapter = AdapterSpec(rank=8, alpha=16, modules=("q_proj",))
    contract = Contract("", "", "bfloat16", 8, (RewardSpec("accuracy"),), True, 1, 1, adapter=adapter)
    known = {spec.name for spec in dataclasses.fields(AsyncEngineArgs)}
    passed = engine_arguments(ActorSettings(), contract, Path("model"))
    yield from (f"AsyncEngineArgs({name})" for name in passed if name not in known)


def main() -> int:
    """Print what is missing; return 1 if anything is."""
    import vllm

    lacks = [*missing(), *engine_arguments()]
    print(json.dumps({"vllm": vllm.__version__, "names": len(NAMES), "missing": lacks}))
    return int(bool(lacks))


if __name__ == "__main__":
    sys.exit(main())
