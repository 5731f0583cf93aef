"""The only module that imports vllm: an Engine made of vLLM's AsyncLLM.

Settings of vLLM that make its numbers the ones that the learner expects:

- logprobs_mode="processed_logprobs": log-probabilities of the sampled distribution, after temperature.
- generation_config="vllm": sampling parameters come from the ticket alone, not from the model folder.
- A cache salt for each version of the weights. Blocks computed under older weights are never found, not
  even after the same weights return under a new version: requests that were in flight left blocks of
  both. A conversation keeps the salt of its first turn, so its history is not computed again for each
  new version. Like a completion in flight it goes on with the keys and values that it has.
- No chunked prefill on the CPU. When a prompt with a seed is split over two steps, vLLM rewinds the
  generator; CPU generators refuse ("CPU Generator does not use offset") and the engine dies.
- VLLM_ENABLE_V1_MULTIPROCESSING=0: on a CPU, no second process that spins while it waits. vLLM binds
  threads only there: it stays with VLLM_CPU_OMP_THREADS_BIND and without OMP_NUM_THREADS.
- VLLM_WORKER_MULTIPROC_METHOD=spawn. A forked worker hangs if its parent had used OpenMP threads.
"""

import asyncio
import dataclasses
import operator
import os
import re
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from penstock.actors.engine import Aborted, PromptRefused, WeightsRejected, verify_weights
from penstock.actors.engine_memory import memory_advice
from penstock.actors.token_versions import TokenVersions
from penstock.actors.weights.adapter import AdapterFolder
from penstock.common.config.settings import ActorSettings
from penstock.common.errors import ConfigError, EngineFailed
from penstock.common.files.reading import parse_json, reading
from penstock.common.heavy_imports import heavy_imports
from penstock.common.log import get_logger
from penstock.common.role import spared_processes
from penstock.common.text import did_you_mean
from penstock.common.wire.contract import Contract
from penstock.common.wire.ids import Version
from penstock.common.wire.messages import Float32s, Int32s, Rollout, Sampling, Span, Weights

_PROBE_PLACES = 8
"""Requests at a time beside ACTOR_MAX_NUM_SEQS: the probe of new weights does not wait for others."""

_NEWEST_STEP = 0.02
"""Share of the newest step in `ended_per_step`: answers that all end at once let few others wait."""

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # the model is a folder
    "VLLM_LOGGING_LEVEL": "ERROR",  # at WARNING each change of weights warns about tied weights
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}

VERSIONS = ((0, 25), (0, 32))
"""The first and the last version of vLLM that an actor starts. docs/releasing.md tells their tests."""

_WITHOUT_ADAPTERS = ", or set LEARNER_LORA_PUBLISH_MERGED=true if vLLM has no adapters for this model"

_SHUTDOWN_S, _END_S = 5.0, 0.5
"""For vLLM's engine process to end its workers and free shared memory; then, from when vLLM expects its
end, until it is killed."""

_CPU_BATCH_TOKENS = 4096
"""Prompt tokens per step on a CPU; the model length, if that is longer."""

log = get_logger(__name__)


