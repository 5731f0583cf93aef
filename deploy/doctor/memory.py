"""Estimates of the memory that learner and actor need, and the settings by which they would fit.

The numbers come from the model's config.json and the settings. The longest sequences are assumed, and
fragments of memory are left out. On a CPU, for models of 63 and 100 million parameters, the learner's
estimate was 1 to 14% above the peak that was measured.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from penstock.common.config.learner_settings import LearnerSettings
from penstock.deploy.doctor.finding import Finding, Severity, assign
from penstock.deploy.doctor.machine import GIB, Machine
from penstock.deploy.doctor.settings import Settings
from penstock.deploy.doctor.shape import Shape

_TRAINED = 16
"""Bytes per trained parameter: AdamW's two fp32 moments (8), and fp32 weights and gradients (8), or both
in bf16 with fp32 master weights (8)."""
_LOGITS = 3 * 4
"""Bytes per logit: fp32 logits, their softmax and their gradient."""
_PROCESS, _ENGINE = GIB, 2 * GIB  # of a process with torch, or with vLLM
_RANK = 16


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that something needs, and the room there is. `least` is the part that is needed for sure."""

    what: str
    size: int
    room: int
    least: int

    @property
    def excess(self) -> int:
        """Return how many bytes are missing; 0 or less if the need fits."""
        return self.size - self.room


def check_memory(settings: Settings, shape: Shape, machine: Machine, gpu: bool) -> Iterator[Finding]:
    """Yield a finding for each need of memory that does not fit, with the settings by which it would.

    `gpu`: learner and actor use the machine's GPUs, else its processors and memory. A need that fits
    as long as no row has the most tokens is a warning.
    """
    for number, need in enumerate(find_needs(settings, shape, machine, gpu)):
        if need.excess <= 0:
            continue

        def again(changed: Settings, number: int = number) -> Need:
            """Return the same need under other settings."""
            return find_needs(changed, shape, machine, gpu)[number]

        severity: Severity = "error" if need.least > need.room else "warning"
        found = f"{need.what}: about {_gib(need.size)} is needed, and {_gib(need.room)} is free"
        why = "vLLM refuses to start, or a process is killed or ends when memory runs out"
        yield Finding("memory", severity, found, why, _remedy(settings, shape, gpu, again))


def find_needs(settings: Settings, shape: Shape, machine: Machine, gpu: bool) -> list[Need]:
    """Return the needs of a run, the key-value cache first.

    With a GPU the engine and the learner follow; on processors both together, as they share the memory.
    """
    learner, actor = settings.learner, settings.actor
    sequence = learner.max_prompt_length + learner.max_completion_length
    cache = sequence * shape.kv_values * _width(actor.dtype or learner.dtype)
    weights = shape.parameters * _width(actor.dtype or learner.dtype)
    state, rows = _learner_bytes(shape, learner, gpu)
    one = f"an actor's key-value cache for one sequence of {sequence} tokens"
    if not gpu:
        room = int(actor.kv_cache_gib * GIB)
        both = weights + room + _ENGINE + state + _PROCESS
        what = f"memory of learner and actor ({shape.parameters / 1e9:.2g} billion parameters)"
        return [Need(one, cache, room, cache), Need(what, both + rows, machine.memory, both)]
    first, last = machine.gpus[0], machine.gpus[-1]
    share = actor.gpu_memory_utilization
    engines = actor.tensor_parallel_size * actor.pipeline_parallel_size
    room = int(first.total * share * engines)
    taken = int(first.total * share)
    alone = len(machine.gpus) > 1 or learner.share_device
    left = last.free if alone else first.total - taken
    return [
        Need(f"{one}, and the weights", weights + cache + _PROCESS, room, weights + cache),
        Need("an actor's share of the GPU", taken, first.free, taken),
        Need("the learner's share of the GPU", state + rows + _PROCESS, left, state),
    ]


