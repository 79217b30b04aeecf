"""What operators can ask the controller, as JSON; requests wait here for their replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec

from trainmover.daemons.records import JobRecords, to_json
from trainmover.protocol.messages import FromOperatorMessage, OperatorReply

LONGEST_WAIT_S: Final = 30.0
ACCEPT_LIMIT_S: Final = 10.0
KEPT_REPLIES: Final = 100


class OperatorViews:
    """Answers of the operator's port. Reads the decider's state, never changes it."""

    def __init__(
        self,
        records: JobRecords,
        post: Callable[[Any], None],
        status: Callable[[], msgspec.Struct],
    ) -> None:
        self._records = records
        self._post = post
        self._status = status
        self._replies: dict[str, list[OperatorReply]] = {}
        self._news = asyncio.Event()

    def reply(self, reply: OperatorReply) -> None:
        """The decider has answered a request."""
        self._replies.setdefault(reply.request, []).append(reply)
        while len(self._replies) > KEPT_REPLIES:
            del self._replies[next(iter(self._replies))]
        if reply.is_final or not reply.is_accepted:
            self._records.say("decision", reply.text)
        self._news.set()
        self._news = asyncio.Event()

    async def answer(
        self, method: str, path: str, query: dict[str, str], body: bytes
    ) -> tuple[int, bytes]:
        """Status and JSON of one request."""
        try:
            if method == "GET":
                return await self._answer_get(path, query)
            if method == "POST" and path == "requests":
                return await self._answer_request(body)
        except (ValueError, msgspec.DecodeError) as error:
            return 400, to_json({"error": f"expected a valid request: {error}"})
        return 404, to_json({"error": f"nothing at {method} {path}"})

    async def _answer_get(self, path: str, query: dict[str, str]) -> tuple[int, bytes]:
        match path.split("/"):
            case ["status"]:
                return 200, to_json(
                    {
                        "status": self._status(),
                        "last": self._records.last,
                        "cadence": self._records.cadence,
                        "findings": len(self._records.findings),
                    }
                )
            case ["incidents"]:
                return 200, to_json(self._records.incidents.all())
            case ["missed"]:
                return 200, to_json(self._records.missed)
            case ["coverage"]:
                return 200, to_json(self._records.coverage.all())
            case ["checks"]:
                return 200, to_json(self._records.checks.all())
            case ["findings"]:
                return 200, to_json(self._records.findings)
            case ["losses"]:
                return 200, to_json(self._records.losses_after(int(query.get("after", "-1"))))
            case ["console"]:
                lines = self._records.lines_after(int(query.get("after", "0")))
                return 200, to_json(
                    {"lines": lines, "last": self._records.last, "status": self._status()}
                )
            case ["replies", request]:
                wait_s = min(float(query.get("wait_s", "0")), LONGEST_WAIT_S)
                return 200, to_json(await self._wait_for(request, wait_s, is_final=True))
            case _:
                return 404, to_json({"error": f"nothing at {path}"})

    async def _answer_request(self, body: bytes) -> tuple[int, bytes]:
        message = msgspec.json.decode(body, type=FromOperatorMessage)
        if message.request not in self._replies:
            self._post(message)
        reply = await self._wait_for(message.request, ACCEPT_LIMIT_S, is_final=False)
        if reply is None:
            return 503, to_json({"error": "the controller has not answered in time"})
        return 200, to_json(reply)

    async def _wait_for(
        self, request: str, wait_s: float, *, is_final: bool
    ) -> OperatorReply | None:
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            for reply in self._replies.get(request, []):
                if reply.is_final or not is_final:
                    return reply
            news = self._news
            try:
                async with asyncio.timeout_at(deadline):
                    await news.wait()
            except TimeoutError:
                return None
