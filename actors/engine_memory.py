"""What to do when vLLM does not start: often its device lacks memory, and its error does not say so."""

import math

import psutil

from penstock.common.config.settings import ActorSettings

_GIB = 2**30
_LEFT_FREE = 0.9


def memory_advice(settings: ActorSettings, max_model_len: int, gpu: tuple[int, int] | None) -> str:
    """Return which settings to change, and to what value, if the engine lacked memory.

    `gpu` has the free and all bytes of the GPU after the failure, None for an engine on a CPU.
    `max_model_len` is the longest sequence of the engine. Example, with 30 of 80 GiB free: "30.0 of 80.0
    GiB of the GPU are free, and ACTOR_GPU_MEMORY_UTILIZATION=0.9 asks for 72.0: set it to 0.33".
    """
    if gpu is None:
        return _on_cpu(settings, psutil.virtual_memory().available / _GIB)
    return _on_gpu(settings, max_model_len, *(size / _GIB for size in gpu))


def _on_gpu(settings: ActorSettings, max_model_len: int, free: float, total: float) -> str:
    """Return the advice for an engine on a GPU with `free` of `total` GiB of memory."""
    share = settings.gpu_memory_utilization
    if share * total > free:
        return (
            f"{free:.1f} of {total:.1f} GiB of the GPU are free, and ACTOR_GPU_MEMORY_UTILIZATION="
            f"{share:g} asks for {share * total:.1f}: set it to {_down(_LEFT_FREE * free / total)}, or "
            "end what uses the rest"
        )
    return (
        "if vLLM's lines above say that memory is short, raise ACTOR_GPU_MEMORY_UTILIZATION (now "
        f"{share:g}), or lower ACTOR_MAX_MODEL_LEN (now {max_model_len}) or ACTOR_MAX_NUM_SEQS (now "
        f"{settings.max_num_seqs}); `penstock doctor` says what fits"
    )


def _on_cpu(settings: ActorSettings, free: float) -> str:
    """Return the advice for an engine on a CPU with `free` GiB of memory."""
    if settings.kv_cache_gib > free:
        return (
            f"{free:.1f} GiB of memory are free, and ACTOR_KV_CACHE_GIB={settings.kv_cache_gib:g} asks "
            f"for more: set it to {_down(_LEFT_FREE * free)}"
        )
    return (
        "if vLLM's lines above say that memory is short, lower ACTOR_KV_CACHE_GIB (now "
        f"{settings.kv_cache_gib:g})"
    )


def _down(number: float) -> str:
    """Return a number with two digits after the point, rounded down, as a text."""
    return f"{math.floor(number * 100) / 100:g}"
