"""KV blocks from one replica's cache into another's, by their hashes, so that a prefix is copied instead of computed again.

On one machine the taker copies them out of the giver's cache, which lies in a file in memory (`memfd_create`, Linux). They come
over TCP otherwise, or if containers do not see each other's processes. Giver and taker prove to each other that they know the
cluster's secret, as front and replicas do.
"""

from __future__ import annotations

import hmac
import logging
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.cluster.messages import NONCE_BYTES, Source, prove
from penstock.engine.blocks import Blocks, Vacancy
from penstock.engine.ports import BlockMemory
from penstock.types.request import Request

_log = logging.getLogger(__name__)
_Message = TypeVar("_Message")

GIVER, TAKER = b"giver", b"taker"
FETCH_S = 2.0
"""Longest time of a transfer, for its request waits. The rest is computed."""
GIVER_TIMEOUT_S = 5.0
MAX_GUESTS = 32
"""Connections at one time. Others are closed, and those replicas compute."""
MAX_MESSAGE_BYTES = 1 << 20
"""The hashes of a million tokens."""
_LENGTH = struct.Struct("<I")


class _Greeting(msgspec.Struct, array_like=True, frozen=True):
    nonce: bytes


class _Wanted(msgspec.Struct, array_like=True, frozen=True):
    proof: bytes
    nonce: bytes
    hashes: list[bytes]


class _Place(msgspec.Struct, array_like=True, frozen=True):
    """A file in memory with all blocks of the giver, block 0 first, for a taker on the same machine."""

    pid: int
    fd: int
    name: str
    """The file's name in Linux, which is random: a taker that finds another one there looks at another process."""

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.fd}"

    def is_here(self) -> bool:
        try:
            return _name_of(self.path) == self.name
        except OSError:
            return False


def _name_of(path: str) -> str:
    return str(Path(path).readlink())


class _Offer(msgspec.Struct, array_like=True, frozen=True):
    proof: bytes
    block_ids: list[int]
    block_bytes: int
    place: _Place | None


class _Taken(msgspec.Struct, array_like=True, frozen=True):
    is_copied: bool
    """The taker has copied all. Otherwise the giver sends them."""


class _Confirmed(msgspec.Struct, array_like=True, frozen=True):
    is_sound: bool
    """The blocks were there the whole time."""


class BlockServer:
    """Gives blocks to other replicas. One thread listens, and each connection has its own."""

    def __init__(self, blocks: Callable[[], Blocks | None], host: str, secret: bytes) -> None:
        """`blocks` returns those of the engine that runs now. Raises OSError if it can't listen at this address."""
        self._blocks, self._secret = blocks, secret
        self._guests = threading.Semaphore(MAX_GUESTS)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, name="penstock-blocks", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                guest, _ = self._listener.accept()
            except OSError:  # it was closed
                return
            if self._guests.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(guest,), name="penstock-blocks", daemon=True).start()
            else:
                guest.close()

    def _serve(self, guest: socket.socket) -> None:
        try:
            with guest:
                guest.settimeout(GIVER_TIMEOUT_S)
                guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._give(guest)
        except (OSError, msgspec.MsgspecError) as error:  # the taker computes what it lacks
            _log.debug("a transfer of KV blocks has ended early: %s", error)
        except Exception:
            _log.exception("KV blocks could not be given")
        finally:
            self._guests.release()

    def _give(self, guest: socket.socket) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        _send(guest, _Greeting(nonce))
        wanted = _receive(guest, _Wanted)
        if not hmac.compare_digest(wanted.proof, prove(self._secret, TAKER, nonce)):
            _log.warning("somebody who does not know the cluster's secret asked for KV blocks")
            return
        blocks = self._blocks()
        memory = None if blocks is None else blocks.memory
        proof = prove(self._secret, GIVER, wanted.nonce)
        if blocks is None or memory is None:
            _send(guest, _Offer(proof, [], 0, None))
            return
        block_ids = blocks.offer(wanted.hashes)
        try:
            fd = memory.fd
            place = None if fd is None else _Place(os.getpid(), fd, _name_of(f"/proc/self/fd/{fd}"))
            _send(guest, _Offer(proof, block_ids, memory.block_bytes, place))
            taken = _receive(guest, _Taken)
            if not taken.is_copied:
                for block_id in block_ids:
                    guest.sendall(memory.content(block_id))
            is_sound = blocks.memory is memory
        finally:
            blocks.release(block_ids)
        if taken.is_copied:
            _send(guest, _Confirmed(is_sound))


