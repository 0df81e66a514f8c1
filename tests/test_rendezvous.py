"""Several processes find each other, whatever an earlier run has left behind, and a sentence says who did not come.

Where collectives do not matter, threads of this process stand for ranks: importing torch takes a process two seconds.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from ranks import PROGRAM, ends, environment, free_port, start, start_all

from torch.distributed import TCPStore

from llmc.distributed import network, rendezvous, signpost
from llmc.distributed.place import Place, rendezvous_path
from llmc.distributed.rendezvous import VERDICT_KEY, meet, open_signpost, open_store
from llmc.distributed.signpost import SignpostFile, SignpostInStore, leads_to
from llmc.errors import UserError


def place(rank: int, size: int, tmp_path=None, port: int = 0, key: str = "", method: str = "tcp") -> Place:
    """Of a rank that meets the others in a folder, or at a port."""
    if tmp_path:
        return Place(rank, size, rank, size, method="fs", folder=str(tmp_path), key=key)
    return Place(rank, size, rank, size, method=method, address="127.0.0.1", port=port)


def opened(place: Place):
    """Rank 0's store, to which nobody has come yet."""
    return open_store(place, open_signpost(place, 30, time.monotonic() + 30), 30)


@pytest.fixture
def torchruns_store():
    """What torchrun keeps while it starts its ranks again and again; its port."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def meetings(places, timeout_s: float = 30) -> list:
    """What meet() gives each of several ranks, or the sentence it raises."""

    def one(place):
        try:
            return meet(place, timeout_s)
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(one, places))


def assert_met(found) -> None:
    """All came to one store and know each other."""
    assert not [each for each in found if isinstance(each, str)], found
    found[0].store.set("x", "y")
    for each in found:
        assert each.store.get("x") == b"y" and each.members == found[0].members and len(each.members) == len(found)
        assert hash(each.members) == hash(found[0].members)


@contextmanager
def listener():
    """A port where somebody accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def dead_port() -> int:
    """One where nobody listens."""
    return free_port()


# ----------------------------------------------------------------------------
# real processes, real collectives


@pytest.mark.parametrize("method", ["tcp", "fs"])
def test_processes_add_up_their_numbers(method, tmp_path):
    flags = ("-pi", "tcp", "-ps", f"127.0.0.1:{free_port()}") if method == "tcp" else ("-pi", "fs", "-pp", tmp_path)
    results = ends(start_all("end", 0, 2, *flags))
    assert [(r.code, r.out, r.err) for r in results] == [(0, f"rank {rank} of 2: 3\n", "") for rank in range(2)]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["end", "once"])
