"""A tiny model to train."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.learner.whole import Run, Worker
from tests.tiny_tokenizer import save_tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """Two layers, a vocabulary of 32, random weights."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Threads that spin for one another make tiny models many times slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(tmp_path, connection, keys, queue_server) -> Iterator[Run]:
    """A whole learner's run, with a worker that answers."""
    worker = Worker(queue_server.url, keys)
    worker.start()
    yield Run(tmp_path / "run", connection, keys, worker)
    worker.leaving.set()
    worker.join()
