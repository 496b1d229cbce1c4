"""What the applications of the server and of the page share."""

from starlette.types import Message, Send

PIECE_BYTES = 64 * 1024


def in_pieces(send: Send) -> Send:
    """Send long bodies piece by piece, each once the client has read enough of the one before.

    uvicorn copies what a client has not read of a message, and the request, with what it reserves, would end before it
    is read.
    """

    async def send_pieces(message: Message) -> None:
        body, at = message.get("body", b""), 0
        while len(body) - at > PIECE_BYTES:
            await send({"type": message["type"], "body": body[at : at + PIECE_BYTES], "more_body": True})
            at += PIECE_BYTES
        await send(message | {"body": body[at:]} if at else message)

    return send_pieces
