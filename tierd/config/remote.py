"""Memory that this node offers to others, and theirs that it reads."""

from __future__ import annotations

import urllib.parse
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tierd.config.listen import is_loopback
from tierd.config.section import Section

if TYPE_CHECKING:
    from tierd.config import ApiSection

PEERS_MAX = 4


class ExportsSection(Section):
    """Images that other nodes read from this node's memory (docs/operating/remote.md)."""

    images: list[str] = Field(
        default_factory=list,
        max_length=64,
        description="MODEL/TABLE, or patterns such as 'v41/*': each of them is loaded into memory "
        "and offered to peers. Empty: none.",
    )
    token_file: str = Field(
        "",
        description="File that holds the bearer token of peers, mode 0600. Whoever has it may "
        "read every export and nothing else.",
    )
    transport: Literal["auto", "verbs", "nixl"] = Field(
        "auto",
        description="How memory is offered: verbs (RDMA), nixl (NIXL, UCX over TCP), or auto: "
        "verbs, and NIXL where there are none.",
    )
    device: str = Field(
        "auto", description="RDMA device; auto: the first with an active port that can be used."
    )
    port: int = Field(0, ge=0, le=255, description="Its port; 0: the first that is active.")
    gid_index: int = Field(
        -1,
        ge=-1,
        le=255,
        description="GID of the port (RoCE); -1 ranks them: RoCE v2 and what a router forwards "
        "first.",
    )


class RemoteSection(Section):
    """Peers whose exports are read (docs/operating/remote.md)."""

    peers: list[str] = Field(
        default_factory=list,
        max_length=PEERS_MAX,
        description="REST addresses of peers, such as https://node2:9468.",
    )
    token_file: str = Field(
        "",
        description="File that holds the token that the peers' exports.token_file has, mode 0600.",
    )
    ca_file: str = Field(
        "",
        description="PEM file with the authority of the peers' certificates; empty: the system's.",
    )
    order: Literal["first", "last"] = Field(
        "first",
        description="Whether a table that lies here as well is read from peers first, or from "
        "them only when every device here fails.",
    )
    transport: Literal["auto", "verbs", "nixl"] = Field(
        "auto",
        description="How peers are read: as exports.transport. Both sides need the same.",
    )
    queue_pairs: int = Field(
        2, ge=1, le=16, description="Queue pairs of each pump to each peer (RDMA)."
    )
    timeout_us: int = Field(
        20_000,
        ge=100,
        le=10_000_000,
        description="A read that takes longer ends the connection, and the table's next tier is "
        "read.",
    )
    hold_ms: int = Field(
        5000,
        ge=0,
        le=60_000,
        description="How long reads of a table that lies nowhere else wait for its peer to come "
        "back, before they fail.",
    )
    device: str = Field(
        "auto", description="RDMA device; auto: the first with an active port that can be used."
    )
    port: int = Field(0, ge=0, le=255, description="Its port; 0: the first that is active.")
    gid_index: int = Field(-1, ge=-1, le=255, description="As exports.gid_index.")


def check_remote(exports: ExportsSection, remote: RemoteSection, api: ApiSection) -> None:
    """Refuse what could not be reached, or would let strangers in.

    Raises:
        ValueError: one line that names the keys.
    """
    if exports.images and not (exports.token_file and api.listen):
        raise ValueError(
            "exports.images needs api.listen, where peers ask, and exports.token_file, which says "
            "who may; run: (umask 077; openssl rand -hex 32 > /etc/tierd/exports.token)"
        )
    if remote.peers and not remote.token_file:
        raise ValueError(
            "remote.peers needs remote.token_file: a copy of the peers' exports.token_file"
        )
    for peer in remote.peers:
        _check_peer(peer)
        if remote.peers.count(peer) > 1:
            raise ValueError(f"remote.peers lists {peer} twice")


def _check_peer(peer: str) -> None:
    parts = urllib.parse.urlsplit(peer)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in {"http", "https"} or not parts.hostname or not port or parts.path:
        raise ValueError(f"remote.peers: {peer!r} is not an address such as https://node2:9468")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ValueError(
            f"remote.peers: {peer!r}: the token would cross the network in the clear; use https"
        )
