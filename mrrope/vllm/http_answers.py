"""What vLLM's HTTP server says of scales: the scale of every answer, and a refusal where a request cannot name one."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from mrrope.serving.scale_choice import SCALE_KEY
from mrrope.vllm import hooks
from mrrope.vllm.request_scale import ADMITTED_SCALES, AdmittedScales

HEADER = "x-mrrope-scale"
"""Header of an answer with the scale of its prompt, or of its prompts in their order, separated by commas."""

MAX_SCALES = 32
"""Of how many prompts :data:`HEADER` has a scale each. Of more it has each scale once, since proxies limit headers."""

ARGUMENTS = "vllm_xargs"
"""Field of a request with arguments that vLLM hands on to the engine."""

Message = MutableMapping[str, Any]


class ScaleHeader:
    """ASGI middleware that adds :data:`HEADER` to the answers of requests that the engine admits."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        admitted = AdmittedScales()
        held: list[Message] = []

        async def send_with_header(message: Message) -> None:
            # A stream starts before its request is admitted, which happens before its first chunk.
            if message["type"] == "http.response.start":
                held.append(message)
                return
            while held:
                start = held.pop()
                if admitted.scales:
                    header = (HEADER.encode(), header_value(admitted.scales).encode())
                    start = {**start, "headers": [*start.get("headers", []), header]}
                await send(start)
            await send(message)

        token = ADMITTED_SCALES.set(admitted)
        try:
            await self.app(scope, receive, send_with_header)
        finally:
            ADMITTED_SCALES.reset(token)


def header_value(scales: Sequence[float]) -> str:
    """Return the value of :data:`HEADER`: all scales in their order, or of many each once, the smallest first."""
    return ", ".join(f"{scale:g}" for scale in (scales if len(scales) <= MAX_SCALES else sorted(set(scales))))


def build_app(original: Callable[..., Any], args: Any, *more: Any, **kwargs: Any) -> Any:
    """Build the server's application, with the middleware: as one of the user's, since ``build_app`` starts the app."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    for protocol in (ChatCompletionRequest, CompletionRequest):
        hooks.wrap(protocol, "to_beam_search_params", to_beam_search_params)
    args = copy.copy(args)
    args.middleware = [*args.middleware, f"{ScaleHeader.__module__}.{ScaleHeader.__qualname__}"]
    return original(args, *more, **kwargs)


def to_beam_search_params(original: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse a scale that vLLM's beam search would drop: it makes the requests of its beams without arguments."""
    from vllm.exceptions import VLLMValidationError

    if SCALE_KEY in (request.vllm_xargs or {}):
        raise VLLMValidationError(
            f"{SCALE_KEY} must not be given with use_beam_search, whose beams vLLM sends to the engine without "
            f"{ARGUMENTS}, got {request.vllm_xargs[SCALE_KEY]!r}"
        )
    if (admitted := ADMITTED_SCALES.get()) is not None:
        admitted.is_beam_search = True
    return original(request, *args, **kwargs)


async def create_messages(
    original: Callable[..., Awaitable[Any]], messages: Any, request: Any, raw_request: Any = None, **kwargs: Any
) -> Any:
    """Answer ``/v1/messages``; refuse a scale that vLLM's protocol of this path drops before it is admitted."""
    body = {} if raw_request is None else await raw_request.json()
    hands_on = ARGUMENTS in type(request).model_fields  # since 0.29
    if SCALE_KEY in body or (not hands_on and SCALE_KEY in (body.get(ARGUMENTS) or {})):
        where = f"in {ARGUMENTS}" if hands_on else f"to /v1/chat/completions: /v1/messages has no {ARGUMENTS}"
        return messages.create_error_response(ValueError(f"{SCALE_KEY} must be given {where}"))
    return await original(messages, request, raw_request, **kwargs)
