"""Admission of requests: each gets its table, and its part of the radix cache is kept apart from those of others.

The choice is made in the front end, where an error becomes an HTTP 400, and travels in ``custom_params``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from mrrope.serving.rope_settings import served_rope
from mrrope.serving.scale_choice import (
    SCALE_KEY,
    TABLE_KEY,
    ScaleSteps,
    choose,
    parsed_scale,
    request_counter,
    salted,
    scales_time,
)

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput

logger = logging.getLogger("sglang.mrrope")


class Admission:
    """Admits the requests of one engine."""

    def __init__(
        self, steps: ScaleSteps, max_model_len: int, model_name: str, *, is_auto: bool, has_scaled_time: bool = False
    ) -> None:
        self.steps = steps
        self.max_model_len = max_model_len
        self.model_name = model_name
        self.is_auto = is_auto
        self.has_scaled_time = has_scaled_time

    @staticmethod
    def of(manager: Any) -> Admission | None:
        """Return the admission of a front end, or None where no layer that sees the whole text is served."""
        served = served_rope(manager.model_config.hf_text_config)
        if served is None:
            return None
        return Admission(
            ScaleSteps.of(served, manager.context_len),
            manager.context_len,
            manager.served_model_name,
            is_auto=served.is_auto,
            has_scaled_time=scales_time(manager.model_config.hf_config.to_dict()),
        )

    def admit(self, request: TokenizedGenerateReqInput, source: GenerateReqInput) -> None:
        """Choose the table of a request, write it to its ``custom_params`` and cap its ``max_new_tokens``.

        With a fixed factor there is nothing to choose, and only a scale that the request names is checked.

        Args:
            request: The request as the scheduler gets it.
            source: The request as the user sent it.

        Raises:
            ValueError: The request cannot be served with a table of its own, or names a scale that is not served.
        """
        params = request.sampling_params
        custom = {} if params.custom_params is None else params.custom_params
        if not isinstance(custom, dict):
            raise ValueError(f"custom_params must be an object, got {custom!r}")
        scale = custom.get(SCALE_KEY)
        if not self.is_auto:
            if scale is not None:
                parsed_scale(self.steps, scale)
            return
        _require_whole_text(source, params.beam_width)
        if source.video_data and scale is None and self.has_scaled_time:
            raise ValueError(
                f"{SCALE_KEY} must be given for a request with video, got None: this model's positions advance by "
                "time, so the number of tokens does not tell how far they reach"
            )
        max_tokens = self.max_model_len if params.max_new_tokens is None else params.max_new_tokens
        prompt = request.input_ids if request.input_embeds is None else request.input_embeds
        choice = choose(
            self.steps,
            prompt_tokens=len(prompt or ()),
            max_tokens=max_tokens,
            max_model_len=self.max_model_len,
            min_tokens=params.min_new_tokens,
            scale=scale,
        )
        # A new dict: the requests of one call, or of one n, may share theirs.
        params.custom_params = {**custom, TABLE_KEY: choice.table}
        if choice.max_tokens < max_tokens:
            params.max_new_tokens = choice.max_tokens
        request.extra_key = salted(request.extra_key, choice.table)
        named = f"{self.steps.scales[choice.table]:g}"
        logger.debug("mrrope: request %s at scale %s, max_new_tokens %s", request.rid, named, params.max_new_tokens)
        if source.log_metrics:  # not of SGLang's health checks
            request_counter().labels(self.model_name, named).inc()


def _require_whole_text(source: GenerateReqInput, beam_width: int | None) -> None:
    """Raise ValueError where the number of tokens does not tell how far positions reach."""
    if source.session_params:
        raise ValueError(
            "session_params cannot be served with rope_parameters' factor 'auto': the table is chosen by the length of "
            "the whole text, of which a session sends a part"
        )
    if (beam_width or 1) > 1:
        raise ValueError(
            f"beam_width must be 1 with rope_parameters' factor 'auto', got {beam_width}: beams are tokens of a step "
            "that belong to no request"
        )


def announce(result: None, manager: Any, *args: Any, **kwargs: Any) -> None:
    """Name the scales when a front end starts. Called after its constructor."""
    admission = Admission.of(manager)
    manager.mrrope_admission = admission
    if admission is not None and admission.is_auto:
        logger.info(
            "mrrope chooses a table for each request: %s. A request without max_new_tokens gets room for %d new "
            "tokens.",
            admission.steps,
            admission.steps.reserve,
        )


def admit_created(request: Any, manager: Any, source: Any, *args: Any, **kwargs: Any) -> None:
    """Admit a request where a refusal becomes an HTTP 400. Called after ``_create_tokenized_object``."""
    admission: Admission | None = manager.mrrope_admission
    if admission is None:
        return
    if not hasattr(source, "session_params"):
        if admission.is_auto:
            raise ValueError("a pooling request cannot be served with rope_parameters' factor 'auto'")
        return
    admission.admit(request, source)


def keep_within_table(result: None, scheduler: Any, request: Any) -> None:
    """Hold a request to the reach of its table. Called after ``Scheduler.init_req_max_new_tokens``.

    The front end counts the tokens that it sends; the scheduler of some models expands those of media. A prompt that
    is longer than its table reaches then is aborted, which becomes an HTTP 400.
    """
    if not hasattr(scheduler, "mrrope_steps"):
        served, length = served_rope(scheduler.model_config.hf_text_config), scheduler.model_config.context_len
        scheduler.mrrope_steps = ScaleSteps.of(served, length) if served is not None and served.is_auto else None
    steps: ScaleSteps | None = scheduler.mrrope_steps
    params = request.sampling_params
    table = (params.custom_params or {}).get(TABLE_KEY, 0)
    if steps is None or table == len(steps.reaches) - 1:  # the last one serves up to the context length
        return
    reach, prompt_tokens = steps.reaches[table], len(request.origin_input_ids)
    if prompt_tokens > reach:
        request.set_finish_with_abort(
            f"{SCALE_KEY} must be given for a prompt that the scheduler expands to {prompt_tokens} tokens: its scale "
            f"was chosen for fewer, and the tables reach {steps}"
        )
    params.max_new_tokens = max(0, min(params.max_new_tokens, reach - prompt_tokens))
    params.min_new_tokens = min(params.min_new_tokens, params.max_new_tokens)
