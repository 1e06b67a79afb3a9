"""What torch keeps about an RPC group, which it does not promise to keep like this.

When one of these fails after an update of torch, `sync/remote/rpc_group.py` has to follow.
"""

from __future__ import annotations

import inspect

import pytest
from torch.distributed import PrefixStore
from torch.distributed import rpc as torch_rpc

from sync.remote.rpc_engine import RPCEngine
from tests.promises.remote_probe import Peers

GROUP = "rpc_prefix_0"
MEMBERS = "names/_ALL_WORKER_INFOS"


@pytest.fixture
def peers():
    group = Peers("rpc", 1)
    yield group
    group.close()


def group_of(engine):
    return PrefixStore(GROUP, engine._store)


def test_the_store_lists_the_members(peers):
    assert group_of(peers.engine).get(MEMBERS).decode() == "trainer-0,peer0-1,"


def test_a_group_that_is_opened_again_has_the_same_name():
    for _ in range(2):
        engine = RPCEngine(1, timeout=5.0)
        assert group_of(engine).get(MEMBERS).decode() == "trainer-0,"
        engine.close()
    assert torch_rpc._init_counter == 1


def test_a_process_that_reaches_no_member_leaves_by_a_function_that_can_be_replaced():
    source = inspect.getsource(torch_rpc.backend_registry)
    assert "api.shutdown()" in source
    assert callable(torch_rpc.api.shutdown)


def test_transports_and_channels_can_be_chosen():
    options = torch_rpc.TensorPipeRpcBackendOptions(_transports=["shm"], _channels=["basic"])
    assert options.init_method == "env://"


def test_a_second_agent_in_one_process_is_refused():
    engine = RPCEngine(1, timeout=30.0)
    try:
        with pytest.raises(RuntimeError, match="is in an RPC group already, as 'trainer'"):
            RPCEngine(1, timeout=30.0)
    finally:
        engine.close()
