"""Which of how many processes this is, and where the others are met: from a launcher's environment, or from llm.c's flags.

torchrun's environment wins, even where it started only one process, then that of mpirun (Open MPI, or whatever speaks PMI) and of srun,
then -pn and -pr. Imports no torch.
"""

import os
import re
import socket
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from llmc.errors import UserError
from llmc.flags import Settings

DEFAULT_PORT = 12345  # llm.c's
SLURM_PORTS = range(20000, 32000)  # below the ports that systems assign by themselves
SLURM_NO_STEP = 4294967290  # step ids from here on are not srun's, but a batch script's or an interactive shell's
START_AGAIN = "start all ranks again, with -y 1 to resume"
HOW_TO_START = "start it with torchrun, mpirun or srun, or use -pi tcp -ps ADDRESS, or -pi fs -pp DIR, with -pn and -pr"


@dataclass(frozen=True, slots=True)
class Place:
    """This process among the others, and how it finds them.

    method   tcp: rank 0 listens at address:port. The others: rank 0 listens anywhere, and says where,
             fs: in a file in `folder`; agent: in the store of torchrun, which itself listens at address:port
    key      the launcher's name for this run; empty where there is none
    parent   process id of the torchrun that started this one, else 0. Once it is gone nobody would end this rank or start it again, so
             the rank ends itself
    """

    rank: int = 0
    num_processes: int = 1
    local_rank: int = 0  # among the processes of this machine
    num_local: int = 1  # processes of this machine, as far as is known
    method: str = "tcp"
    address: str = ""
    port: int = 0
    folder: str = ""
    key: str = ""
    parent: int = 0

    @property
    def is_orphan(self) -> bool:
        """Whether torchrun is gone. It is not seen where a script stands between it and this process."""
        return self.parent not in (0, os.getppid())

    @property
    def orphan_sentence(self) -> str:
        return f"torchrun (process {self.parent} on {socket.gethostname()}) is gone; {START_AGAIN}"


@dataclass(frozen=True, slots=True)
class Launched:
    """What a launcher says of this process; `size_name` and `rank_name` are the variables in which it says so."""

    launcher: str
    rank_name: str
    size_name: str
    rank: int
    size: int
    local_rank: int | None = None
    num_local: int | None = None
    key: str = ""


def find_place(s: Settings, environ=os.environ) -> Place:
    """This process's place. Raises UserError where flags and launcher contradict each other, or something is missing."""
    launched = from_torchrun(environ)
    if launched is None and not environ.get("TORCHELASTIC_RUN_ID"):
        launched = from_mpi(environ)
    if launched is None:
        return place_of_flags(s)
    check_flags(s, launched)
    rank, size = launched.rank, launched.size
    local_rank = rank % s.gpus_per_node if launched.local_rank is None else launched.local_rank
    num_local = min(size, s.gpus_per_node) if launched.num_local is None else launched.num_local
    meeting = meeting_point(s, launched, environ)
    return Place(rank, size, local_rank, num_local, key=launched.key, **meeting)


def place_of_flags(s: Settings) -> Place:
    """The place that -pn and -pr name."""
    rank, size = s.process_rank, s.num_processes
    if rank >= size:
        only = "the only rank is 0; leave -pr out" if size == 1 else f"ranks go from 0 to {size - 1}; correct -pr or -pn"
        raise UserError(f"-pr {rank}: with {size} process{'es' if size > 1 else ''} {only}")
    if size == 1:
        return Place()
    if s.init_method == "mpi":
        raise UserError(f"-pn {size}: this process was started alone, and -pi mpi means that a launcher starts them all; {HOW_TO_START}")
    num_local = min(size, s.gpus_per_node)
    return Place(rank, size, rank % s.gpus_per_node, num_local, **(tcp_of_flags(s) if s.init_method == "tcp" else fs_of_flags(s)))


def check_flags(s: Settings, launched: Launched) -> None:
    """Raise UserError where -pn or -pr contradict the launcher. A flag left at its default contradicts nothing."""
    for flag, asked, default, name, found in (
        ("-pn", s.num_processes, 1, launched.size_name, launched.size),
        ("-pr", s.process_rank, 0, launched.rank_name, launched.rank),
    ):
        if asked not in (default, found):
            raise UserError(f"{flag} {asked}, but {launched.launcher} says {name}={found}; leave {flag} out, it is the launcher's to say")


def meeting_point(s: Settings, launched: Launched, environ) -> dict:
    """method, address, port, folder and parent of the Place of a launched process."""
    if launched.launcher == "torchrun" and environ.get("MASTER_ADDR"):
        found = tcp(environ["MASTER_ADDR"], master_port(environ), "MASTER_ADDR")
        agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return found | {"method": "agent", "parent": os.getppid()} if agent else found
    if s.init_method == "tcp":
        return tcp_of_flags(s)
    if s.init_method == "fs":
        return fs_of_flags(s)
    if environ.get("MASTER_ADDR"):
        return tcp(environ["MASTER_ADDR"], master_port(environ), "MASTER_ADDR")
    if s.server_ip:
        return tcp_of_flags(s)
    if launched.launcher == "srun":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
        if nodes:
            return tcp(first_host(nodes), slurm_port(launched.key), "the first machine of SLURM_STEP_NODELIST")
    if launched.num_local == launched.size:
        return {"method": "fs", "folder": tempfile.gettempdir()}
    raise UserError(
        f"{launched.launcher} started {launched.size} processes, and nothing says where rank 0 is; "
        "set MASTER_ADDR to its machine's name for all of them (mpirun -x MASTER_ADDR=NAME), or give -ps NAME"
    )


