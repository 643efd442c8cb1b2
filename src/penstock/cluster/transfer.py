"""KV blocks from one replica's cache into another's, by their hashes, so that a prefix is copied instead of computed again.

The giver has the blocks, the taker wants them. On one machine the taker maps the giver's cache, a file in memory
(`memfd_create`, Linux). Between machines, and between containers that can't see each other's processes, blocks are sent over
TCP. Both sides prove that they know the cluster's secret, as front and replicas do.
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
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from penstock.cluster.messages import NONCE_BYTES, Source, prove
from penstock.engine.blocks import Blocks, Wanted
from penstock.engine.ports import BlockMemory
from penstock.kv.block_table import TOKEN_BYTES
from penstock.kv.exchange import Span
from penstock.types.request import Request

_log = logging.getLogger(__name__)
_Message = TypeVar("_Message")

GIVER, TAKER = b"giver", b"taker"
FETCH_S = 2.0
"""Time limit of a transfer, for which its request waits. Blocks that arrive later are computed instead."""
GIVE_S = 5.0
"""Longest time that a giver pins blocks for a taker."""
CONFIRM_S = 0.1
"""Time kept free at the end of a copy for the giver's `_Confirmed`."""
BACK_OFF_S = 30.0
"""Time for which a source is not tried again after it could not be reached or exceeded the time limit."""
MAX_GUESTS = 32
"""Most connections at once. Further ones are closed, and their replicas compute the blocks."""
MAX_STRANGER_BYTES = 1 << 10
"""Longest message while the other end has not proven that it knows the secret."""
MAX_BYTES = 1 << 26
"""Longest message: the hashes of a million tokens have 1 MB, or 16 with blocks of one token."""
ACCEPT_AGAIN_S = 0.1
_LENGTH = struct.Struct("<I")


class _Greeting(msgspec.Struct, array_like=True, frozen=True):
    nonce: bytes


class _Answer(msgspec.Struct, array_like=True, frozen=True):
    proof: bytes
    nonce: bytes


class _Request(msgspec.Struct, array_like=True, frozen=True):
    span: Span
    request_id: str
    """The request that moves here, if the span can end in its incomplete last block. It may still run at the giver."""


class _Place(msgspec.Struct, array_like=True, frozen=True):
    """The giver's memfd with all of its blocks, block 0 first, which a taker on the same machine can map."""

    pid: int
    fd: int
    name: str
    """Target of the link at `path`. It is random, so a different target means that `pid` is another process here."""

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


class _Giver(msgspec.Struct, array_like=True, frozen=True):
    proof: bytes


class _Offer(msgspec.Struct, array_like=True, frozen=True):
    block_ids: list[int]
    block_bytes: int
    place: _Place | None


class _Taken(msgspec.Struct, array_like=True, frozen=True):
    num_sent: int
    """Blocks that the giver should send, or 0 if the taker has copied them from the memfd."""


class _Confirmed(msgspec.Struct, array_like=True, frozen=True):
    is_sound: bool
    """The giver's engine ran during the whole copy, so the copied blocks are valid."""


class _Late(OSError):
    """Error for a transfer that has exceeded its time, or could not connect."""


class _Peer:
    """A connection with a deadline. Methods raise `_Late` after it, another OSError for a broken connection, and MsgspecError
    for an unexpected message."""

    def __init__(self, connection: socket.socket, end_s: float) -> None:
        self._connection, self.end_s = connection, end_s
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: msgspec.Struct) -> None:
        data = msgspec.msgpack.encode(message)
        self.send_bytes(_LENGTH.pack(len(data)) + data)

    def send_bytes(self, data: bytes | memoryview) -> None:
        self._connection.settimeout(self._left_s())
        try:
            self._connection.sendall(data)
        except TimeoutError:
            raise _Late from None

    def receive(self, kind: type[_Message], max_bytes: int = MAX_BYTES) -> _Message:
        head = bytearray(_LENGTH.size)
        self.read_into(memoryview(head))
        (length,) = _LENGTH.unpack(head)
        if length > max_bytes:
            raise ConnectionError(f"a message of {length} bytes is too large")
        data = bytearray(length)
        self.read_into(memoryview(data))
        return msgspec.msgpack.decode(data, type=kind)

    def read_into(self, target: memoryview) -> None:
        while target:
            self._connection.settimeout(self._left_s())
            try:
                num_read = self._connection.recv_into(target)
            except TimeoutError:
                raise _Late from None
            if not num_read:
                raise ConnectionError("the connection was closed")
            target = target[num_read:]

    def _left_s(self) -> float:
        left_s = self.end_s - time.monotonic()
        if left_s <= 0:
            raise _Late
        return left_s


