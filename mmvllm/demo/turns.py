"""Responses of an application that are made one at a time. Pure ASGI."""

import asyncio
from contextlib import ExitStack

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Turns:
    """Has an application begin one response at a time: some take it tens of milliseconds, in which nothing else runs.

    The next one waits for the beginning of a response, not for a client that reads it slowly. Clients that disconnect
    give up their place. `lock` is held until a response begins.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()

    async def respond(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request without a body, or whose body comes in one message."""
        messages = [await receive()]  # before the wait, which looks for the message after it
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
        """Acquire the lock; returns False if the client disconnects before that."""
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
