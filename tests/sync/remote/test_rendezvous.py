"""Those who cannot meet say in time who did what, and nobody listens where he was not told to."""

from __future__ import annotations

import importlib
import socket
import threading
import time
import warnings

import psutil
import pytest

from sync.remote import gloo_engine, rpc_engine
from sync.remote.addresses_and_stores import address_towards, interface_of, is_loopback, open_store
from tests.promises.probe import wait_until
from tests.promises.remote_probe import ENGINES, MODULES, Peers

KINDS = sorted(ENGINES)
BOUND_S = 20.0  # far above every timeout here, far below torch's own


@pytest.fixture(params=KINDS)
def module(request):
    found = importlib.import_module(MODULES[request.param])
    found.make_engine = getattr(found, ENGINES[request.param])
    found.kind = request.param
    return found


@pytest.fixture(autouse=True)
def bounded():
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < BOUND_S


@pytest.fixture
def stranger():
    """A port where somebody listens who says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def unused_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listening():
    return {
        (at.laddr.ip, at.laddr.port)
        for at in psutil.Process().net_connections("inet")
        if at.status == psutil.CONN_LISTEN
    }


def test_a_store_that_does_not_answer_in_time_says_so():
    with pytest.raises(ConnectionError, match=r"no store can be opened at 127\.0\.0\.1:\d+: .*tim"):
        open_store("127.0.0.1", 0, 0.0)


def test_a_port_that_is_taken_is_named(module, stranger):
    with pytest.raises(ConnectionError, match=rf"opened at 127\.0\.0\.1:{stranger}: .*(use|taken)"):
        module.make_engine(1, port=stranger, timeout=1.0)


@pytest.mark.filterwarnings("ignore:.* has no authentication")
@pytest.mark.parametrize(("host", "port"), [("192.0.2.7", 0), ("nowhere.invalid", 4000)])
def test_an_address_of_another_machine_cannot_be_listened_at(module, host, port):
    with pytest.raises(ConnectionError, match=f"no store can be opened at {host}:{port}: "):
        module.make_engine(1, host=host, port=port, timeout=1.0)


def test_a_peer_that_does_not_come_is_named_with_what_it_should_have_done(module):
    engine = module.make_engine(2, timeout=0.5)
    try:
        with pytest.raises(TimeoutError, match=r"peer .*0.*1.*within 0\.5 s: was .*serve\(\)"):
            engine.connect()
    finally:
        engine.close()


def test_a_peer_that_finds_no_trainer_says_where_it_looked(module):
    port = unused_port()
    with pytest.raises(
        ConnectionError, match=rf"peer 3: no trainer .*127\.0\.0\.1:{port} .*0\.5 s"
    ):
        module.serve(3, port=port, timeout=0.5)


def test_a_peer_that_cannot_look_its_trainer_up_goes_on_trying_and_says_why(module):
    with pytest.raises(ConnectionError, match=r"nowhere\.invalid:4000 within 0\.5 s \(.*name"):
        module.serve(0, host="nowhere.invalid", port=4000, timeout=0.5)


def test_a_peer_that_finds_somebody_else_gives_up_in_time(module, stranger):
    with pytest.raises(
        ConnectionError, match=rf"127\.0\.0\.1:{stranger} did not answer as a train"
    ):
        module.serve(0, port=stranger, timeout=1.0)


@pytest.mark.parametrize(
    ("timeout", "says"),
    [(1.0, "did not meet it within 1 s"), (60.0, "was gone before it met it")],
)
def test_a_peer_that_is_not_met_says_whether_there_was_time(timeout, says):

    trainer = [gloo_engine.DistributedEngine(1, timeout=60.0)]
    port = trainer[0].port
    ends = threading.Timer(2.0, trainer.clear)
    ends.start()
    try:
        with pytest.raises(ConnectionError, match=rf"peer 1: the trainer at .* {says}"):
            gloo_engine.serve(1, port=port, timeout=timeout)
    finally:
        ends.join()


def test_a_late_peer_is_met_when_it_comes(module):
    peers = Peers(module.kind, 1)
    try:
        peers.engine.num_peers = 2
        late = threading.Timer(0.5, lambda: peers.processes.append(peers._process(1)))
        late.start()
        peers.engine.admit(1)
        assert peers.engine.call(1, abs, -3).result(10.0) == 3
    finally:
        late.join()
        peers.close()


def test_an_engine_listens_on_loopback_alone(module):
    before = listening()
    engine = module.make_engine(1, timeout=0.5)
    try:
        assert listening() - before  # its store
        assert all(is_loopback(ip) for ip, _ in listening() - before)
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["host", "address"])
def test_an_address_that_others_can_reach_is_warned_of(module, name):
    own = address_towards("192.0.2.7", 9)
    if is_loopback(own):
        pytest.skip("this machine has no address but loopback")
    with pytest.warns(UserWarning, match=rf"{own} has no authentication: whoever can reach it can"):
        engine = module.make_engine(1, timeout=0.5, **{name: own})
    engine.close()


def test_loopback_is_not_warned_of(module):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = module.make_engine(1, timeout=0.5)
    engine.close()


def test_an_interface_is_found_by_its_address():
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(ValueError, match=r"address='192\.0\.2\.7' is not of this machine"):
        interface_of("192.0.2.7")
    with pytest.raises(ValueError, match=r"address='nowhere\.invalid': .*name"):
        interface_of("nowhere.invalid")


def test_rpc_says_at_once_that_no_other_process_can_take_the_place_of_a_peer():
    peers = Peers("rpc", 1)
    try:
        peers.processes[0].kill()
        wait_until(lambda: peers.engine.gone(0) is not None)
        assert not rpc_engine._watched_by  # nothing is left of its connection
        with pytest.raises(ConnectionError, match=r"peer 0 \(peer0\) .* use DistributedEngine"):
            peers.engine.admit(0)
    finally:
        peers.close()