class BlockServer:
    """Sends KV blocks to other replicas. One thread listens, and each connection has its own."""

    def __init__(self, blocks: Callable[[], Blocks | None], host: str, secret: bytes) -> None:
        """`blocks` returns the current engine's blocks. Raises OSError if it can't listen at `host`."""
        self._blocks, self._secret = blocks, secret
        self._guests = threading.Semaphore(MAX_GUESTS)
        self._is_closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, name="penstock-blocks", daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def _listen(self) -> None:
        while not self._is_closed:
            try:
                guest, _ = self._listener.accept()
            except OSError as error:
                if not self._is_closed:  # such as too many open files
                    _log.warning("a transfer of KV blocks could not begin: %s", error)
                    time.sleep(ACCEPT_AGAIN_S)
                continue
            if self._guests.acquire(blocking=False):
                try:
                    threading.Thread(target=self._serve, args=(guest,), name="penstock-blocks", daemon=True).start()
                except RuntimeError as error:  # no more threads
                    _log.warning("a transfer of KV blocks could not begin: %s", error)
                    guest.close()
                    self._guests.release()
            else:
                guest.close()

    def _serve(self, guest: socket.socket) -> None:
        try:
            with guest:
                self._give(_Peer(guest, time.monotonic() + GIVE_S))
        except (OSError, msgspec.MsgspecError) as error:  # the receiver recomputes missing blocks
            _log.debug("a transfer of KV blocks has ended early: %s", error)
        except Exception:
            _log.exception("KV blocks could not be given")
        finally:
            self._guests.release()

    def _give(self, guest: _Peer) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        guest.send(_Greeting(nonce))
        answer = guest.receive(_Answer, MAX_STRANGER_BYTES)
        if not hmac.compare_digest(answer.proof, prove(self._secret, TAKER, nonce)):
            _log.warning("somebody who does not know the cluster's secret asked for KV blocks")
            return
        guest.send(_Giver(prove(self._secret, GIVER, answer.nonce)))
        request, blocks = guest.receive(_Request), self._blocks()
        memory = None if blocks is None else blocks.memory
        if blocks is None or memory is None:
            guest.send(_Offer([], 0, None))
            return
        block_ids = blocks.offer(request.span, request.request_id)
        try:
            fd = memory.fd
            place = None if fd is None else _Place(os.getpid(), fd, _name_of(f"/proc/self/fd/{fd}"))
            guest.send(_Offer(block_ids, memory.block_bytes, place))
            for block_id in block_ids[: guest.receive(_Taken).num_sent]:
                guest.send_bytes(memory.content(block_id))
            is_sound = blocks.memory is memory
        finally:
            blocks.release(block_ids)
        guest.send(_Confirmed(is_sound))


