"""The address that a server listens on."""

import argparse
import socket


def port(text: str) -> int:
    """Parse a port number, as an argparse type."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket, which refuses connections until the server listens; raise OSError if binding fails."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        message = f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port"
        raise OSError(message) from None
    return listener
