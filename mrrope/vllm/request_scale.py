"""Choose the table of each request at admission, and separate cached blocks of different tables.

The choice is a pure function of the request, so it is made twice and never trusted: in the front end, where an error
becomes an HTTP 400, and in the engine core, which also serves clients that have no Python front end.
"""

from __future__ import annotations

import contextvars
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mrrope.vllm.rope_settings import served_rope

if TYPE_CHECKING:
    from prometheus_client import Counter
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreRequest

EXTRA_ARG = "mrrope_table"
"""Key of ``SamplingParams.extra_args`` that carries a request's index into ``Ladder.tables`` to the workers."""
OVERRIDE_ARG = "mrrope_scale"
"""Key of ``SamplingParams.extra_args`` by which a request names its scale; ``vllm_xargs`` in the OpenAI API."""
SALT_PREFIX = "mrrope:"

ADMITTED_SCALES: contextvars.ContextVar[list[float] | None] = contextvars.ContextVar("admitted_scales", default=None)
"""Where one HTTP request collects the scales of its prompts, as they are admitted."""


@dataclass(frozen=True)
class ScaleSteps:
    """What the choice depends on: the length and the scale of each table of a ladder."""

    reaches: tuple[int, ...]
    scales: tuple[float, ...]
    reserve: int
    """Number of new tokens assumed for a request without max_tokens."""

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
    scale: object = None,
) -> Choice:
    """Choose the smallest table that reaches the end of a request. Choosing again with the result changes nothing.

    ``max_tokens`` counts as left out where it reaches ``max_model_len``, since that is what vLLM replaces None by. Such
    a request gets a table for ``steps.reserve`` new tokens, and ``max_tokens`` is capped to what that table reaches.

    Args:
        steps: The tables.
        prompt_tokens: Length of the prompt.
        max_tokens: Maximum number of new tokens.
        max_model_len: Maximum length of a request in this engine. The last table serves up to it.
        min_tokens: Minimum number of new tokens.
        scale: Scale that the request names; None for the smallest that suffices.

    Raises:
        ValueError: ``scale`` is not a scale of ``steps``, or its table does not reach the end of the request.
    """
    # The engine stops at max_model_len, so the last table needs no limit of its own.
    reaches = (*steps.reaches[:-1], math.inf)
    room = max_model_len - prompt_tokens
    # A named scale is taken as long as one token fits.
    reserve = 1 if scale is not None else steps.reserve
    new_tokens = max_tokens if max_tokens < room else min(max(reserve, min_tokens), room)
    candidates = [table for table, reach in enumerate(reaches) if reach >= prompt_tokens + new_tokens]
    if scale is not None:
        named = _parse_scale(steps, scale)
        possible = [table for table in candidates if steps.scales[table] == named]
        if not possible:
            suffice = ", ".join(f"{steps.scales[table]:g}" for table in candidates)
            raise ValueError(
                f"{OVERRIDE_ARG} must be one of {suffice} for a prompt of {prompt_tokens} tokens and {new_tokens} new "
                f"tokens, got {scale!r}; the tables reach {steps}"
            )
        candidates = possible
    table = candidates[0]
    if reaches[table] >= max_model_len:
        return Choice(table, max_tokens)
    return Choice(table, int(min(max_tokens, reaches[table] - prompt_tokens)))


