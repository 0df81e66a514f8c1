"""Which rank a process is and where it meets the others, for every launcher and for llm.c's flags; no process is started.

A row is an environment, flags, and the fields of the place they make, or words of the sentence that refuses them.
"""

import os
import tempfile

import pytest

from llmc.distributed.place import Place, find_place, first_host, rendezvous_path
from llmc.distributed.world import World, connect_world, device_of, meet_world, prepare_torch
from llmc.errors import UserError
from llmc.flags import parse

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
BY_HAND = {"RANK": "6", "WORLD_SIZE": "16", "MASTER_ADDR": "127.0.0.1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-7@1",
}  # fmt: skip
TWO_HOSTS = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
SLURM = {
    "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "2", "SLURM_JOB_ID": "1000",
    "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "2",
}  # fmt: skip
TEMPORARY = {"method": "fs", "folder": tempfile.gettempdir()}
JOB = f"{os.getuid()}-prterun-host-7@1"
PARENT = os.getppid()

PLACES = {  # environment, flags, the fields that are not those of Place()
    "alone": ({}, "", {}),
    "alone, and told so": ({"WORLD_SIZE": "1", "RANK": "0"}, "-pn 1 -pr 0", {}),
    "alone under mpirun": ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, "", {}),
    "alone in a batch script": (SLURM | {"SLURM_STEP_ID": ""}, "", {}),
    "alone in an interactive step": (SLURM | {"SLURM_STEP_ID": "4294967290"}, "", {}),
    "torchrun's only one inside srun": (SLURM | TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
                                        "", {}),
    "torchrun": (TORCHRUN, "", dict(rank=5, num_processes=8, local_rank=1, num_local=4, method="agent", address="127.0.0.1", port=29500,
                                    key="job", parent=PARENT)),
    "torchrun, flags that agree": (TORCHRUN, "-pn 8 -pr 5 -pi fs -pp nowhere",
                                   dict(rank=5, num_processes=8, local_rank=1, num_local=4, method="agent", address="127.0.0.1",
                                        port=29500, key="job", parent=PARENT)),
    "torchrun inside srun": (TORCHRUN | SLURM, "", dict(rank=5, num_processes=8, local_rank=1, num_local=4, method="agent",
                                                        address="127.0.0.1", port=29500, key="job", parent=PARENT)),
    "RANK and WORLD_SIZE by hand": (BY_HAND, "-pg 4", dict(rank=6, num_processes=16, local_rank=2, num_local=4, address="127.0.0.1",
                                                           port=12345)),
    "Open MPI, one host": (OPEN_MPI, "", dict(rank=1, num_processes=4, local_rank=1, num_local=4, key=JOB, **TEMPORARY)),
    "Open MPI, two hosts": (TWO_HOSTS | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "77"}, "",
                            dict(rank=1, num_processes=4, local_rank=1, num_local=2, address="127.0.0.1", port=77, key=JOB)),
    "Open MPI and -ps": (TWO_HOSTS, "-ps 127.0.0.1:99", dict(rank=1, num_processes=4, local_rank=1, num_local=2, address="127.0.0.1",
                                                            port=99, key=JOB)),
    "Open MPI and tcp": (TWO_HOSTS | {"MASTER_ADDR": "::1"}, "-pi tcp -ps 127.0.0.1",
                         dict(rank=1, num_processes=4, local_rank=1, num_local=2, address="127.0.0.1", port=12345, key=JOB)),
    "Open MPI and fs": (TWO_HOSTS, "-pi fs -pp .", dict(rank=1, num_processes=4, local_rank=1, num_local=2, method="fs", folder=".",
                                                       key=JOB)),
    "MPICH": (MPICH, "", dict(rank=2, num_processes=3, local_rank=2, num_local=3, key=f"{os.getuid()}", **TEMPORARY)),
    "srun": (SLURM, "", dict(rank=3, num_processes=4, local_rank=1, num_local=4, address="localhost", port=20000 + (17 * 1000 + 2) % 12000,
                             key="1000.2")),
    "srun, one host with more GPUs than -pg says": (SLURM | {"SLURM_STEP_NUM_NODES": "1"}, "-pg 2",
                                                    dict(rank=3, num_processes=4, local_rank=1, num_local=4, address="localhost",
                                                         port=20000 + (17 * 1000 + 2) % 12000, key="1000.2")),
    "srun, hosts of the job alone": (SLURM | {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": "localhost"}, "",
                                     dict(rank=3, num_processes=4, local_rank=1, num_local=4, address="localhost",
                                          port=20000 + (17 * 1000 + 2) % 12000, key="1000.2")),
    "srun --mpi=pmi2": (SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4"}, "-pg 2",
                        dict(rank=3, num_processes=4, local_rank=1, num_local=2, address="localhost", port=20000 + (17 * 1000 + 2) % 12000,
                             key="1000.2")),
    "mpirun's helpers are srun's": (SLURM | MPICH, "", dict(rank=2, num_processes=3, local_rank=2, num_local=3, key=f"{os.getuid()}",
                                                            **TEMPORARY)),
    "tcp": ({}, "-pn 16 -pr 10 -pi tcp -ps 127.0.0.1", dict(rank=10, num_processes=16, local_rank=2, num_local=8, address="127.0.0.1",
                                                          port=12345)),
    "tcp, IPv6": ({}, "-pn 2 -pm tcp -ps ::1", dict(num_processes=2, num_local=2, address="::1", port=12345)),
    "tcp, IPv6 and a port": ({}, "-pn 2 -pi tcp -ps [::1]:80", dict(num_processes=2, num_local=2, address="::1", port=80)),
    "fs": ({}, "-pn 4 -pr 3 -pg 2 -pi fs -pp .", dict(rank=3, num_processes=4, local_rank=1, num_local=2, method="fs", folder=".")),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_who_a_process_is(name):
    environ, flags, fields = PLACES[name]
    assert find_place(parse(flags.split()), environ) == Place(**fields)


def test_a_shell_of_srun_s_is_one_process_and_what_srun_starts_from_it_is_not(monkeypatch):
    """That has the shell's variables too."""
    environ = SLURM | {"SLURM_PTY_PORT": "40001"}
    for terminal in True, False:
        monkeypatch.setattr(os, "isatty", lambda fd: fd == 0 and terminal)
        assert find_place(parse([]), environ).num_processes == (1 if terminal else 4)
        assert find_place(parse([]), SLURM).num_processes == 4  # no shell of srun's: a terminal alone says nothing


REFUSED = {
    "rank 1 of 1": ({}, "-pr 1", "-pr 1: with 1 process the only rank is 0; leave -pr out"),
    "rank 2 of 2": ({}, "-pn 2 -pr 2 -pi fs", "-pr 2: with 2 processes ranks go from 0 to 1"),
    "nobody started the others": ({}, "-pn 2", "-pn 2: this process was started alone", "torchrun"),
    "tcp without -ps": ({}, "-pn 2 -pi tcp", "there is no -ps"),
    "-ps that nobody knows": ({}, "-pn 2 -pi tcp -ps no.such.host.invalid", "-ps is no.such.host.invalid, which is no address"),
    "-ps that can be nobody's": ({}, f"-pn 2 -pi tcp -ps {'x' * 64}", f"-ps is {'x' * 64}, which is no address"),
    "-ps with a port too high": ({}, "-pn 2 -pi tcp -ps 127.0.0.1:65536", "-ps (--server-ip) is '127.0.0.1:65536'"),
    "-ps with port 0": ({}, "-pn 2 -pi tcp -ps 127.0.0.1:0", "-ps (--server-ip) is '127.0.0.1:0'"),
    "-ps with a port of letters": ({}, "-pn 2 -pi tcp -ps [::1]:http", "must be HOST or HOST:PORT"),
    "-ps without its port": ({}, "-pn 2 -pi tcp -ps host:", "must be HOST or HOST:PORT"),
    "-ps without its host": ({}, "-pn 2 -pi tcp -ps :80", "must be HOST or HOST:PORT"),
    "no such folder": ({}, "-pn 2 -pi fs -pp nowhere", "-pp nowhere: no such folder"),
    "another size than torchrun's": (TORCHRUN, "-pn 4", "-pn 4, but torchrun says WORLD_SIZE=8; leave -pn out"),
    "another rank than torchrun's": (TORCHRUN, "-pr 4", "-pr 4, but torchrun says RANK=5"),
    "another size than mpirun's": (OPEN_MPI, "-pn 2 -pi fs -pp .", "-pn 2, but mpirun says OMPI_COMM_WORLD_SIZE=4"),
    "another rank than srun's": (SLURM, "-pr 1", "-pr 1, but srun says SLURM_PROCID=3"),
    "WORLD_SIZE in letters": ({"WORLD_SIZE": "two", "RANK": "0"}, "", "WORLD_SIZE is 'two', but", "whole number"),
    "RANK below 0": (TORCHRUN | {"RANK": "-1"}, "", "RANK is '-1'"),
    "RANK beyond WORLD_SIZE": (TORCHRUN | {"RANK": "8"}, "", "RANK is 8, but ranks go from 0 to 7, as WORLD_SIZE is 8"),
    "no RANK": ({"WORLD_SIZE": "2"}, "", "WORLD_SIZE is 2 and RANK is not set"),
    "a port beyond all": (TORCHRUN | {"MASTER_PORT": "70000"}, "", "MASTER_PORT is 70000"),
    "MASTER_ADDR that nobody knows": (TORCHRUN | {"MASTER_ADDR": "no.such.host.invalid"}, "", "MASTER_ADDR is no.such.host.invalid"),
    "two hosts and no address": (TWO_HOSTS, "", "nothing says where rank 0 is; set MASTER_ADDR"),
    "torchrun's numbers without an address": ({"RANK": "0", "WORLD_SIZE": "16"}, "", "nothing says where rank 0 is"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_contradiction_is_a_sentence(name):
    environ, flags, *words = REFUSED[name]
    with pytest.raises(UserError) as caught:
        find_place(parse(flags.split()), environ)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value), caught.value


NODES = {
    "one": "one", "a,b": "a", "n[01-04,07],other": "n01", "n[7]": "n7", "n[3,5-9]-ib": "n3-ib", "a-b[10-12].x.org": "a-b10.x.org",
    "login,n[1-2]": "login", "rack[1-2]node[03-4,7],x": "rack1node03",
}  # fmt: skip


@pytest.mark.parametrize("nodes", NODES)
def test_the_first_machine_of_slurm_s_list(nodes):
    assert first_host(nodes) == NODES[nodes]


def test_two_jobs_in_one_folder_have_two_files():
    """Another number of processes, another job, a key that is no file name."""
    places = [Place(num_processes=n, key=key, folder="f") for n in (2, 4) for key in ("", "7.0", "7.1", "../7 @1")]
    names = {rendezvous_path(place).name for place in places}
    assert len(names) == len(places) and all(rendezvous_path(place).parent.name == "f" for place in places)
    assert all("/" not in name and " " not in name for name in names)


def test_one_process_needs_no_torch_distributed():
    assert meet_world(Place(), 1) == World() == World(0, 1, 1, 0, None, None)
    connect_world(World(), "cpu", 1)


DEVICES = {  # place, --device, GPUs there are, CUDA_VISIBLE_DEVICES -> --device of this process, or words
    "alone": (Place(), "auto", 4, "", "auto"), "alone, a GPU of its choice": (Place(), "cuda:3", 4, "", "cuda:3"),
    "cpu": (Place(3, 4, 3, 4), "cpu", 2, "", "cpu"), "no GPU": (Place(3, 4, 3, 4), "auto", 0, "", "auto"),
    "no GPU, though asked for": (Place(3, 4, 3, 4), "cuda", 0, "", "cuda"),
    "its own": (Place(11, 16, 3, 8), "auto", 8, "", "cuda:3"), "its own, asked for": (Place(1, 2, 1, 2), "cuda", 2, "", "cuda:1"),
    "shown one": (Place(3, 4, 3, 4), "cuda", 1, "3", "cuda:0"), "too many": (Place(3, 4, 3, 4), "cuda", 2, "", "there are 2 CUDA devices"),
    "one for all": (Place(1, 2, 1, 2), "cuda:0", 2, "", "--device cuda:0: 2 processes of this machine would share one GPU"),
    "one per machine": (Place(1, 2, 0, 1), "cuda:1", 2, "", "cuda:1"),
}  # fmt: skip


@pytest.mark.parametrize("name", DEVICES)
def test_every_process_has_a_gpu_of_its_own(name, monkeypatch):
    import torch

    place, device, count, visible, expected = DEVICES[name]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if " " not in expected:
        assert device_of(place, device) == expected
    else:
        with pytest.raises(UserError, match=expected):
            device_of(place, device)


def test_several_processes_are_watched_by_this_program_alone(monkeypatch):
    """torchrun sets the first for every process; what a user sets of the others stands."""
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_NVLS_ENABLE": "1"})
    prepare_torch(Place())
    assert os.environ == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_NVLS_ENABLE": "1"}, "one process has no other to lose"
    prepare_torch(Place(0, 2, 0, 2))
    assert os.environ.pop("TORCH_CPP_LOG_LEVEL") == "FATAL" and os.environ.pop("NCCL_NVLS_ENABLE") == "1"
    assert len(os.environ) == 3 and set(os.environ.values()) == {"0"}