def _learner_bytes(shape: Shape, settings: LearnerSettings, gpu: bool) -> tuple[int, int]:
    """Return the bytes of weights with all that belongs to them, and those of a row and its logits.

    On processors there is another copy of the weights while a version is published.
    """
    weights = shape.parameters * _width(settings.dtype)
    if settings.lora_rank:
        state = weights + settings.lora_rank * shape.adapter_parameters * _TRAINED
    elif gpu and settings.offload_optimizer:
        state = 2 * weights
    else:
        state = _TRAINED * shape.parameters
    if settings.beta and not settings.lora_rank:
        state += weights
    if not gpu and (settings.lora_publish_merged or not settings.lora_rank):
        state += weights
    kept = shape.activations
    if settings.gradient_checkpointing:
        kept = shape.layers * shape.hidden + shape.activations // shape.layers
    rows = _row_tokens(settings) * kept * _width(settings.dtype)
    return state, rows + settings.logprob_chunk * shape.vocabulary * _LOGITS


def _row_tokens(settings: LearnerSettings) -> int:
    """Return the most tokens that one forward pass of an Update reads."""
    longest = settings.max_prompt_length + settings.max_completion_length
    if not settings.packing:
        return longest
    batch = settings.groups_per_step * settings.num_generations * longest
    return max(longest, min(settings.micro_batch_tokens, batch))


def _changes(settings: Settings, shape: Shape, gpu: bool) -> Iterator[tuple[str, object]]:
    """Yield settings that need less memory, as variable and value, those with the least cost first."""
    learner = settings.learner
    longest = learner.max_prompt_length + learner.max_completion_length
    tokens = _row_tokens(learner)
    while learner.packing and tokens > longest:
        tokens = max(longest, tokens // 2)
        yield "LEARNER_MICRO_BATCH_TOKENS", tokens
    yield "LEARNER_GRADIENT_CHECKPOINTING", True
    yield "LEARNER_LOGPROB_CHUNK", 32
    group = learner.num_generations * longest * shape.kv_values
    cache = group * _width(settings.actor.dtype or learner.dtype) / GIB
    yield "ACTOR_KV_CACHE_GIB", math.ceil(100 * cache) / 100
    if gpu:
        for share in (0.8, 0.7, 0.6, 0.5, 0.4, 0.3):
            yield "ACTOR_GPU_MEMORY_UTILIZATION", share
        yield "LEARNER_OFFLOAD_OPTIMIZER", True
    yield "LEARNER_LORA_RANK", _RANK


def _remedy(settings: Settings, shape: Shape, gpu: bool, again: Callable[[Settings], Need]) -> str:
    """Return the settings by which the need that `again` computes fits, as few as were found to do.

    If all together do not, the remedy is another machine or model.
    """
    chosen: dict[str, object] = {}
    for name, value in _changes(settings, shape, gpu):
        before, trial = _changed(settings, chosen), _changed(settings, chosen | {name: value})
        if before is None or trial is None or again(trial).excess >= again(before).excess:
            continue
        chosen[name] = value
        if again(trial).excess <= 0:
            break
    for name in list(chosen):
        fewer = {other: value for other, value in chosen.items() if other != name}
        trial = _changed(settings, fewer)
        if trial is not None and again(trial).excess <= 0:
            chosen = fewer
    last = _changed(settings, chosen)
    if last is None or again(last).excess > 0:
        lacking = _gib(again(last or settings).excess)
        return f"do: take a smaller model, shorter sequences, or a machine with {lacking} more"
    return assign(chosen)


def _changed(settings: Settings, values: Mapping[str, object]) -> Settings | None:
    """Return the settings with other values, by variable; None if they contradict each other."""
    sections = settings.model_dump(exclude_unset=True)
    for name, value in values.items():
        section, _, field = name.lower().partition("_")
        sections[section] = {**sections.get(section, {}), field: value}
    try:
        return Settings.model_validate(sections)
    except ValidationError:
        return None


def _width(dtype: str) -> int:
    """Return the bytes of a number of this precision."""
    return 2 if dtype == "bfloat16" else 4


def _gib(size: int) -> str:
    """Return a number of bytes as text in GiB, with one digit after the point."""
    return f"{size / GIB:.1f} GiB"