class VllmEngine:
    """An Engine on vLLM, on a GPU or on the CPU. Make it inside of an event loop.

    __init__ starts vLLM on the model folder `model` and blocks until it is ready. `contract` has the
    limit of tokens and the precision where the `settings` (ACTOR_*) leave them open. Environment
    variables of vLLM that have no value get one. Raise ConfigError for damaged configs of the model, a
    wrong ACTOR_ENGINE_ARGS or another version of vLLM than those of VERSIONS, EngineFailed if vLLM fails
    or takes more than ACTOR_START_TIMEOUT_S.
    """

    def __init__(self, settings: ActorSettings, contract: Contract, model: Path) -> None:
        os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(int(settings.start_timeout_s)))
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        bound = "VLLM_CPU_OMP_THREADS_BIND" in os.environ or "OMP_NUM_THREADS" not in os.environ
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(bound)))
        with heavy_imports():
            import vllm

            check_version(vllm.__version__)
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

        self._adapter_spec = contract.adapter
        self._adapter = AdapterFolder(contract.adapter) if contract.adapter else None
        self._max_num_seqs = settings.max_num_seqs
        self._stop_ids = read_stop_ids(model)
        self._version: Version | None = None
        self._hash, self._reloads = "", 0
        self._counts = StepCounts()
        arguments = AsyncEngineArgs(**engine_arguments(settings, contract, model))
        counters = [_step_counter(self._counts)]
        try:
            with spared_processes() as self._processes:
                self._llm: Any = AsyncLLM.from_engine_args(arguments, stat_loggers=counters)
        except Exception as error:  # vLLM's start raises whatever its parts raise
            raise EngineFailed(
                f"vLLM did not start on {model}: {error!r}; correct the ACTOR_* settings, or the model"
                f"{_WITHOUT_ADAPTERS if contract.adapter else ''}; "
                + _advice(settings, arguments.max_model_len)
            ) from error
        self._versions = TokenVersions(self._llm)

    @property
    def version(self) -> Version | None:
        """Return the version whose weights are in use; None before any, or if their file was deleted."""
        return self._version if self._hash else None

    async def stop(self) -> None:
        """End the engine and its processes; it cannot be used afterwards. Call this once."""
        try:
            shutdown = self._llm.engine_core.call_utility_async("shutdown")
            await asyncio.wait_for(shutdown, _SHUTDOWN_S)
        except Exception as error:  # of an engine that is dead or hangs
            log.info("The engine did not end as asked, and is killed.", reason=repr(error))
        ending = threading.Timer(_END_S, self._kill)  # SIGTERM, by which vLLM ends it, is blocked
        ending.start()
        self._llm.shutdown()
        ending.cancel()
        del self._llm  # freed now: at the interpreter's end its __del__ would print an error

    def _kill(self) -> None:
        """Kill vLLM's engine process. Its workers end with it, and at the latest the guard ends them."""
        for process in self._processes:
            process.kill()

    async def generate(
        self, request_id: str, prompt_ids: Int32s, sampling: Sampling, num_generations: int,
        since: Version | None = None,
    ) -> tuple[Rollout, ...]:  # fmt: skip
        """Return `num_generations` completions of the prompt `prompt_ids` (P,), in order of their seeds.

        `request_id` is the name of the request for `abort`. With `since` cached keys and values of
        requests that began at this version are used, else of those that began at the version in use. At
        temperature 0 one completion is sampled and repeated. Raise Aborted after `abort`, PromptRefused
        if vLLM refuses prompt or `sampling`, MalformedMessage if a completion is no Rollout,
        EngineFailed if vLLM fails or has no weights yet.
        """
        from vllm.inputs import tokens_input

        if self._version is None:
            raise EngineFailed(
                f"the engine has no weights at request {request_id}, expected those of the first "
                "announced version: start the actor again"
            )
        distinct = 1 if sampling.temperature == 0.0 else num_generations
        salt = f"weights-{since or self._version}-{self._reloads}"
        prompt = tokens_input(prompt_ids.tolist(), cache_salt=salt)
        self._versions.open(request_id)
        try:
            output = await self._last_output(
                request_id, prompt, partial(self._sampling, sampling, distinct)
            )
            found = {
                item.index: _rollout(
                    item, self._versions.spans(request_id, item.index, len(item.token_ids))
                )
                for item in output.outputs
                if item.token_ids
            }
        finally:
            self._versions.close(request_id)
        if any(item.finish_reason == "error" for item in output.outputs):
            raise PromptRefused(
                f"the engine could not serve {request_id}: its regex does not compile; correct "
                "structured_outputs in LEARNER_GENERATION_KWARGS"
            )
        rollouts = tuple(found.get(index) for index in range(distinct)) * (num_generations // distinct)
        if any(item.finish_reason not in ("stop", "length") for item in output.outputs):
            raise Aborted(request_id, rollouts)
        return cast(tuple[Rollout, ...], rollouts)

    async def _last_output(self, request_id: str, prompt: Any, parameters: Callable[[], Any]) -> Any:
        """Return vLLM's last output for a prompt, with the SamplingParams that `parameters` makes.

        Raise PromptRefused if vLLM refuses the prompt or these, EngineFailed if it fails.
        """
        output: Any = None
        try:
            answers = self._llm.generate(
                prompt, parameters(), request_id, lora_request=self._adapter_request()
            )
            async for latest in answers:
                output = latest
        except Exception as error:  # a dead engine raises whatever it was doing
            refusal = _refusal(error)
            if refusal is None or self._llm.errored:
                raise EngineFailed(
                    f"vLLM failed at {request_id}: {error!r}; start the actor again"
                ) from error
            raise PromptRefused(
                f"vLLM refused the request {request_id}: {refusal}; if its prompt is too long, raise "
                "ACTOR_MAX_MODEL_LEN, or else correct the sampling in the learner's settings"
            ) from error
        return output

    async def score(self, request_id: str, token_ids: Int32s) -> Float32s:
        """Return the log-probabilities of a text's tokens (L,) after the first, (L - 1,), in nats.

        They are those of the weights in use, at temperature 1; nothing cached is used. Raise
        PromptRefused if vLLM refuses the text, such as for its length, EngineFailed if vLLM fails.
        """
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        ids = token_ids.tolist()
        parameters = partial(SamplingParams, max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompt = tokens_input(ids, cache_salt=request_id)
        output = await self._last_output(request_id, prompt, parameters)
        rows = zip(output.prompt_logprobs[1:], ids[1:], strict=True)
        return np.array([row[token].logprob for row, token in rows], dtype="<f4")

    def _sampling(self, sampling: Sampling, count: int) -> Any:
        """Return vLLM's SamplingParams for `count` completions. Raise ValueError if vLLM refuses them.

        vLLM makes texts only for stop strings; special tokens count as text then: `<|im_end|>` can be
        one.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        structure = {"regex": sampling.regex or None, "choice": list(sampling.choice) or None}
        return SamplingParams(
            n=count, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k,
            min_p=sampling.min_p, max_tokens=sampling.max_tokens, seed=sampling.seed,
            stop_token_ids=self._stop_ids, logprobs=0, flat_logprobs=True,
            stop=list(sampling.stop), detokenize=bool(sampling.stop), skip_special_tokens=False,
            repetition_penalty=sampling.repetition_penalty,
            structured_outputs=StructuredOutputsParams(**structure) if any(structure.values()) else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip

    def _adapter_request(self, load_inplace: bool = False) -> Any:
        """Return what tells vLLM to compute with the adapter, or to load it; None without one."""
        from vllm.lora.request import LoRARequest

        if self._adapter is None or not (self._version or load_inplace):
            return None
        return LoRARequest("adapter", 1, str(self._adapter.path), load_inplace=load_inplace)

    async def abort(self, request_id: str) -> None:
        """End a request early: its `generate` raises Aborted with the completions so far.

        Nothing happens if no request in flight has this id.
        """
        await self._llm.abort(request_id)

    async def take_weights(self, weights: Weights, again: bool = False) -> None:
        """Verify published weights, pause requests, load the weights if their hash is new, and resume.

        With `again` they are loaded also if their hash is not new. Later tokens have the new version.
        Raise WeightsRejected, with nothing changed, for files that are not the announced ones. Raise
        EngineFailed if a later step fails: then the engine stays paused, because half-loaded weights
        must not sample. So it does if the only file was deleted meanwhile, which is a WeightsRejected:
        vLLM has loaded nothing then, and the next weights can be taken.
        """
        if weights.adapter != self._adapter_spec:
            found, expected = (spec or "whole weights" for spec in (weights.adapter, self._adapter_spec))
            raise WeightsRejected(
                f"version {weights.version} is {found}, and this engine was started for {expected}: "
                "start the actor again, or see who writes to the queue"
            )
        folder = await asyncio.to_thread(verify_weights, weights)
        try:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            if again or weights.hash != self._hash:
                await self._load(folder)
            await self._versions.change((weights.version, weights.hash))
            # The cache may hold keys and values of a wrong load, or of another run's version 1.1.
            self._reloads += again or (self._version is not None and weights.version <= self._version)
            self._hash, self._version = weights.hash, weights.version
            await self._llm.resume_generation()
        except Exception as error:  # vLLM raises whatever its parts raise
            if not weights.shards and not os.path.isfile(folder / weights.file):
                self._hash = ""
                raise WeightsRejected(f"the file of {weights.version} was deleted: {error!r}") from error
            raise EngineFailed(
                f"vLLM did not load weights {weights.version}: {error!r}; start the actor again"
                f"{_WITHOUT_ADAPTERS if weights.adapter else ''}"
            ) from error

    async def _load(self, folder: Path) -> None:
        """Load the weights, or the adapter, of a folder. Raise what vLLM raises, or EngineFailed."""
        if self._adapter is None:
            await self._llm.collective_rpc("take_weights", args=(str(folder),))
            return
        self._adapter.point_to(folder)
        loaded = await self._llm.add_lora(self._adapter_request(load_inplace=True))
        layers = await self._llm.collective_rpc("adapter_layers")
        places, adapted = (set().union(*names) for names in zip(*layers, strict=True))
        if not loaded or places != adapted:  # vLLM leaves out silently what it has no place for
            found = f"{sorted(adapted - places)[:3]} too much, {sorted(places - adapted)[:3]} missing"
            raise EngineFailed(f"vLLM has no place for each of the adapter's layers: {found}")

    async def sleep(self, level: int) -> None:
        """Free the device's memory until `wake`; nothing may be in flight.

        Cached keys and values are lost. Level 1 keeps the weights in the CPU's memory. Level 2 drops
        them: `version` is None until `take_weights`. On a CPU vLLM keeps all its memory. Raise
        EngineFailed if vLLM fails.
        """
        try:
            await self._llm.sleep(level)
        except Exception as error:  # vLLM raises whatever its parts raise
            raise EngineFailed(f"vLLM did not fall asleep: {error!r}; start the actor again") from error
        if level == 2:
            self._hash, self._version = "", None

    async def wake(self) -> None:
        """Take the device's memory again after `sleep`. Raise EngineFailed if vLLM fails."""
        try:
            await self._llm.wake_up()
        except Exception as error:  # vLLM raises whatever its parts raise
            raise EngineFailed(
                f"vLLM did not wake up: {error!r}; start the actor again, or lower "
                "ACTOR_GPU_MEMORY_UTILIZATION if another process uses the memory"
            ) from error

    def room(self) -> int:
        """Return how many more completions can start now; 0 or less if none can.

        Beside ACTOR_MAX_NUM_SEQS that run, as many may wait in vLLM as end in two of its steps: when it
        tells of an end, it has begun the next step already, so that place would stay empty in it.
        """
        unfinished: int = self._llm.output_processor.get_num_unfinished_requests()
        return self._max_num_seqs + int(2 * self._counts.ended_per_step) - unfinished

    def tokens_generated(self) -> int:
        """Return the number of tokens sampled since the start; it stays equal while the engine hangs."""
        return self._counts.tokens

    def prefix_cache(self) -> tuple[int, int]:
        """Return how many prompt tokens had cached keys and values since the start, and how many not."""
        return self._counts.cached, self._counts.computed


def engine_arguments(settings: ActorSettings, contract: Contract, model: Path) -> dict[str, Any]:
    """Return the arguments of vLLM's AsyncEngineArgs for the model folder `model`, by name.

    They join ACTOR_ENGINE_ARGS with those that Penstock sets, which win. `contract` has the logits'
    precision, and the longest sequence and the precision where the settings leave them open. Raise
    ConfigError if ACTOR_ENGINE_ARGS has a name that vLLM lacks.
    """
    from vllm.platforms import current_platform

    max_model_len = settings.max_model_len or contract.tokens_per_sequence
    _check_names(settings.engine_args)
    is_cpu = current_platform.is_cpu()
    if is_cpu:
        device: dict[str, Any] = {
            "kv_cache_memory_bytes": int(settings.kv_cache_gib * 2**30),
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": settings.max_num_batched_tokens
            or max(_CPU_BATCH_TOKENS, max_model_len),
        }
    else:
        device = {"gpu_memory_utilization": settings.gpu_memory_utilization}
        if settings.max_num_batched_tokens:
            device["max_num_batched_tokens"] = settings.max_num_batched_tokens
    adapter = AdapterFolder.arguments(contract.adapter) if contract.adapter else {}
    head = {"hf_overrides": {"head_dtype": "float32"}} if contract.cast_lm_head_to_fp32 else {}
    return (
        settings.engine_args
        | device
        | head
        | adapter
        | {
            "model": str(model),
            "trust_remote_code": settings.trust_remote_code,
            "dtype": settings.dtype or contract.dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": settings.max_num_seqs + _PROBE_PLACES,
            "enforce_eager": is_cpu if settings.enforce_eager == "auto" else settings.enforce_eager,
            "tensor_parallel_size": settings.tensor_parallel_size,
            "pipeline_parallel_size": settings.pipeline_parallel_size,
            "enable_expert_parallel": settings.enable_expert_parallel,
            "enable_prefix_caching": settings.enable_prefix_caching,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "enable_sleep_mode": contract.share_device and not is_cpu,
            "worker_extension_cls": "penstock.actors.weights.worker_extension.WorkerExtension",
            "use_tqdm_on_load": False,
        }
    )


def _advice(settings: ActorSettings, max_model_len: int) -> str:
    """Return what to change if the engine lacked memory; what to look at if the GPU does not answer."""
    import torch
    from vllm.platforms import current_platform

    try:
        gpu = None if current_platform.is_cpu() else torch.cuda.mem_get_info()
    except (RuntimeError, AssertionError) as error:  # CUDA may be what kept vLLM from its start
        return f"the GPU does not answer either ({error}): see `penstock doctor`"
    return memory_advice(settings, max_model_len, gpu)


def _check_names(names: Iterable[str]) -> None:
    """Raise ConfigError for a name in ACTOR_ENGINE_ARGS that is no argument of the installed vLLM."""
    from vllm import AsyncEngineArgs

    known = [spec.name for spec in dataclasses.fields(AsyncEngineArgs)]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known, "leave it out")
            raise ConfigError(f"ACTOR_ENGINE_ARGS: vLLM has no argument {name!r}: {hint}")


def check_version(installed: str) -> None:
    """Raise ConfigError if this version of vLLM, such as "0.32.0+cpu", is none of VERSIONS."""
    lowest, highest = VERSIONS
    found = tuple(int(part) for part in re.findall(r"\d+", installed)[:2])
    if not lowest <= found <= highest:
        first, last = (".".join(map(str, version)) for version in VERSIONS)
        raise ConfigError(
            f"vLLM {installed} is installed, expected {first} to {last}, with which Penstock is tested: "
            f"pip install 'vllm>={first},<{highest[0]}.{highest[1] + 1}'"
        )


def read_stop_ids(model: Path) -> list[int]:
    """Return the end tokens in a folder's generation_config.json and config.json, sorted, each once.

    A file that is missing or names none adds none. Raise ConfigError for a damaged file.
    """
    found: set[int] = set()
    for path in (model / "generation_config.json", model / "config.json"):
        with reading(path, "Copy the learner's model folder"):
            named = parse_json(path.read_bytes()).get("eos_token_id") if path.is_file() else None
            if named is not None:
                found.update(map(operator.index, named if isinstance(named, list) else [named]))
    return sorted(found)


def _refusal(error: Exception) -> Exception | None:
    """Return the error by which vLLM refused one request, None if `error` is a failure of the engine.

    Before 0.27 refusals are ValueErrors. Those that come after the request's first checks are wrapped in
    an EngineGenerateError by 0.27.
    """
    from vllm import exceptions
    from vllm.v1.engine.exceptions import EngineGenerateError

    kinds = (getattr(exceptions, "VLLMClientError", ValueError), ValueError)
    inner = error.__cause__ if isinstance(error, EngineGenerateError) else error
    return inner if isinstance(inner, kinds) else None


def _rollout(completion: Any, spans: tuple[Span, ...]) -> Rollout:
    """Return a completion that vLLM sampled with flat_logprobs as a Rollout with these spans.

    Log-probabilities above 0, which rounding gives, become 0. Any finish reason but "stop" and
    "length", such as "abort", becomes "cut". Raise MalformedMessage for spans that do not cover its
    tokens, or a log-probability such as NaN.
    """
    reason = completion.finish_reason
    return Rollout(
        token_ids=np.array(completion.token_ids, dtype="<i4"),
        logprobs=np.minimum(np.array(completion.logprobs.logprobs, dtype="<f4"), 0.0),  # rounding
        mask=np.ones(len(completion.token_ids), dtype=bool),
        spans=spans,
        finish_reason=reason if reason in ("stop", "length") else "cut",
    )


@dataclasses.dataclass(slots=True)
class StepCounts:
    """What vLLM's steps did since the start.

    `tokens` were sampled; of prompts' tokens `cached` had keys and values already, `computed` had none.
    `ended_per_step` is the mean number of completions that end in a step, over about the last 50.
    """

    tokens: int = 0
    cached: int = 0
    computed: int = 0
    ended_per_step: float = 0.0

    def add(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """Add a step by vLLM's statistics of it; those that are None add nothing."""
        if iteration_stats is not None:
            self.tokens += iteration_stats.num_generation_tokens
            ended = len(iteration_stats.finished_requests)
            self.ended_per_step += _NEWEST_STEP * (ended - self.ended_per_step)
        if scheduler_stats is not None:
            found = scheduler_stats.prefix_cache_stats
            self.cached += found.hits
            self.computed += found.queries - found.hits


def _step_counter(counts: StepCounts) -> Any:
    """Return a class for vLLM's stat_loggers that adds each step to `counts`."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class StepCounter(StatLoggerBase):
        """Adds each step to `counts`. Making one uses neither parameter."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            """Add one step to `counts`; statistics that are None add nothing."""
            counts.add(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            """Do nothing: vLLM calls this once the engine is ready, and nothing is to be logged."""

    return StepCounter
