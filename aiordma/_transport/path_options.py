"""The options of `Config` for the queue pair and its path, and which way of connecting has them."""

from __future__ import annotations

from .. import verbs
from ..cm.address import Address
from ..config import Config
from .arguments import check_config

# The connection manager takes these from the route, and has no call that sets them.
NOT_BY_CM = {
    "path_mtu": "the route gives it",
    "gid_index": "give a source address, source=",
    "pkey": "the network interface of the address gives it",
    "hop_limit": "the route gives it",
    "service_level": "the route gives it",
}


def check_options(via: str, config: Config) -> None:
    """TypeError for no Config, ValueError for options that this way of connecting cannot apply."""
    check_config(config)
    if via != "cm":
        return
    for name, instead in NOT_BY_CM.items():
        if getattr(config, name) is not None:
            raise ValueError(
                f'the connection manager does not take Config.{name}: {instead}; via="tcp" takes it'
            )


def local_gid(context: verbs.Context, config: Config, address: Address | None) -> verbs.GIDEntry:
    """The entry of `Config.gid_index`; that of `address`; or the best one if there is none of it.

    VerbsError (ENODATA) for an index without an entry.
    """
    host = address[0].partition("%")[0] if address else ""
    try:
        entry = context.find_gid(host) if host else context.choose_gid()
    except ValueError:
        entry = context.choose_gid()
    if config.gid_index is None:
        return entry
    return context.query_gid(config.gid_index, entry.port_num)


def pkey_index(context: verbs.Context, config: Config, port_num: int) -> int:
    """The index of `Config.pkey`.  ValueError, which lists the port's, if it is none of them."""
    return 0 if config.pkey is None else context.find_pkey(config.pkey, port_num)


def mtu_code(size: int) -> int:
    """`enum ibv_mtu` of a number of bytes."""
    return (size // 128).bit_length() - 1
