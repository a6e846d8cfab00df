"""Sessions of a `NixlEngine`: "nixl:", its agent's name, a digest of the agent's metadata, the metadata in base64."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import re

from ..errors import shown
from . import nixl_metadata
from .nixl_metadata import Metadata

_LONGEST = 16 << 20  # characters; 500 regions take about 60,000 over TCP
_LONG = 1 << 17  # characters; of longer sessions few are kept
_FORM = re.compile(r"nixl:([\w.-]{1,64}):([0-9a-f]{32}):([\w+/]*={0,2})", re.ASCII)


def session_of(name: str, metadata: bytes) -> str:
    return f"nixl:{name}:{_digest(metadata)}:{base64.b64encode(metadata).decode()}"


def _digest(metadata: bytes) -> str:
    return hashlib.sha256(metadata).hexdigest()[:32]


def alias_of(session: str) -> str:
    """What NIXL calls the peer: name and digest, so that two sessions never share anything within NIXL."""
    return ":".join(session.split(":", 3)[1:3])


def name_of(session: str) -> str:
    """The agent's name, for messages; at most 64 characters."""
    return (session.split(":", 2)[1] if session.startswith("nixl:") else session)[:64]


def parse(session: str, backend: str) -> Metadata:
    """The metadata that a session holds.

    Raises:
        ValueError: it is no session, not whole, of another back end, or its metadata is not what NIXL writes.
    """
    if len(session) > _LONGEST:
        raise ValueError(f"a NIXL session of {len(session)} characters; at most {_LONGEST} are taken from a peer")
    return (_parse_short if len(session) <= _LONG else _parse_long)(session, backend)


def _parse(session: str, backend: str) -> Metadata:
    match = _FORM.fullmatch(session)
    if not match:
        raise ValueError(f"{shown(session)} is no session of a NixlEngine")
    name, digest, text = match.groups()
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the session of NIXL agent {name} is damaged: {error}") from None
    if _digest(data) != digest:
        raise ValueError(f"the session of NIXL agent {name} is damaged: its metadata is not what was sent")
    try:
        metadata = nixl_metadata.parse(data, backend)
    except ValueError as error:
        raise ValueError(f"the session of NIXL agent {name} is refused: {error}") from None
    if metadata.name != name:
        raise ValueError(f"the session of NIXL agent {name} holds the metadata of {shown(metadata.name)}")
    return metadata


# A session comes with every plan, and is read once.
_parse_short, _parse_long = functools.lru_cache(256)(_parse), functools.lru_cache(4)(_parse)