def _parse_scale(steps: ScaleSteps, scale: object) -> float:
    try:
        # A bool is an int in Python, but not a scale. Strings come from vllm_xargs.
        number = float(scale) if isinstance(scale, (int, float, str)) and not isinstance(scale, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if number not in steps.scales:
        known = ", ".join(f"{step:g}" for step in steps.scales)
        known = f"one of {known}" if len(steps.scales) > 1 else f"{known}, the scale of all requests"
        raise ValueError(f"{OVERRIDE_ARG} must be {known}, got {scale!r}")
    return number


def salted(cache_salt: str | None, table: int) -> str | None:
    """Return the salt under which blocks of ``table`` are cached. Distinct tables or salts give distinct results.

    The model's own table keeps the user's salt, unless that looks like a salt of this function.
    """
    if table == 0 and not (cache_salt or "").startswith(SALT_PREFIX):
        return cache_salt
    return f"{SALT_PREFIX}{table}:{cache_salt or ''}"


class Admission:
    """Admits the requests of one engine."""

    def __init__(self, vllm_config: VllmConfig, steps: ScaleSteps, *, is_auto: bool = True) -> None:
        self.model_config = vllm_config.model_config
        self.steps = steps
        self.is_auto = is_auto
        self.has_scaled_time = self.model_config.uses_mrope and _scales_time(self.model_config.hf_config.to_dict())

    @staticmethod
    def of(vllm_config: VllmConfig) -> Admission | None:
        """Return the admission of an engine, or None where no layer that sees the whole text is served."""
        served = served_rope(vllm_config.model_config.hf_config)
        if served is None:
            return None
        ladder = served.ladder(served.some_rotary_dim)  # neither lengths nor scales depend on it
        if not served.is_auto:
            steps = ScaleSteps((vllm_config.model_config.max_model_len,), (ladder.tables[0].scale,), 0)
            return Admission(vllm_config, steps, is_auto=False)
        reaches = tuple(math.floor(reach) for reach in ladder.reaches)
        scales = (1.0, *(table.scale for table in ladder.tables[1:]))
        return Admission(vllm_config, ScaleSteps(reaches, scales, served.reserve))

    def admit(self, request: EngineCoreRequest) -> Choice:
        """Choose the table of a request, write it to its ``extra_args`` and cap its ``max_tokens``.

        With a fixed factor there is nothing to choose, and only a scale that the request names is checked.

        Raises:
            ValueError: The request cannot be served with a table of its own, or names a scale that is not served.
        """
        from vllm.utils import length_from_prompt_token_ids_or_embeds

        params = request.sampling_params
        if not self.is_auto:
            named = None if params is None else (params.extra_args or {}).get(OVERRIDE_ARG)
            if named is not None:
                _parse_scale(self.steps, named)
            return Choice(0, self.model_config.max_model_len if params is None else params.max_tokens)
        if params is None:
            raise ValueError("a pooling request cannot be served with rope_parameters' factor 'auto'")
        if request.resumable:
            raise ValueError(
                "streaming input cannot be served with rope_parameters' factor 'auto': the table is chosen by the "
                "length of the whole prompt"
            )
        extra_args = params.extra_args or {}
        scale = extra_args.get(OVERRIDE_ARG)
        if scale is None and self.has_scaled_time and any(f.modality == "video" for f in request.mm_features or ()):
            raise ValueError(
                f"{OVERRIDE_ARG} must be given for a request with video, got None: this model's positions advance by "
                "time, so the number of tokens does not tell how far they reach"
            )
        choice = choose(
            self.steps,
            prompt_tokens=length_from_prompt_token_ids_or_embeds(request.prompt_token_ids, request.prompt_embeds),
            max_tokens=params.max_tokens,
            # Read per request: the engine core may lower it to what the KV cache holds.
            max_model_len=self.model_config.max_model_len,
            min_tokens=params.min_tokens,
            scale=scale,
        )
        # A new dict: the requests of one call, or of one n, may share theirs.
        params.extra_args = {**extra_args, EXTRA_ARG: choice.table}
        params.max_tokens = choice.max_tokens
        return choice


def _scales_time(settings: dict[str, Any]) -> bool:
    """Whether a model derives the positions of video from its duration, as Qwen2.5-VL and the Omni models do."""
    keys = {"tokens_per_second", "position_id_per_seconds"}
    return not keys.isdisjoint(settings) or any(_scales_time(part) for part in settings.values() if type(part) is dict)


@functools.cache
def request_counter() -> Counter:
    """Return the Prometheus counter of admitted requests: one per process, with the labels ``model_name``, ``scale``.

    vLLM unregisters metrics that start with ``vllm:`` whenever it creates an engine; this one stays.
    """
    from prometheus_client import Counter

    return Counter("mrrope:requests", "Requests by the scale of their RoPE table.", ["model_name", "scale"])


def _admission_of(owner: Any) -> Admission | None:
    # The engine core loads plugins inside its constructor, so a hook on that would come too late.
    if not hasattr(owner, "mrrope_admission"):
        owner.mrrope_admission = Admission.of(owner.vllm_config)
    admission: Admission | None = owner.mrrope_admission
    return admission


def announce(original: Any, processor: Any, *args: Any, **kwargs: Any) -> None:
    """Name the scales when a front end starts."""
    original(processor, *args, **kwargs)
    if (admission := _admission_of(processor)) and admission.is_auto:
        _logger().info(
            "mrrope chooses a table for each request: %s. A request without max_tokens gets room for %d new tokens.",
            admission.steps,
            admission.steps.reserve,
        )
        request_counter()


def admit_in_front_end(original: Any, processor: Any, *args: Any, **kwargs: Any) -> Any:
    """Admit a request where a refusal becomes an HTTP 400."""
    request = original(processor, *args, **kwargs)
    if admission := _admission_of(processor):
        try:
            choice = admission.admit(request)
        except ValueError:
            _forget_unsent_media(processor, request)
            raise
        number = admission.steps.scales[choice.table]
        if (collected := ADMITTED_SCALES.get()) is not None:
            collected.append(number)
        if not admission.is_auto:
            return request
        scale = f"{number:g}"
        _logger().debug("mrrope: request %s at scale %s, max_tokens %d", request.request_id, scale, choice.max_tokens)
        request_counter().labels(admission.model_config.served_model_name, scale).inc()
    return request


def _forget_unsent_media(processor: Any, request: EngineCoreRequest) -> None:
    """Drop the media of a refused request from the cache of those that the engine core holds, as it never got them.

    Otherwise the next request with the same image or video would come without its data, and fail.
    """
    from vllm.multimodal.cache import MultiModalProcessorSenderCache

    cache = processor.renderer.mm_processor_cache
    if isinstance(cache, MultiModalProcessorSenderCache):
        for feature in request.mm_features or ():
            if feature.data is not None:  # else the core has it from a former request
                cache._cache.pop(feature.mm_hash, None)


def admit_in_core(original: Any, core: Any, request: EngineCoreRequest, *args: Any, **kwargs: Any) -> Any:
    """Admit a request that may come from a front end without Python."""
    if admission := _admission_of(core):
        choice = admission.admit(request)
        if admission.is_auto:
            request.cache_salt = salted(request.cache_salt, choice.table)
    return original(core, request, *args, **kwargs)


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.mrrope")  # vLLM configures handlers for names below vllm only