def test_torchrun_starts_them(what, tmp_path):
    """And again, if rank 1 is killed the first time: its store then holds what the first run left there."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    command += ["--max-restarts", "1", PROGRAM, what, "1"]
    done = subprocess.run(command, env=environment(ONCE=str(tmp_path / "once")), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and sorted(done.stdout.splitlines()) == ["rank 0 of 2: 3", "rank 1 of 2: 3"], done.stderr


def test_one_torchrun_of_two_starts_its_rank_again(tmp_path):
    """Each counts only the restarts that it began itself: after rank 1 was killed one machine has counted 1, and the other 0."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", PROGRAM, "once", "1"]
    environ, pipe = environment(ONCE=str(tmp_path / "once")), subprocess.PIPE
    runs = [subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    said = [run.communicate(timeout=120) for run in runs]
    assert sorted(out for out, _ in said) == ["rank 0 of 2: 3\n", "rank 1 of 2: 3\n"] and not any(run.returncode for run in runs), said


@pytest.fixture(scope="module")
def two_hosts():
    """Two network namespaces with a cable between them: the commands that run something in each."""
    names = [f"llmc{os.getpid()}{side}" for side in "ab"]
    commands = [
        *(f"ip netns add {name}" for name in names),
        f"ip link add {names[0]} netns {names[0]} type veth peer name {names[1]} netns {names[1]}",
        *(f"ip -n {name} addr add 10.77.0.{i}/24 dev {name}" for i, name in enumerate(names, 1)),
        *(f"ip -n {name} link set {link} up" for name in names for link in ("lo", name)),
    ]
    if not shutil.which("ip"):
        pytest.skip("ip is not installed, which makes network namespaces")
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True, timeout=20)
            if done.returncode:
                pytest.skip(f"no right to make network namespaces: {done.stderr.strip()}")
        yield [("ip", "netns", "exec", name) for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.parametrize("method", ["tcp", "fs"])
def test_two_hosts_meet(two_hosts, method, tmp_path):
    """Their name is the same, and may mean a loopback address: gloo must be told the interface."""
    flags = ("-pi", "tcp", "-ps", "10.77.0.1") if method == "tcp" else ("-pi", "fs", "-pp", tmp_path)
    results = ends([start("end", 0, "-pn", 2, "-pr", rank, "-pg", 1, *flags, before=host) for rank, host in enumerate(two_hosts)])
    assert [(r.code, r.out) for r in results] == [(0, f"rank {rank} of 2: 3\n") for rank in range(2)], results


# ----------------------------------------------------------------------------
# what an earlier run, or another one, left behind

STALE = ("a dead run's file", "a file whose port somebody else has", "text", "half a file", "another file's keys", "a folder's dead link")


@pytest.mark.parametrize("name", STALE)
def test_a_stale_file_confuses_nobody(name, tmp_path, monkeypatch):
    monkeypatch.setattr(signpost, "ANSWER_S", 0.5)
    path = rendezvous_path(place(0, 2, tmp_path))
    with listener() as taken:
        port = taken if "somebody" in name else dead_port()
        card = json.dumps({"addresses": ["127.0.0.1"], "machine": network.this_machine(), "port": port, "run": "old"})
        if "link" in name:
            path.symlink_to(tmp_path / "gone")
        else:
            path.write_text({"text": "hello", "half a file": card[:20], "another file's keys": "[1]"}.get(name, card))
        assert_met(meetings([place(rank, 2, tmp_path) for rank in range(2)]))
    assert not list(tmp_path.iterdir())


def test_a_signpost_whose_port_another_run_has_since_leads_nowhere(tmp_path):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("hello", json.dumps({"run": "another", "num_processes": 2}))
    sign = {"addresses": ["127.0.0.1"], "machine": network.this_machine(), "port": store.port, "run": "old"}
    for form in SignpostFile(tmp_path / "sign.json"), SignpostInStore(store, "sign"):
        assert leads_to(form.read()) is None
        form.write(sign)
        assert leads_to(form.read()) is None
        form.write(sign | {"run": "another"})
        assert leads_to(form.read()).num_processes == 2


def test_only_a_run_s_own_file_is_removed(tmp_path):
    """A newer run may have written its own there."""
    path = rendezvous_path(place(0, 2, tmp_path))
    SignpostFile(path).write({"addresses": [], "machine": "", "port": 1, "run": "newer"})
    SignpostFile(path).remove("older")
    assert path.exists()
    SignpostFile(path).remove("newer")
    assert not path.exists()


def test_rank_1_looks_on_while_there_is_only_a_stale_file(tmp_path, monkeypatch):
    monkeypatch.setattr(signpost, "ANSWER_S", 0.5)
    with listener() as port:
        stale = {"addresses": [], "machine": network.this_machine(), "port": port, "run": "old"}
        SignpostFile(rendezvous_path(place(0, 2, tmp_path))).write(stale)
        [sentence] = meetings([place(1, 2, tmp_path)], timeout_s=1)
    assert f"no {rendezvous_path(place(1, 2, tmp_path))} of a living rank 0 appeared within 1 s (--timeout)" in sentence


@pytest.mark.parametrize("method", ["fs", "tcp", "agent"])
def test_who_starts_again_does_not_join_a_run_that_is_lost(method, tmp_path, torchruns_store):
    """Rank 1 is back before rank 0 has ended: it waits for the next rank 0."""
    ports = {"tcp": free_port(), "agent": torchruns_store}
    where = dict(tmp_path=tmp_path) if method == "fs" else dict(port=ports[method], method=method)
    old = opened(place(0, 2, **where))
    old.store.set(VERDICT_KEY, "lost")
    with ThreadPoolExecutor(2) as pool:
        back = pool.submit(meet, place(1, 2, **where), 30)
        time.sleep(0.5)
        assert not back.done()
        if method == "tcp":
            old.store = old.server = None  # it ends, and so does its store
        new = pool.submit(meet, place(0, 2, **where), 30)
        assert_met([new.result(), back.result()])


def test_two_jobs_in_one_folder_do_not_meet(tmp_path):
    found = meetings([place(rank, 2, tmp_path, key=key) for key in ("7.0", "7.1") for rank in range(2)])
    assert_met(found[:2])
    assert_met(found[2:])
    assert found[0].port != found[2].port


def test_a_rank_of_torchrun_s_waits_for_the_rank_0_of_its_own_start(torchruns_store, monkeypatch):
    """The signpost of the start before leads to a rank 0 that has ended without a word, or still lives, with all its ranks; and one of
    another number of ranks is not looked at. (On some machines opening a connection now and then takes five seconds.)"""
    monkeypatch.setattr(rendezvous, "TAKEN_AFTER_S", 60)
    where = dict(port=torchruns_store, method="agent")
    first = [place(rank, 2, **where) for rank in range(2)]
    assert_met(meetings(first))  # whose stores are closed with what this returned
    living = meetings(first)
    assert_met(living)
    with ThreadPoolExecutor(5) as pool:
        more = [pool.submit(meet, place(rank, 3, **where), 60) for rank in range(3)]
        again = [pool.submit(meet, each, 60) for each in first]
        assert_met([each.result() for each in more])
        time.sleep(0.5)
        assert not any(each.done() for each in again)
        living[0].store.set(VERDICT_KEY, "lost")
        assert_met([each.result() for each in again])


# ----------------------------------------------------------------------------
# sentences


def test_who_is_waited_for_is_said_meanwhile(monkeypatch, capsys, torchruns_store, tmp_path):
    claim = rendezvous.claim

    def claim_after_rank_2(meeting):
        if meeting.place.rank == 0:
            assert any(rendezvous.came(meeting.store, rendezvous.member_key(2)) for _ in range(4))  # a connection may take its time
        claim(meeting)

    monkeypatch.setattr(rendezvous, "REMINDER_S", 0)
    port = free_port()
    with monkeypatch.context() as patched:
        patched.setattr(rendezvous, "claim", claim_after_rank_2)
        meetings([place(0, 4, port=port), place(2, 4, port=port)], timeout_s=6)
    assert "waiting for ranks 1, 3 of 4\n" in capsys.readouterr().out
    alone = Place(1, 2, 0, 1, address="127.0.0.1", port=port)
    fs = Place(1, 2, 0, 1, method="fs", folder=str(tmp_path))
    agent = Place(1, 2, 0, 1, method="agent", address="127.0.0.1", port=torchruns_store)
    for where, who in (alone, f"rank 0 at 127.0.0.1:{port}"), (fs, f"rank 0 to write {rendezvous_path(fs)}"), (agent, "rank 0"):
        meetings([where], timeout_s=0.5)
        assert capsys.readouterr().out.endswith(f"rank 1 of 2 is waiting for {who}\n")


def test_a_rank_whose_torchrun_is_gone_waits_for_nobody(torchruns_store):
    """It was killed before all had met."""
    for rank in range(2):
        orphan = Place(rank, 2, rank, 2, method="agent", address="127.0.0.1", port=torchruns_store, parent=os.getppid() + 1)
        [sentence] = meetings([orphan])
        assert sentence.startswith(f"torchrun (process {os.getppid() + 1} on ") and sentence.endswith("with -y 1 to resume")


def test_a_rank_in_training_leaves_it_to_the_watch_to_tell_of_a_torchrun_that_is_gone(monkeypatch):
    """As its exit code is then that of a lost rank."""
    orphan = Place(0, 2, 0, 2, address="127.0.0.1", port=free_port(), parent=os.getppid() + 1)
    meeting = rendezvous.open_store(orphan, None, 30)
    answers = iter([False, True])
    monkeypatch.setattr(rendezvous, "came", lambda *_: next(answers))
    rendezvous.wait_for_all_ranks(meeting, "wait 1")
    assert orphan.is_orphan and next(answers, "asked again") == "asked again"


def test_a_torchrun_that_is_gone_is_a_sentence():
    port = free_port()
    for rank in range(2):
        [sentence] = meetings([place(rank, 2, port=port, method="agent")], timeout_s=1)
        assert sentence.startswith(f"torchrun's store at 127.0.0.1:{port} did not answer within 1 s (--timeout)")


def test_a_second_claimant_of_a_rank_is_told_whose_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous, "TAKEN_AFTER_S", 0.5)
    found = meetings([place(rank, 3, tmp_path) for rank in (0, 1, 1)], timeout_s=3)
    taken = [sentence for sentence in found[1:] if "taken" in sentence]
    assert len(taken) == 1 and taken[0].startswith(f"rank 1 of 3 is taken by process {os.getpid()} on {socket.gethostname()}")
    assert found[0].startswith("rank 2 of 3 did not come within 3 s (--timeout)")


