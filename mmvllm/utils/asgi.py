"""ASGI helpers that the server and the demo page share."""

from starlette.types import Message, Send

PIECE_BYTES = 64 * 1024


def in_pieces(send: Send) -> Send:
    """Wrap `send` to split long bodies: each piece is sent once the client has read enough of the previous one.

    uvicorn would otherwise copy the unread rest of a message. The request would then end, and release its reservations,
    before the client has read the response.
    """

    async def send_pieces(message: Message) -> None:
        body, at = message.get("body", b""), 0
        while len(body) - at > PIECE_BYTES:
            await send({"type": message["type"], "body": body[at : at + PIECE_BYTES], "more_body": True})
            at += PIECE_BYTES
        await send(message | {"body": body[at:]} if at else message)

    return send_pieces