class Fetcher:
    """Copies KV blocks from other replicas, unless computing them is faster."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._ns_per_block = 0.0
        """Running mean of the transfer time of a block; 0 before the first transfer."""
        self._retry_after_s: dict[tuple[str, int], float] = {}
        """Address of a source that raised `_Late` -> when to try it again."""
        self._under_way: dict[bytes, threading.Event] = {}
        """First missing block of each transfer -> set at its end. Prompts that lack the same blocks have the same first one, so
        no block comes twice."""
        self._maps = _Maps()

    def forget_closed(self) -> None:
        """Unmap the memory of local replicas that have ended. Call this about once a second."""
        self._maps.forget_closed()

    def fetch(self, blocks: Blocks, request: Request, source: Source, end_s: float | None = None) -> int:
        """Copy another replica's cached KV of a prompt into this cache. Returns how many tokens were copied. Never raises.

        `end_s`: the deadline by `time.monotonic`, by default `FETCH_S` from now. The engine's bookkeeping may exceed it.
        """
        address, began_s = (source.host, source.port), time.monotonic()
        end_s = began_s + FETCH_S if end_s is None else end_s
        is_backing_off = began_s < self._retry_after_s.get(address, 0.0)
        if blocks.memory is None or began_s > end_s or is_backing_off or not self._is_cheap(blocks):
            return 0
        try:
            wanted = blocks.want(request, source.num_tokens, has_tail=source.has_request)
            if not wanted.missing.num_blocks:
                return 0
            missing, has_ended = wanted.missing, threading.Event()
            first = missing.hashes[0] if missing.hashes else missing.parent + missing.tail
            if (earlier := self._under_way.setdefault(first, has_ended)) is not has_ended:
                earlier.wait(end_s - time.monotonic())
                return self.fetch(blocks, request, source, end_s)  # what is still missing
            try:
                with self._connect(address, end_s) as connection:
                    request_id = request.request_id if source.has_request else ""
                    num_filled = self._take(blocks, wanted, _Peer(connection, end_s), request_id)
            except _Late:
                if end_s - began_s > FETCH_S / 2:  # else an earlier wait took the time
                    self._back_off(address)  # now: requests that wait for this transfer would try the same source
                raise
            finally:
                del self._under_way[first]
                has_ended.set()
        except Exception as error:  # the request is computed without the copy
            _log.warning("KV blocks can't be had from %s:%d, and are computed: %r", *address, error)
            return 0
        if num_filled:
            self._learn(1e9 * (time.monotonic() - began_s) / num_filled)
        filled = missing.first(num_filled)
        return len(filled.hashes) * blocks.block_size + len(filled.tail) // TOKEN_BYTES

    def _connect(self, address: tuple[str, int], end_s: float) -> socket.socket:
        try:
            return socket.create_connection(address, timeout=max(0.001, end_s - time.monotonic()))
        except OSError as error:
            raise _Late(str(error)) from error

    def _back_off(self, address: tuple[str, int]) -> None:
        now_s = time.monotonic()
        self._retry_after_s = {one: at_s for one, at_s in self._retry_after_s.items() if at_s > now_s}
        self._retry_after_s[address] = now_s + BACK_OFF_S

    def _is_cheap(self, blocks: Blocks) -> bool:
        compute_ns_per_block = blocks.compute_ns_per_block
        if compute_ns_per_block and self._ns_per_block > compute_ns_per_block:
            self._ns_per_block *= 0.98  # so that transfers are eventually retried
            return False
        return True

    def _learn(self, ns_per_block: float) -> None:
        before = self._ns_per_block or ns_per_block
        self._ns_per_block = 0.875 * before + 0.125 * ns_per_block

    def _take(self, blocks: Blocks, wanted: Wanted, giver: _Peer, request_id: str) -> int:
        """Request the missing blocks, and cache those received. Returns how many of the missing ones are now cached."""
        nonce, own = giver.receive(_Greeting, MAX_STRANGER_BYTES).nonce, secrets.token_bytes(NONCE_BYTES)
        giver.send(_Answer(prove(self._secret, TAKER, nonce), own))
        if not hmac.compare_digest(giver.receive(_Giver, MAX_STRANGER_BYTES).proof, prove(self._secret, GIVER, own)):
            raise ValueError("it does not know the cluster's secret")
        giver.send(_Request(replace(wanted.missing, contents=()), request_id))
        offer = giver.receive(_Offer)
        memory = blocks.memory
        if not offer.block_ids or memory is None:
            return 0
        if offer.block_bytes != memory.block_bytes:
            raise ValueError(f"its blocks have {offer.block_bytes} bytes, and these {memory.block_bytes}")
        room = blocks.make_room(wanted, len(offer.block_ids))
        num_filled = 0
        try:
            skipped = len(room.found) - wanted.num_found  # computed by other requests meanwhile; below 0: evicted
            if skipped >= 0:
                num_filled = self._fill(memory, room.block_ids, giver, offer, skipped)
        finally:
            blocks.publish(room, wanted, num_filled)
        return skipped + num_filled if num_filled else 0

    def _fill(self, memory: BlockMemory, block_ids: Sequence[int], giver: _Peer, offer: _Offer, skipped: int) -> int:
        """Fill blocks in order until the time is up. Return how many are filled. The offer's first `skipped` are not needed."""
        sources = offer.block_ids[skipped : skipped + len(block_ids)]
        file = None if offer.place is None else self._maps.find(offer.place)
        if file is not None:
            num_copied = _copy(file, sources, memory, block_ids, giver.end_s - CONFIRM_S)
            giver.send(_Taken(0))
            return num_copied if giver.receive(_Confirmed).is_sound else 0
        giver.send(_Taken(skipped + len(sources)))
        num_filled = 0
        unwanted = memoryview(bytearray(memory.block_bytes))
        with suppress(_Late):  # earlier blocks are complete
            for _ in range(skipped):
                giver.read_into(unwanted)
            for block_id, _ in zip(block_ids, sources, strict=False):
                giver.read_into(memory.target(block_id))
                memory.fill(block_id)
                num_filled += 1
        return num_filled


class _Maps:
    """Other replicas' memfds, mapped into this process. They stay mapped, because the first read of a page takes three times as
    long as later ones."""

    def __init__(self) -> None:
        self._maps: dict[_Place, memoryview] = {}

    def find(self, place: _Place) -> memoryview | None:
        """Return the content of a memfd, or None if it can't be mapped: another machine or container, or no permission."""
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
        """Unmap the memfds of processes that have ended."""
        for place in list(self._maps):
            if not place.is_here():
                self._maps.pop(place, None)


def _copy(file: memoryview, sources: Sequence[int], memory: BlockMemory, targets: Sequence[int], end_s: float) -> int:
    """Copy blocks until the time is up, and return how many."""
    size, num_copied = memory.block_bytes, 0
    for source, target in zip(sources, targets, strict=False):
        if time.monotonic() > end_s:
            break
        there = np.frombuffer(file, np.uint8, size, source * size)
        np.copyto(np.frombuffer(memory.target(target), np.uint8), there)  # NumPy releases the GIL, for the engine's thread
        memory.fill(target)
        num_copied += 1
    return num_copied
