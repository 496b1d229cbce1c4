"""Hosts that send a byte now and then, and so never exceed the timeout of a socket."""

import socket
import ssl
import threading
from pathlib import Path

CERTIFICATE = Path(__file__).with_name("localhost.pem")  # with its key, for tests alone

HEAD = "HTTP/1.1 200 OK\r\n"
DRIPS = {  # what a host sends at once; then a byte now and then
    "a head": HEAD + "X: ",
    "a status line": "HTTP/1.1 200 ",
    "interim responses": "HTTP/1.1 100 Continue\r\n\r\n" * 3 + "HTTP/1.1 100 Continue\r\nX: ",
    "a body of unknown length": HEAD + "Connection: close\r\n\r\n",
    "a body of known length": HEAD + "Content-Length: 1000000\r\n\r\n",
    "a chunk": HEAD + "Transfer-Encoding: chunked\r\n\r\nffff\r\n",
    "the length of a chunk": HEAD + "Transfer-Encoding: chunked\r\n\r\n0000",
    "the end of a chunked body": HEAD + "Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: ",
    "nothing": "",
}


class Host:
    """A host that sends `first` on each connection, or the next of several, and then the same byte again and again.

    With `tls` it has the certificate of `CERTIFICATE`.
    """

    def __init__(self, first: str | list[str], byte: bytes = b"0", tls: bool = False):
        self._context = None
        if tls:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(CERTIFICATE)
        self._firsts, self._byte, self.is_over = [first] if isinstance(first, str) else first, byte, threading.Event()
        self.heads: list[str] = []  # of the requests
        self.num_open, self._lock = 0, threading.Lock()  # connections
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._drip, args=(connection,), daemon=True).start()

    def _drip(self, connection: socket.socket) -> None:
        if self._context is not None:
            connection = self._context.wrap_socket(connection, server_side=True)
        with connection:
            with self._lock:
                self.num_open += 1
            try:
                self.heads.append(connection.recv(4096).decode())
                connection.sendall(self._firsts[min(len(self.heads), len(self._firsts)) - 1].encode())
                while not self.is_over.wait(0.05):
                    connection.sendall(self._byte)
            except OSError:
                pass
            finally:
                with self._lock:
                    self.num_open -= 1

    def close(self) -> None:
        self.is_over.set()
        self._listener.close()