def test_a_second_run_in_the_same_folder_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous, "TAKEN_AFTER_S", 0.5)
    first = opened(place(0, 2, tmp_path))
    rendezvous.claim(first)
    assert meetings([place(0, 2, tmp_path)])[0].startswith("rank 0 of 2 is taken by process")


def test_a_port_in_use_is_a_sentence(monkeypatch):
    monkeypatch.setattr(rendezvous, "TAKEN_AFTER_S", 0)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        [sentence] = meetings([place(0, 2, port=port)])
    assert sentence.startswith(f"port {port} of this machine is in use")


def test_nobody_or_somebody_else_at_the_address_is_a_sentence(monkeypatch):
    monkeypatch.setattr(signpost, "ANSWER_S", 0.5)
    with listener() as taken:
        for port in (dead_port(), taken):
            [sentence] = meetings([place(1, 2, port=port)], timeout_s=1)
            assert sentence.startswith(f"rank 0 did not answer at 127.0.0.1:{port} within 1 s (--timeout)")


def test_another_number_of_processes_is_a_sentence():
    port = free_port()
    found = meetings([place(0, 2, port=port), place(1, 3, port=port)], timeout_s=3)
    assert found[1].startswith(f"-pn 3: rank 0 at 127.0.0.1:{port} is one of 2 processes; give all the same -pn")
    assert found[0].startswith("rank 1 of 2 did not come within 3 s")


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    [sentence] = meetings([place(0, 2, tmp_path)])
    assert sentence.startswith(f"writing where rank 0 listens failed at {rendezvous_path(place(0, 2, tmp_path))}: No space left")
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------
# the interface gloo is told

