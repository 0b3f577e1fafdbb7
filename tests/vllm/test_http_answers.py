"""What HTTP answers say of scales, through vLLM's application."""

import asyncio
from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.openai.api_server import build_app

from mrrope.vllm.hooks import WRAPPED
from mrrope.vllm.http_answers import HEADER, ScaleHeader, create_messages
from mrrope.vllm.request_scale import ADMITTED_SCALES


def answer(scales: list[float]) -> list[dict[str, Any]]:
    """Return the messages of a streamed answer, whose prompts are admitted after its start."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        ADMITTED_SCALES.get().extend(scales)
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b"y"})

    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(ScaleHeader(app)({"type": "http"}, None, send))
    return sent


def test_a_stream_has_the_scales_of_its_prompts() -> None:
    start, *body = answer([1.0, 4.0])
    assert start["headers"] == [(b"a", b"b"), (HEADER.encode(), b"1, 4")]
    assert [part["body"] for part in body] == [b"x", b"y"]


def test_an_answer_without_prompts_has_no_scale() -> None:
    assert answer([])[0]["headers"] == [(b"a", b"b")]


def test_messages_refuse_a_scale() -> None:
    async def ask(body: dict[str, Any]) -> Any:
        async def json() -> dict[str, Any]:
            return body

        async def original(*args: Any) -> str:
            return "answered"

        return await create_messages(
            original, SimpleNamespace(create_error_response=str), None, SimpleNamespace(json=json)
        )

    assert asyncio.run(ask({"vllm_xargs": {"other": 1}})) == "answered"
    for body in ({"mrrope_scale": 4}, {"vllm_xargs": {"mrrope_scale": 4}}):
        assert asyncio.run(ask(body)).startswith("mrrope_scale must not be given to /v1/messages")


def test_the_server_is_hooked() -> None:
    assert hasattr(build_app, WRAPPED)
