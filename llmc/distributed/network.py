"""This machine's addresses, and which of its network interfaces leads to another machine (Linux)."""

import fcntl
import ipaddress
import os
import socket
import struct
from contextlib import suppress

SIOCGIFADDR = 0x8915  # asks the kernel for an interface's IPv4 address


def this_machine() -> str:
    """A name for the machine or container whose addresses and process ids this process shares.

    Hosts may have the same name, and one host may run several containers.
    """
    parts = [socket.gethostname()]
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as f:
        parts.append(f.read().strip())
    for kind in ("net", "pid"):
        with suppress(OSError):
            parts.append(os.readlink(f"/proc/self/ns/{kind}"))
    return " ".join(parts)


def interface_addresses() -> dict[str, str]:
    """Address -> interface, those of the machine itself (lo) included. IPv4 first."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                reply = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[socket.inet_ntoa(reply[20:24])] = name
    with suppress(OSError), open("/proc/net/if_inet6") as f:
        for digits, _, _, scope, _, name in map(str.split, f):
            if scope == "00":  # global: link-local addresses mean nothing elsewhere
                found[str(ipaddress.ip_address(bytes.fromhex(digits)))] = name
    return found


def addresses_for_others() -> list[str]:
    """Where another machine may reach this one: its name, then every address but loopback ones."""
    return [socket.gethostname(), *filter(lambda address: not is_loopback(address), interface_addresses())]


def is_loopback(address: str) -> bool:
    """Whether a numeric address means the machine itself wherever it is used."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def own_address_towards(address: str) -> str:
    """The address of this machine that `address` would see. Nothing is sent. Raises OSError where there is no route."""
    family, kind, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]  # any port will do
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def host_name_address() -> str | None:
    """The address that this machine's name resolves to, if it is one of the machine's own: gloo listens there."""
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
        return address[0]
    return None


def interface_for_gloo(others: list[str], server: str) -> str | None:
    """The interface that gloo must be told to use, or None where this machine's name leads it to the right one.

    others  addresses of processes on other machines; empty if there is only one machine
    server  the address where this process reached the store

    On many systems the machine's own name resolves to a loopback address, where no other machine would find gloo.
    """
    listens_at = host_name_address()
    if listens_at and not (others and is_loopback(listens_at)):
        return None
    towards = next((address for address in others if not is_loopback(address)), server)
    with suppress(OSError):
        return interface_addresses().get(own_address_towards(towards))
    return None