def tcp_of_flags(s: Settings) -> dict:
    if not s.server_ip:
        raise UserError("-pi tcp: there is no -ps; give the address of rank 0's machine to every process, such as -ps 10.0.0.1")
    return tcp(*split_address(s.server_ip), "-ps")


def fs_of_flags(s: Settings) -> dict:
    if not os.path.isdir(s.fs_path):
        raise UserError(f"-pp {s.fs_path}: no such folder; give one that all processes see, such as one in your home directory")
    return {"method": "fs", "folder": s.fs_path}


def tcp(address: str, port: int, named_by: str) -> dict:
    """address:port as parts of a Place. Raises UserError for a name that does not resolve."""
    try:
        socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise UserError(
            f"{named_by} is {address}, which is no address and no machine this one knows; give one that resolves on every machine"
        ) from None
    return {"method": "tcp", "address": address, "port": port}


def split_address(text: str) -> tuple[str, int]:
    """Host and port of HOST, HOST:PORT, [IPV6]:PORT or IPV6."""
    match = re.fullmatch(r"\[([^][]+)](?::(\d+))?|([^][:]+)(?::(\d+))?|([^][:]*:[^][]*:[^][]*)", text)
    port = int(match and (match[2] or match[4]) or DEFAULT_PORT)
    if match is None or not 0 < port < 65536:
        raise UserError(
            f"-ps (--server-ip) is {text!r}, but must be HOST or HOST:PORT with a port from 1 to 65535; for IPv6 with a port write [::1]:80"
        )
    return match[1] or match[3] or match[5], port


def master_port(environ) -> int:
    port = number(environ, "MASTER_PORT", DEFAULT_PORT)
    if not 0 < port < 65536:
        raise UserError(f"MASTER_PORT is {port}, but ports go from 1 to 65535; set another one")
    return port


# ----------------------------------------------------------------------------
# launchers


def from_torchrun(environ) -> Launched | None:
    """What torchrun, or whatever else sets the same variables, says; None if there is only one process."""
    found = of_variables("torchrun", environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return found and replace(found, key=environ.get("TORCHELASTIC_RUN_ID", ""))


def from_mpi(environ) -> Launched | None:
    """What mpirun or srun says; None if there is only one process.

    mpirun may itself use srun, whose variables then number mpirun's helper processes, so they are consulted last.
    """
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    if found := of_variables("mpirun", environ, *names):
        return replace(found, key=local_key(environ, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"))
    found, slurm = of_variables("mpirun", environ, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), from_slurm(environ)
    if found and slurm and (found.rank, found.size) == (slurm.rank, slurm.size):
        return slurm  # srun --mpi=pmi2 sets both
    return replace(found, key=local_key(environ, "PMI_JOBID", "PMIX_NAMESPACE")) if found else slurm


def from_slurm(environ) -> Launched | None:
    """What srun says to each task of a step. The batch script around it is one process, whatever its variables say, and so is what runs
    in a shell of srun --pty; but not what srun starts from there, which has that shell's variables too, and no terminal."""
    step = number(environ, "SLURM_STEP_ID", SLURM_NO_STEP)
    if step >= SLURM_NO_STEP or environ.get("SLURM_PTY_PORT") and os.isatty(0):
        return None
    found = of_variables("srun", environ, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", None)
    if found is None:
        return None
    one_machine = environ.get("SLURM_STEP_NUM_NODES") == "1"
    return replace(found, key=f"{number(environ, 'SLURM_JOB_ID', 0)}.{step}", num_local=found.size if one_machine else None)


def of_variables(launcher, environ, rank_name, size_name, local_name, num_local_name) -> Launched | None:
    """The Launched that the variables of these names describe; None where there is no second process."""
    size = number(environ, size_name, 1)
    if size <= 1:
        return None
    rank = number(environ, rank_name)
    if rank is None:
        raise UserError(
            f"{size_name} is {size} and {rank_name} is not set; set it to this process's number, or start them all with torchrun"
        )
    if rank >= size:
        raise UserError(f"{rank_name} is {rank}, but ranks go from 0 to {size - 1}, as {size_name} is {size}; correct one of them")
    num_local = number(environ, num_local_name) if num_local_name else None
    return Launched(launcher, rank_name, size_name, rank, size, number(environ, local_name), num_local)


def local_key(environ, *names) -> str:
    """A name for the job among those on this machine, for a file in the system's temporary folder; the user id is part of it."""
    job = next((environ[name] for name in names if environ.get(name)), "")
    return f"{os.getuid()}-{job}" if job else f"{os.getuid()}"


def number(environ, name: str, default: int | None = None) -> int | None:
    """The whole number in a variable, or `default` if it is not set."""
    text = environ.get(name)
    if not text:
        return default
    if not re.fullmatch(r"\d{1,18}", text):
        raise UserError(f"{name} is {text!r}, but whoever starts several processes sets it to a whole number; correct or unset it")
    return int(text)


def first_host(nodes: str) -> str:
    """The first machine of a list in Slurm's short form: name[01-04,07],other."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes)[0]  # up to a comma outside brackets
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)


def slurm_port(key: str) -> int:
    """A port that other steps and jobs on the same machine most likely do not use."""
    job, _, step = key.partition(".")
    return SLURM_PORTS[(17 * int(job) + int(step)) % len(SLURM_PORTS)]


def signpost_name(place: Place) -> str:
    """The name under which rank 0 says where it listens: another number of processes, or another job, has another one."""
    key = re.sub(r"[^\w.-]", "_", place.key)
    return "_".join(filter(None, ("llmc_rendezvous", str(place.num_processes), key))) + ".json"


def rendezvous_path(place: Place) -> Path:
    """The file by which the processes of -pi fs meet."""
    return Path(place.folder) / signpost_name(place)