class Fetcher:
    """Takes blocks from other replicas, where that is faster than to compute them."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._ns_per_block = 0.0
        """Running mean of the time that a block took. 0: none has come yet."""
        self._has_warned = False
        self._maps = _Maps()

    def forget_closed(self) -> None:
        """Give back the memory of replicas on this machine that have ended. Call it every second or so."""
        self._maps.forget_closed()

    def fetch(self, blocks: Blocks, request: Request, source: Source) -> int:
        """Bring what another replica holds of a prompt into this one's cache. Returns how many tokens have come. Never raises.

        Takes up to `FETCH_S`.
        """
        if not self._is_cheap(blocks.compute_ns_per_block):
            return 0
        began_ns, num_filled = time.monotonic_ns(), 0
        try:
            vacancy = blocks.make_room(request, source.num_tokens)
            if vacancy is None:
                return 0
            try:
                if vacancy.room.block_ids:
                    num_filled = self._fill(vacancy, source, time.monotonic() + FETCH_S)
            finally:
                vacancy.publish(num_filled)
        except Exception as error:  # whatever it is, the request goes on
            if not self._has_warned:
                _log.warning("KV blocks can't be had from %s:%d, and are computed: %r", source.host, source.port, error)
            self._has_warned = True
            num_filled = 0
        if num_filled:
            self._learn((time.monotonic_ns() - began_ns) / num_filled)
        return num_filled * blocks.block_size

    def _is_cheap(self, compute_ns_per_block: float) -> bool:
        if compute_ns_per_block and self._ns_per_block > compute_ns_per_block:
            self._ns_per_block *= 0.98  # so that it is tried again some day
            return False
        return True

    def _learn(self, ns_per_block: float) -> None:
        before = self._ns_per_block or ns_per_block
        self._ns_per_block = 0.875 * before + 0.125 * ns_per_block

    def _fill(self, vacancy: Vacancy, source: Source, end_s: float) -> int:
        """Fill blocks from their first on. Returns how many are filled."""
        memory, block_ids = vacancy.memory, vacancy.room.block_ids
        with socket.create_connection((source.host, source.port), timeout=FETCH_S) as giver:
            giver.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce, own = _receive(giver, _Greeting).nonce, secrets.token_bytes(NONCE_BYTES)
            _send(giver, _Wanted(prove(self._secret, TAKER, nonce), own, list(vacancy.hashes[: len(block_ids)])))
            offer = _receive(giver, _Offer)
            if not hmac.compare_digest(offer.proof, prove(self._secret, GIVER, own)):
                raise ValueError("it does not know the cluster's secret")
            block_ids = block_ids[: len(offer.block_ids)]
            if not block_ids:
                return 0
            if offer.block_bytes != memory.block_bytes:
                raise ValueError(f"its blocks have {offer.block_bytes} bytes, and these {memory.block_bytes}")
            if offer.place is not None and (file := self._maps.find(offer.place)) is not None:
                num_copied = _copy(file, offer.block_ids, memory, block_ids, end_s)
                _send(giver, _Taken(is_copied=True))
                return num_copied if _receive(giver, _Confirmed).is_sound else 0
            _send(giver, _Taken(is_copied=False))
            for count, block_id in enumerate(block_ids):
                target = memory.target(block_id)
                while target and (left_s := end_s - time.monotonic()) > 0:
                    giver.settimeout(left_s)
                    target = target[_read_into(giver, target) :]
                if target:
                    return count
                memory.fill(block_id)
            return len(block_ids)


def _send(peer: socket.socket, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    peer.sendall(_LENGTH.pack(len(data)) + data)


def _receive(peer: socket.socket, kind: type[_Message]) -> _Message:
    """Return the next message. Raises OSError if the connection ends or the time is up, MsgspecError for another message."""
    (length,) = _LENGTH.unpack(_read(peer, _LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        raise ConnectionError(f"a message of {length} bytes is too large")
    return msgspec.msgpack.decode(_read(peer, length), type=kind)


def _read(peer: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    left = memoryview(data)
    while left:
        left = left[_read_into(peer, left) :]
    return data


def _read_into(peer: socket.socket, target: memoryview) -> int:
    num_read = peer.recv_into(target)
    if not num_read:
        raise ConnectionError("the connection was closed")
    return num_read


class _Maps:
    """Other replicas' files of blocks, as this process's memory. They stay, since the first read of a page takes three times as
    long as the next."""

    def __init__(self) -> None:
        self._maps: dict[_Place, memoryview] = {}

    def find(self, place: _Place) -> memoryview | None:
        """Return a file's content, or None if it is on another machine or in another container, or the system forbids it."""
        found = self._maps.get(place)
        if found is None and place.is_here():
            with suppress(OSError):
                fd = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    found = memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
                finally:
                    os.close(fd)
                self._maps[place] = found
        return found

    def forget_closed(self) -> None:
        """Give back the memory of files that their owners have closed."""
        for place in list(self._maps):
            if not place.is_here():
                self._maps.pop(place, None)


def _copy(file: memoryview, sources: Sequence[int], memory: BlockMemory, targets: Sequence[int], end_s: float) -> int:
    """Copy blocks until the time is up. Returns how many."""
    size = memory.block_bytes
    for count, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if time.monotonic() > end_s:
            return count
        memory.target(target)[:] = file[source * size : (source + 1) * size]
        memory.fill(target)
    return len(targets)
