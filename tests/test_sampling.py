"""What is refused before any engine starts."""

import pytest

from trace_megatron.config import Config, SyncConfig
from trace_megatron.errors import UserError
from trace_megatron.sampling import open_sampling


def test_an_address_of_another_host_is_refused_before_an_engine_starts():
    config = Config(sync=SyncConfig(address="203.0.113.9"))  # of documentation (RFC 5737): nobody's
    with (
        pytest.raises(UserError, match=r"expected an address of this host at sync\.address, found '203\.0\.113\.9'"),
        open_sampling(config, loop=None),
    ):
        pass
