"""A Megatron world of one rank inside the test process; a small model to be converted."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.tiny_models import write_tiny_model
from trace_megatron.policy import cpu
from trace_megatron.policy.convert import hf_to_megatron
from trace_megatron.policy.names import ParallelSizes


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    from megatron.core import parallel_state

    cpu.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def tiny(tmp_path):
    """An HF folder."""
    return write_tiny_model(tmp_path / "tiny", "qwen2", vocab=261, tied=False)


@pytest.fixture
def converted(tiny, tmp_path):
    """The same as a distributed checkpoint."""
    hf_to_megatron(tiny, tmp_path / "m", ParallelSizes(2, 1))
    return tmp_path / "m"