LO, ETHERNET = "lo", "eth7"


@pytest.mark.parametrize(
    "name_means,others,expected",
    [
        ("10.0.0.5", ["10.0.0.6"], None),  # a cluster: it finds its way
        ("127.0.0.1", [], None),  # one machine
        (None, [], LO),  # one machine that does not know its name
        ("127.0.1.1", ["127.0.0.1", "10.0.0.6"], ETHERNET),  # many systems; others may see themselves through loopback
        (None, ["127.0.0.1"], ETHERNET),  # then the store's address tells
    ],
)
def test_gloo_is_told_an_interface_only_where_its_name_misleads(name_means, others, expected, monkeypatch):
    monkeypatch.setattr(network, "host_name_address", lambda: name_means)
    monkeypatch.setattr(network, "own_address_towards", lambda address: "127.0.0.1" if address.startswith("127") else "10.0.0.5")
    monkeypatch.setattr(network, "interface_addresses", lambda: {"127.0.0.1": LO, "10.0.0.5": ETHERNET})
    assert network.interface_for_gloo(others, "10.0.0.1" if others else "127.0.0.1") == expected


def test_this_machine_s_addresses_are_its_own():
    """Each can be listened at, and lo is one of them."""
    found = network.interface_addresses()
    assert found["127.0.0.1"] == "lo"
    for address in found:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
