"""Admission of requests: each gets its table, and its blocks in the prefix cache are kept apart from those of others.

The choice is made twice and never trusted: in the front end, where an error becomes an HTTP 400, and in the engine
core, which also serves clients that have no Python front end.
"""

from __future__ import annotations

import contextvars
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mrrope.serving.rope_settings import served_rope
from mrrope.serving.scale_choice import (
    SCALE_KEY,
    TABLE_KEY,
    Choice,
    ScaleSteps,
    choose,
    parsed_scale,
    request_counter,
    salted,
    scales_time,
)
from mrrope.vllm.compatibility import can_grow

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreRequest


@dataclass
class AdmittedScales:
    """The scales of the prompts of one HTTP request, as they are admitted."""

    scales: list[float] = field(default_factory=list)
    is_beam_search: bool = False
    """Whether every beam of every step is a request of its own: each scale is then collected once."""

    def add(self, scale: float) -> bool:
        """Collect the scale of an admitted request; return whether that counts as a request of its user."""
        if self.is_beam_search and scale in self.scales:
            return False
        self.scales.append(scale)
        return True


ADMITTED_SCALES: contextvars.ContextVar[AdmittedScales | None] = contextvars.ContextVar("admitted_scales", default=None)
"""Set while an HTTP request is answered."""
SHADOW_CACHES = ("MultiModalProcessorSenderCache", "LruKeyReplicatedSenderCache")
"""vLLM's classes, up to 0.30 and since 0.31, that only know which media the engine core holds."""


class Admission:
    """Admits the requests of one engine."""

    def __init__(self, vllm_config: VllmConfig, steps: ScaleSteps, *, is_auto: bool = True) -> None:
        self.model_config = vllm_config.model_config
        self.steps = steps
        self.is_auto = is_auto
        self.grows = is_auto and can_grow(vllm_config)
        self.has_scaled_time = self.model_config.uses_mrope and scales_time(self.model_config.hf_config.to_dict())

    @staticmethod
    def of(vllm_config: VllmConfig) -> Admission | None:
        """Return the admission of an engine, or None where no layer that sees the whole text is served."""
        served = served_rope(vllm_config.model_config.hf_config)
        if served is None:
            return None
        steps = ScaleSteps.of(served, vllm_config.model_config.max_model_len)
        return Admission(vllm_config, steps, is_auto=served.is_auto)

    def admit(self, request: EngineCoreRequest) -> Choice:
        """Choose the table of a request, write it to its ``extra_args`` and cap its ``max_tokens``.

        With a fixed factor there is nothing to choose, and only a scale that the request names is checked.

        Raises:
            ValueError: The request cannot be served with a table of its own, or names a scale that is not served.
        """
        from vllm.utils import length_from_prompt_token_ids_or_embeds

        params = request.sampling_params
        if not self.is_auto:
            named = None if params is None else (params.extra_args or {}).get(SCALE_KEY)
            if named is not None:
                parsed_scale(self.steps, named)
            return Choice(0, self.model_config.max_model_len if params is None else params.max_tokens)
        if params is None:
            raise ValueError("a pooling request cannot be served with rope_parameters' factor 'auto'")
        if request.resumable:
            raise ValueError(
                "streaming input cannot be served with rope_parameters' factor 'auto': the table is chosen by the "
                "length of the whole prompt"
            )
        extra_args = params.extra_args or {}
        scale = extra_args.get(SCALE_KEY)
        if scale is None and self.has_scaled_time and any(f.modality == "video" for f in request.mm_features or ()):
            raise ValueError(
                f"{SCALE_KEY} must be given for a request with video, got None: this model's positions advance by "
                "time, so the number of tokens does not tell how far they reach"
            )
        choice = choose(
            self.steps,
            prompt_tokens=length_from_prompt_token_ids_or_embeds(request.prompt_token_ids, request.prompt_embeds),
            max_tokens=params.max_tokens,
            # Read per request: the engine core may lower it to what the KV cache holds.
            max_model_len=self.model_config.max_model_len,
            min_tokens=params.min_tokens,
            thinking_tokens=params.thinking_token_budget or 0,
            scale=scale,
            grows=self.grows,
        )
        # A new dict: the requests of one call, or of one n, may share theirs.
        params.extra_args = {**extra_args, TABLE_KEY: choice.table}
        params.max_tokens = choice.max_tokens
        return choice


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
            "mrrope chooses a table for each request: %s. A request without max_tokens gets room for %d new tokens%s.",
            admission.steps,
            admission.steps.reserve,
            ", and the next table when it outgrows that" if admission.grows else "",
        )
        request_counter()


def admit_in_front_end(original: Any, processor: Any, *args: Any, **kwargs: Any) -> Any:
    """Admit a request where a refusal becomes an HTTP 400."""
    from vllm.exceptions import VLLMValidationError

    request = original(processor, *args, **kwargs)
    if admission := _admission_of(processor):
        try:
            choice = admission.admit(request)
        except ValueError as error:
            _forget_unsent_media(processor, request)
            # The server answers 400 to any ValueError, but after one that it does not know it ends the connection.
            raise VLLMValidationError(str(error)) from error
        number = admission.steps.scales[choice.table]
        admitted = ADMITTED_SCALES.get()
        is_counted = admitted is None or admitted.add(number)
        if not admission.is_auto:
            return request
        scale = f"{number:g}"
        _logger().debug("mrrope: request %s at scale %s, max_tokens %d", request.request_id, scale, choice.max_tokens)
        if is_counted:
            request_counter().labels(admission.model_config.served_model_name, scale).inc()
    return request


def _forget_unsent_media(processor: Any, request: EngineCoreRequest) -> None:
    """Drop the media of a refused request from the cache of those that the engine core holds, as it never got them.

    Otherwise the next request with the same image or video would come without its data, and fail.
    """
    renderer = processor.renderer
    # Without data the core has it from a former request.
    unsent = [feature.mm_hash for feature in request.mm_features or () if feature.data is not None]
    if hasattr(renderer, "queue_mm_cache_invalidations"):  # since 0.33, whose renderer reads the cache in a thread
        renderer.queue_mm_cache_invalidations(unsent)
    elif type(renderer.mm_processor_cache).__name__ in SHADOW_CACHES:
        for mm_hash in unsent:
            renderer.mm_processor_cache._cache.pop(mm_hash, None)


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
