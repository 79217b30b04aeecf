"""An operator's side of the controller's port: authenticated requests, JSON answers; blocking.

Decides nothing; used by the command line and by the supervisor, which need no event loop for it.
"""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlencode

import msgspec

from trainmover.edges.seal import derive, is_equal, new_nonce, proof
from trainmover.errors import AuthenticationFailed, RemoteProtocolError, TransportError
from trainmover.protocol import handshake
from trainmover.protocol.messages import FromOperatorMessage, OperatorReply

TIMEOUT_S = 40.0
"""Longer than the controller lets a request wait."""


class OperatorClient:
    """One session with the controller at `host`:`port`; opened on first use and after a restart."""

    def __init__(self, host: str, port: int, token: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._host = host
        self._port = port
        self._token = token
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None
        self._session = ""
        self._key = b""
        self._counter = 0

    def get(self, path: str, **query: str | int | float) -> Any:
        """JSON of a view. Raises TransportError when the controller does not answer."""
        target = f"{handshake.OPERATOR_PATH}/{path}"
        if query:
            target += "?" + urlencode(query)
        return json.loads(self._exchange("GET", target, b""))

    def request(self, message: FromOperatorMessage) -> OperatorReply:
        """First reply to a request: accepted or refused."""
        target = f"{handshake.OPERATOR_PATH}/requests"
        return self._reply(self._exchange("POST", target, msgspec.json.encode(message)))

    def final_reply(self, request: str, timeout_s: float) -> OperatorReply | None:
        """The reply that ends `request`; None if not within `timeout_s` (at most 30)."""
        target = f"{handshake.OPERATOR_PATH}/replies/{request}?wait_s={min(timeout_s, 30.0)}"
        answer = self._exchange("GET", target, b"")
        return None if answer == b"null" else self._reply(answer)

    def close(self) -> None:
        """Give the connection back."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _reply(self, data: bytes) -> OperatorReply:
        try:
            return msgspec.json.decode(data, type=OperatorReply)
        except msgspec.DecodeError as error:
            raise RemoteProtocolError(f"expected a reply of the controller: {error}") from error

    def _exchange(self, method: str, target: str, body: bytes) -> bytes:
        try:
            if not self._session:
                self._open_session()
            status, answer = self._send(method, target, body)
            if status == 401:
                # The controller may have been restarted since: its sessions are gone.
                self._open_session()
                status, answer = self._send(method, target, body)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            self._session = ""
            raise TransportError(
                f"the controller at {self._host}:{self._port} does not answer: {error}"
            ) from error
        if status == 401:
            raise AuthenticationFailed(
                f"the controller at {self._host}:{self._port} refuses the token"
            )
        if status != 200:
            raise RemoteProtocolError(f"{method} {target}: {answer.decode('utf-8', 'replace')}")
        return answer

    def _connected(self) -> http.client.HTTPConnection:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(
                self._host, self._port, timeout=self._timeout_s
            )
        return self._connection

    def _open_session(self) -> None:
        self._session = ""
        connection, nonce = self._connected(), new_nonce()
        connection.request("POST", f"{handshake.OPERATOR_PATH}/session", body=nonce)
        data = connection.getresponse().read()
        opened = handshake.decode_as(handshake.SessionOpened, data, "the controller")
        parts = (opened.nonce, nonce, opened.session.encode())
        if not is_equal(opened.proof, derive(self._token, "operator-server", *parts)):
            raise AuthenticationFailed(
                f"wrong token for the job at {self._host}:{self._port}: "
                "the controller there does not know it"
            )
        self._session = opened.session
        self._key = derive(self._token, "operator", *parts)
        self._counter = 0

    def _send(self, method: str, target: str, body: bytes) -> tuple[int, bytes]:
        self._counter += 1
        counter = self._counter.to_bytes(8, "big")
        signature = proof(self._key, f"{method} {target}".encode(), counter, body).hex()
        headers = {handshake.SESSION_HEADER: f"{self._session} {self._counter} {signature}"}
        connection = self._connected()
        connection.request(method, target, body=body, headers=headers)
        response = connection.getresponse()
        answer = response.read()
        if response.status == 200:
            expected = proof(self._key, b"answer", counter, answer).hex()
            given = response.headers.get(handshake.PROOF_HEADER, "")
            if not is_equal(expected.encode(), given.encode()):
                raise RemoteProtocolError("the answer's proof does not fit the job's token")
        return response.status, answer
