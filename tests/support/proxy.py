"""A TCP proxy between a client and a server, in the test's own event loop, that breaks the network on demand.

Existing connections and new ones are told apart: `cut()` freezes both, `refuse()` and `blackhole()` are about new ones
only. Tests wait for what the proxy has seen with `until()`, and need no sleep.

Imports psycopg's DSN parser and the standard library. Listens on 127.0.0.1 alone.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Self

from psycopg.conninfo import conninfo_to_dict, make_conninfo

__all__ = ["Proxy"]

Side = Literal["client", "server", "both"]
CHUNK_BYTES = 64 * 1024
UNTIL_TIMEOUT_S = 10.0
BACKLOG = 128


class _Door(Enum):
    """What happens to a new connection."""

    OPEN = "dialled through"
    BLACKHOLE = "accepted and left in silence"
    SHUT = "refused"


@dataclass(eq=False, slots=True)
class _Link:
    """One connection of a client, and the one to the server that belongs to it, once dialled."""

    client: socket.socket
    server: socket.socket | None = None
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    moved: bool = False

    def sockets(self, side: Side) -> list[socket.socket]:
        both = {"client": self.client, "server": self.server}
        return [found for name, found in both.items() if found is not None and side in (name, "both")]


class Proxy:
    """Forwards 127.0.0.1:`port` to the target. Use as an async context manager.

    `delay_s` holds each chunk back for that long, in both directions. `accepted` counts connections so far,
    `bytes_to_server` and `bytes_to_client` what was forwarded. `overhear`, if given, gets each chunk to the server,
    before it is held back or forwarded.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener: socket.socket | None = None
        self._links: set[_Link] = set()
        self._door = _Door.OPEN
        self._changed = asyncio.Event()
        # Set while the network works. Cleared, every chunk and every end of stream waits here.
        self._flows = asyncio.Event()
        self._flows.set()
        self._door_opened = asyncio.Event()
        self._door_opened.set()
        self._swallow_replies = False
        self.port = 0
        self.delay_s = 0.0
        self.accepted = 0
        self.bytes_to_server = 0
        self.bytes_to_client = 0
        self.overhear: Callable[[bytes], None] | None = None

    @classmethod
    def to(cls, dsn: str) -> Self:
        """A proxy, not yet started, in front of the TCP server of this DSN."""
        parts = conninfo_to_dict(dsn)
        return cls(str(parts["host"]), int(str(parts["port"])))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Listens on a free port."""
        self._listen()

    async def close(self) -> None:
        """Ends every connection and frees the port."""
        self._shut()
        tasks = [task for link in self._links for task in link.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in list(self._links):
            self._drop(link)

    def dsn_for(self, dsn: str) -> str:
        """The same DSN, but through this proxy."""
        parts = {name: value for name, value in conninfo_to_dict(dsn).items() if name != "hostaddr"}
        return make_conninfo("", **{**parts, "host": "127.0.0.1", "port": self.port})

    @property
    def open(self) -> int:
        """How many clients are connected now."""
        return len(self._links)

    async def until(self, condition: Callable[["Proxy"], bool], timeout_s: float = UNTIL_TIMEOUT_S) -> None:
        """Waits until the condition holds; it is looked at whenever something has passed, come or gone."""
        async with asyncio.timeout(timeout_s):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()

    # -- faults ---------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """The cable is pulled: nothing passes in either direction, not even an end of stream, and nobody is told."""
        self._flows.clear()

    def heal(self) -> None:
        """Undoes every fault. What waited is delivered; what was swallowed stays lost."""
        self._flows.set()
        self._swallow_replies = False
        self.delay_s = 0.0
        self.allow()

    def drop_replies(self) -> None:
        """The client's bytes arrive, the server's replies are lost."""
        self._swallow_replies = True

    def reset(self, side: Side = "both") -> int:
        """Ends every connection by RST, and says how many there were."""
        links = list(self._links)
        for link in links:
            for task in link.tasks:
                task.cancel()
            for end in link.sockets(side):
                # Lingering for no time at all makes close() send RST in place of FIN.
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._drop(link)
        return len(links)

    async def move(self, server: socket.socket) -> None:
        """The server side of the only connection becomes this open one, and the client is not told.

        As a pooler or a proxy with a failover of its own does. The old server sees the end of its stream.
        """
        (link,) = self._links
        _, *pumps = link.tasks
        link.moved = True
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for end in link.sockets("server"):
            end.close()
        server.setblocking(False)
        link.server = server
        link.tasks.extend(self._pumps(link, server))

    def lead_to(self, dsn: str) -> None:
        """New connections go to the server of this DSN; existing ones stay where they are."""
        parts = conninfo_to_dict(dsn)
        self._target = (str(parts["host"]), int(str(parts["port"])))

    def half_close(self) -> int:
        """Ends the direction to the client by FIN and leaves the other one open; says for how many."""
        for link in self._links:
            with contextlib.suppress(OSError):
                link.client.shutdown(socket.SHUT_WR)
        return len(self._links)

    def refuse(self) -> None:
        """New connections are refused; existing ones go on."""
        self._door = _Door.SHUT
        self._door_opened.clear()
        self._shut()

    def blackhole(self) -> None:
        """New connections are accepted and hear nothing, as behind a firewall that drops; existing ones go on."""
        self.allow()
        self._door = _Door.BLACKHOLE
        self._door_opened.clear()

    def allow(self) -> None:
        """New connections are served again, those in the black hole too."""
        if self._door is _Door.SHUT:
            self._listen()
        self._door = _Door.OPEN
        self._door_opened.set()

    # -- forwarding -----------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        self._listener = listener
        # Not `sock_accept`: cancelled in the turn in which it has accepted, it would leave a socket that nobody closes.
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _shut(self) -> None:
        if self._listener is not None:
            # The loop must forget the descriptor before it is closed, or it takes a new socket of that number for it.
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the client has gone already
            return
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.accepted += 1
        link = _Link(client)
        self._links.add(link)
        link.tasks.append(asyncio.create_task(self._serve(link), name="proxy-serve"))
        self._changed.set()

    async def _serve(self, link: _Link) -> None:
        loop = asyncio.get_running_loop()
        await self._door_opened.wait()
        await self._flows.wait()
        server = socket.socket()
        server.setblocking(False)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.server = server
        try:
            await loop.sock_connect(server, self._target)
        except OSError:
            self._drop(link)
            return
        pumps = self._pumps(link, server)
        link.tasks.extend(pumps)
        # Ends when both directions have, so that a half-closed connection stays half open.
        await asyncio.wait(pumps)
        if not link.moved:
            self._drop(link)

    def _pumps(self, link: _Link, server: socket.socket) -> list[asyncio.Task[None]]:
        return [
            asyncio.create_task(self._pump(link.client, server, to_server=True), name="proxy-to-server"),
            asyncio.create_task(self._pump(server, link.client, to_server=False), name="proxy-to-client"),
        ]

    async def _pump(self, source: socket.socket, sink: socket.socket, *, to_server: bool) -> None:
        loop = asyncio.get_running_loop()
        try:
            while chunk := await loop.sock_recv(source, CHUNK_BYTES):
                if to_server and self.overhear is not None:
                    self.overhear(chunk)
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._flows.wait()
                if self._swallow_replies and not to_server:
                    continue
                # Counted before it is sent: whoever has received it must find it counted.
                if to_server:
                    self.bytes_to_server += len(chunk)
                else:
                    self.bytes_to_client += len(chunk)
                await loop.sock_sendall(sink, chunk)
                self._changed.set()
        except OSError:
            # One side reset the connection. The other one is told by the end of stream below.
            pass
        await self._flows.wait()
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def _drop(self, link: _Link) -> None:
        if link in self._links:
            self._links.discard(link)
            loop = asyncio.get_running_loop()
            for end in link.sockets("both"):
                with contextlib.suppress(OSError, ValueError):
                    loop.remove_reader(end)
                    loop.remove_writer(end)
                end.close()
            self._changed.set()
