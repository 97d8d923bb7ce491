"""The listening socket: taken before any model is loaded, refused in public without a key, and if taken, by whom."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from quantkit.errors import PreflightError, RecipeError


def check_keys(keys: Sequence[str]) -> None:
    """RecipeError for a key that would guard nothing (empty) or that no header can bring (spaces around it)."""
    if any(not key or key != key.strip() for key in keys):
        raise RecipeError(
            "an API key is empty or has spaces around it",
            next="Check --api-key and QUANTKIT_API_KEY; leave out for none",
        )


def listen(host: str, port: int, *, keyless: bool, insecure: bool) -> socket.socket:
    """A listening socket on `host` and `port` (0: any free one).

    Raises:
        RecipeError: `host` is reachable from other machines, there is no key, and `insecure` was not said.
        PreflightError: the port is taken (by whom, where /proc tells) or the address is not this machine's.
    """
    family, address = _resolve(host, port)
    if keyless and not insecure and not ipaddress.ip_address(address[0].split("%")[0]).is_loopback:
        raise RecipeError(
            f"{host} is reachable from other machines and no API key is set",
            next="Give --api-key (or QUANTKIT_API_KEY), or --insecure if that is meant",
        )
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen(1024)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            owner = _owner(port)
            raise PreflightError(
                f"port {port} is taken" + (f" by {owner}" if owner else ""),
                where=host,
                next="Stop it or choose another port with --port",
            ) from None
        raise PreflightError(f"cannot listen on port {port} ({error.strerror})", where=host) from None
    listening.setblocking(False)
    return listening


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    if not 0 <= port < 65536:
        raise RecipeError(f"{port} is not a port", next="--port takes 0 to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError, OverflowError) as error:
        raise RecipeError(f"cannot listen on {host}:{port} ({error})", next="Check --host and --port") from None
    family, _, _, _, address = found[0]
    return family, address  # type: ignore[return-value]


def _owner(port: int) -> str:
    """`process NAME (pid N)` listening on `port`, as far as this user may see; empty otherwise."""
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(_link(entry) in inodes for entry in (process / "fd").iterdir()):
                return f"process {(process / 'comm').read_text().strip()} (pid {process.name})"
    return ""


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                listens = fields[3] == "0A"
                if listens and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(fields[9])
    return inodes


def _link(entry: Path) -> str:
    try:
        return os.readlink(entry)
    except OSError:
        return ""
