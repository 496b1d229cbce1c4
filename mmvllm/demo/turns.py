"""Begins an application's responses one at a time (pure ASGI)."""

import asyncio
from contextlib import ExitStack

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Turns:
    """Lets an application begin one response at a time, since some block the event loop for tens of milliseconds.

    A request waits until the previous response begins, not until a slow client has read it. A client that disconnects
    leaves the queue. `lock` is held until a response begins.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()

    async def respond(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request without a body, or with a body in one message."""
        messages = [await receive()]  # read first: `_wait` discards messages until a disconnect
        if messages[0]["type"] == "http.disconnect" or not await self._wait(receive):
            return

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        with ExitStack() as turn:
            turn.callback(self.lock.release)

            async def send_and_release(message: Message) -> None:
                turn.close()
                await send(message)

            await app(scope, replay, send_and_release)

    async def _wait(self, receive: Receive) -> bool:
        """Acquire the lock; return False if the client disconnects first."""
        if not self.lock.locked():
            return await self.lock.acquire()  # at once
        acquiring = asyncio.create_task(self.lock.acquire())
        leaving = asyncio.create_task(_until_disconnected(receive))
        has_turn = False
        try:
            await asyncio.wait((acquiring, leaving), return_when=asyncio.FIRST_COMPLETED)
            has_turn = acquiring.done() and not leaving.done()
        finally:
            acquiring.cancel()
            leaving.cancel()
            await asyncio.gather(acquiring, leaving, return_exceptions=True)
            if not has_turn and not acquiring.cancelled():  # acquired at the last moment
                self.lock.release()
        return has_turn


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
