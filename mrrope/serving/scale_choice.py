"""Choose the table of a request by its length, and separate cached keys of different tables.

The choice is a pure function of the request, so that every process of an engine can make it again.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import Counter

    from mrrope.serving.rope_settings import ServedRope

TABLE_KEY = "mrrope_table"
"""Key under which a request carries its index into ``Ladder.tables`` to the workers."""
SCALE_KEY = "mrrope_scale"
"""Key by which a request names its scale."""
SALT_PREFIX = "mrrope:"


@dataclass(frozen=True)
class ScaleSteps:
    """What the choice depends on: the length and the scale of each table of a ladder."""

    reaches: tuple[int, ...]
    scales: tuple[float, ...]
    reserve: int
    """Number of new tokens assumed for a request without max_tokens."""

    @staticmethod
    def of(served: ServedRope, max_model_len: int) -> ScaleSteps:
        """Return the steps of a served RoPE; of a fixed factor, its scale alone.

        Args:
            served: The RoPE of the layers that attend to the whole text.
            max_model_len: Maximum length of a request in this engine.
        """
        ladder = served.ladder(served.some_rotary_dim)  # Lengths and scales are the same for every rotary_dim.
        if not served.is_auto:
            return ScaleSteps((max_model_len,), (ladder.tables[0].scale,), 0)
        scales = (1.0, *(table.scale for table in ladder.tables[1:]))
        return ScaleSteps(tuple(math.floor(reach) for reach in ladder.reaches), scales, served.reserve)

    def __str__(self) -> str:
        steps = [f"{reach} tokens at scale {scale:g}" for reach, scale in zip(self.reaches, self.scales, strict=True)]
        return ", ".join(steps)


@dataclass(frozen=True)
class Choice:
    """The table of a request, and the number of new tokens that it has room for."""

    table: int
    max_tokens: int


def choose(
    steps: ScaleSteps,
    *,
    prompt_tokens: int,
    max_tokens: int,
    max_model_len: int,
    min_tokens: int = 0,
    thinking_tokens: int = 0,
    scale: object = None,
    grows: bool = False,
) -> Choice:
    """Choose the smallest table that reaches the end of a request. Choosing again with the result changes nothing.

    ``max_tokens`` counts as left out where it reaches ``max_model_len``, since engines replace None by that. Such
    a request gets a table for ``steps.reserve`` new tokens, and for those of its reasoning; unless it grows,
    ``max_tokens`` is capped to what that table reaches.

    Args:
        steps: The tables.
        prompt_tokens: Length of the prompt.
        max_tokens: Maximum number of new tokens.
        max_model_len: Maximum length of a request in this engine. The last table serves up to it.
        min_tokens: Minimum number of new tokens.
        thinking_tokens: Number of new tokens that the request allows for reasoning before its answer.
        scale: Scale that the request names; None for the smallest that suffices.
        grows: Whether the engine gives a request that names no scale the next table when it outgrows its own.

    Raises:
        ValueError: ``scale`` is not a scale of ``steps``, or its table does not reach the end of the request.
    """
    # The engine stops at max_model_len, so the last table needs no limit of its own.
    reaches = (*steps.reaches[:-1], math.inf)
    room = max_model_len - prompt_tokens
    # A named scale is taken as long as one token fits, and no request has room for none.
    reserve = 1 if scale is not None else max(1, steps.reserve + thinking_tokens)
    new_tokens = max_tokens if max_tokens < room else min(max(reserve, min_tokens), room)
    candidates = [table for table, reach in enumerate(reaches) if reach >= prompt_tokens + new_tokens]
    if scale is not None:
        named = parsed_scale(steps, scale)
        possible = [table for table in candidates if steps.scales[table] == named]
        if not possible:
            suffice = ", ".join(f"{steps.scales[table]:g}" for table in candidates)
            raise ValueError(
                f"{SCALE_KEY} must be one of {suffice} for a prompt of {prompt_tokens} tokens and {new_tokens} new "
                f"tokens, got {scale!r}; the tables reach {steps}"
            )
        candidates = possible
    table = candidates[0]
    if reaches[table] >= max_model_len or (grows and scale is None):
        return Choice(table, max_tokens)
    return Choice(table, int(min(max_tokens, reaches[table] - prompt_tokens)))


def parsed_scale(steps: ScaleSteps, scale: object) -> float:
    """Return the scale that a request names, by its value or as headers and messages print it.

    Raises:
        ValueError: It is none of ``steps``.
    """
    try:
        # A bool is an int in Python, but not a scale. Strings come from APIs whose extra arguments have no numbers.
        number = float(scale) if isinstance(scale, (int, float, str)) and not isinstance(scale, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if number in steps.scales:
        return number
    for step in steps.scales:
        if number == float(f"{step:g}"):
            return step
    known = ", ".join(f"{step:g}" for step in steps.scales)
    known = f"one of {known}" if len(steps.scales) > 1 else f"{known}, the scale of all requests"
    raise ValueError(f"{SCALE_KEY} must be {known}, got {scale!r}")


def scales_time(settings: dict[str, Any]) -> bool:
    """Whether a model derives the positions of video from its duration, as Qwen2.5-VL and the Omni models do.

    Args:
        settings: The model's configuration as a dict.
    """
    keys = {"tokens_per_second", "position_id_per_seconds"}
    return not keys.isdisjoint(settings) or any(scales_time(part) for part in settings.values() if type(part) is dict)


def salted(cache_salt: str | None, table: int) -> str | None:
    """Return the salt under which blocks of ``table`` are cached. Distinct tables or salts give distinct results.

    The model's own table keeps the user's salt, unless that looks like a salt of this function.
    """
    if table == 0 and not (cache_salt or "").startswith(SALT_PREFIX):
        return cache_salt
    return f"{SALT_PREFIX}{table}:{cache_salt or ''}"


def unsalted(salt: str | None) -> str | None:
    """Return the user's salt of a result of :func:`salted`."""
    return salt.split(":", 2)[2] or None if salt and salt.startswith(SALT_PREFIX) else salt


@functools.cache
def request_counter() -> Counter:
    """Return the Prometheus counter of admitted requests: one per process, with the labels ``model_name``, ``scale``.

    Engines unregister metrics of their own prefix when they are created again; this one stays.
    """
    from prometheus_client import Counter

    return Counter("mrrope:requests", "Requests by the scale of their RoPE table.", ["model_name", "scale"])
