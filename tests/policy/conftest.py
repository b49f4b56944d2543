"""A Megatron world of one rank inside the test process."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from trace_megatron.policy import cpu


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    from megatron.core import parallel_state

    cpu.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
