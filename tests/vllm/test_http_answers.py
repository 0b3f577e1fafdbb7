"""What HTTP answers say of scales, through vLLM's application."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from running_version import VERSION
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError

from mrrope.vllm.hooks import WRAPPED
from mrrope.vllm.http_answers import HEADER, ScaleHeader, create_messages, to_beam_search_params
from mrrope.vllm.request_scale import ADMITTED_SCALES, AdmittedScales


def answer(scales: list[float], is_beam_search: bool = False) -> list[dict[str, Any]]:
    """Return the messages of a streamed answer, whose prompts are admitted after its start."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        ADMITTED_SCALES.get().is_beam_search = is_beam_search
        for scale in scales:
            ADMITTED_SCALES.get().add(scale)
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


def test_the_header_of_many_prompts_has_each_scale_once() -> None:
    (_, value) = answer([4.0, 1.0] * 16)[0]["headers"][-1]
    assert value == b", ".join([b"4", b"1"] * 16)
    (_, value) = answer([4.0, 1.0] * 16 + [2.5])[0]["headers"][-1]
    assert value == b"1, 2.5, 4"


def test_beams_have_the_scales_of_their_steps() -> None:
    (_, value) = answer([1.0] * 40 + [2.0] * 40, is_beam_search=True)[0]["headers"][-1]
    assert value == b"1, 2"
    admitted = AdmittedScales(is_beam_search=True)
    assert [admitted.add(scale) for scale in (1.0, 1.0, 2.0, 1.0)] == [True, False, True, False]


@pytest.mark.parametrize(
    "request_of",
    [lambda **more: CompletionRequest(prompt="a", **more), lambda **more: ChatCompletionRequest(messages=[], **more)],
)
def test_beam_search_refuses_a_scale(request_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def original(request: Any, max_tokens: int) -> int:
        return max_tokens

    admitted = AdmittedScales()
    token = ADMITTED_SCALES.set(admitted)
    try:
        request = request_of(model="tiny", use_beam_search=True, vllm_xargs={"mrrope_scale": 4})
        with pytest.raises(VLLMValidationError, match=r"mrrope_scale must not be given with use_beam_search, .* got 4"):
            to_beam_search_params(original, request, 8)
        assert not admitted.is_beam_search
        for arguments in (None, {"other": 1}):
            request = request_of(model="tiny", use_beam_search=True, vllm_xargs=arguments)
            assert to_beam_search_params(original, request, 8) == 8
        assert admitted.is_beam_search
    finally:
        ADMITTED_SCALES.reset(token)


def test_an_answer_without_prompts_has_no_scale() -> None:
    assert answer([])[0]["headers"] == [(b"a", b"b")]


def answer_of_messages(**arguments: Any) -> Any:
    """Return the answer of ``/v1/messages``, of a server whose answers are the arguments that its protocol kept."""
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}], **arguments}

    async def json() -> dict[str, Any]:
        return body

    async def original(messages: Any, request: Any, raw_request: Any) -> Any:
        return getattr(request, "vllm_xargs", None)

    messages = SimpleNamespace(create_error_response=str)
    request = AnthropicMessagesRequest(**body)
    return asyncio.run(create_messages(original, messages, request, SimpleNamespace(json=json)))


def test_messages_hand_a_scale_on_or_refuse_it() -> None:
    hands_on = VERSION >= (0, 29)
    other, scale = {"other": 1}, {"mrrope_scale": 4}
    assert answer_of_messages() is None
    assert answer_of_messages(vllm_xargs=other) == (other if hands_on else None)
    refused = "mrrope_scale must be given to /v1/chat/completions: /v1/messages has no vllm_xargs"
    assert answer_of_messages(vllm_xargs=scale) == (scale if hands_on else refused)


def test_messages_refuse_a_scale_beside_their_arguments() -> None:
    assert answer_of_messages(mrrope_scale=4).startswith("mrrope_scale must be given ")


def test_the_server_is_hooked() -> None:
    assert hasattr(build_app, WRAPPED)
