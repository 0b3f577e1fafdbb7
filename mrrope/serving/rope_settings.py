"""The RoPE that mrrope serves: a user's request, merged with the model's own ``rope_parameters``."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mrrope.export.hf_config import REPLACED
from mrrope.hf.auto_scale.ladder import Ladder, ladder_for
from mrrope.hf.rope_config import UNTRAINED, RopeSettings, has_equal_factors, is_local, length_read, settings
from mrrope.hf.rope_types import OPTIONS as TYPE_OPTIONS
from mrrope.hf.rope_types import ROPE_TYPES, register_types
from mrrope.serving.mark import KEY, ROPE_TYPE
from mrrope.serving.rope_request import MODEL_KEYS, RopeRequest
from mrrope.tables.lookup import PLAIN_ROPE_OPTIONS, ModelTables, resolve_tables, tables_from_dict

NATIVE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", *ROPE_TYPES)
"""Values of ``rope_type`` that transformers computes, and so can be extended."""

APPLY_YARN_SCALING = "apply_yarn_scaling"
ENGINE_KEYS = frozenset({"alpha", "attn_factor", "extrapolation_factor", "max_trained_positions", "use_fope"})
"""Keys by which engines compute other frequencies than transformers."""

EXTENSION_KEYS = frozenset((REPLACED | {APPLY_YARN_SCALING, KEY}) - {"rope_theta"})
"""Keys that describe how the model's own RoPE is extended."""


@dataclass(frozen=True)
class ServedRope:
    """The RoPE of one layer type that mrrope serves."""

    request: RopeRequest
    native: Mapping[str, Any]
    """The model's own ``rope_parameters``."""
    stated_length: float
    """The ``max_position_embeddings`` of the model's configuration."""

    @staticmethod
    def of(rope_parameters: Mapping[str, Any] | None) -> ServedRope | None:
        """Return what :func:`merged` wrote into ``rope_parameters``; None where they are not mrrope's."""
        written = (rope_parameters or {}).get(KEY)
        if not isinstance(written, Mapping):
            return None
        # Models without a base in their configuration set it when they are built.
        base = (rope_parameters or {}).get("rope_theta", 10_000.0)
        native = {"rope_theta": base, **written["native"]}
        return ServedRope(RopeRequest(**written["request"]), native, written["stated_length"])

    @property
    def is_auto(self) -> bool:
        """Whether every request gets a scale of its own."""
        return self.request.is_auto

    @property
    def reserve(self) -> int:
        """Number of new tokens to assume for a request that does not limit them."""
        return self.request.reserve

    @property
    def native_length(self) -> float:
        """The context length of the stock model, in tokens."""
        return length_read(dict(self.native), self.stated_length) or self.stated_length

    @cached_property
    def reaches(self) -> tuple[float, ...]:
        """Number of tokens that each table reaches, which does not depend on ``rotary_dim``."""
        ladder = self.ladder(self.some_rotary_dim)
        last = ladder.tables[-1]
        return (*ladder.reaches[:-1], last.original_max_position * last.scale)

    @property
    def max_length(self) -> int:
        """Number of tokens that the last table reaches."""
        return int(self.reaches[-1])

    @cached_property
    def ready_tables(self) -> tuple[ModelTables, ...]:
        """The tables that the request holds; none with a method."""
        return tuple(tables_from_dict(table) for table in self.request.tables)

    def native_rope(self, rotary_dim: int) -> RopeSettings:
        """Return the model's own RoPE, from transformers' code for its parameters.

        Args:
            rotary_dim: The number of rotated components of a head.
        """
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        if self.native["rope_type"] in ROPE_TYPES:
            register_types()
        config = LlamaConfig(
            hidden_size=rotary_dim,
            num_attention_heads=1,
            head_dim=rotary_dim,
            max_position_embeddings=int(self.stated_length),
        )
        # Set afterwards: transformers has validated these parameters, and warned, when it loaded the model's own.
        config.rope_parameters = _as_transformers_reads(self.native)
        with torch.device("cpu"), _float32_by_default():  # engines build models under the defaults of weights
            return settings(LlamaRotaryEmbedding(config), None)

    def ladder(self, rotary_dim: int) -> Ladder[ModelTables]:
        """Return the tables to serve: one for a fixed factor, else the model's own and those of increasing reach.

        Args:
            rotary_dim: The number of rotated components of a head.

        Raises:
            ValueError: The request does not fit the model.
        """
        own, request, tables = self.native_rope(rotary_dim), self.request, self.ready_tables
        if request.factor == "auto":
            if own.changes_with_length:
                raise ValueError(
                    f"factor must be a number for a model with rope_type {self.native['rope_type']!r}, whose own table "
                    "changes with the length of a text, got 'auto'"
                )
            native: ModelTables = own.table
            steps = request.method or tables
            ladder = ladder_for(own, native, steps, request.max_factor, request.options, resolve_tables)
            return replace(ladder, reserve=request.reserve)
        factor = request.factor if request.method else None  # a ready table has its own
        table = resolve_tables(own, request.method or tables[0], factor, request.options)
        if own.changes_with_length and table.is_like(own.table):
            raise ValueError(
                f"factor must extend a model with rope_type {self.native['rope_type']!r}, whose own table changes with "
                f"the length of a text, got {request.factor!r}"
            )
        return Ladder.of_one(table)

    def _seen_by_transformers(self, is_replaced: bool) -> dict[str, Any]:
        """Return what another request extends where this one is that of a ``config.json``.

        A fixed factor of a registered type is the model's own extension, as transformers loads such a file. Other
        requests only say how to serve the model, so another one replaces them.
        """
        request, own = self.request, dict(self.native)
        if request.method in ROPE_TYPES and not request.is_auto and not is_replaced:
            own |= {"rope_type": request.method, "factor": request.factor}
            own["original_max_position_embeddings"] = self.native_length
            own |= {key: request.options[name] for key, name in TYPE_OPTIONS.items() if name in request.options}
        return own

    @property
    def some_rotary_dim(self) -> int:
        """A rotary_dim that the settings allow, where the model's is not known yet. No length depends on it."""
        if self.request.tables:
            return int(self.request.tables[0]["rotary_dim"])
        if "long_factor" in self.native:
            return 2 * len(self.native["long_factor"])
        if factors := self.request.options.get("factors"):
            return 2 * (len(factors) + (self.request.method == "radix"))
        bounds: list[int] = self.request.options.get("bounds", [0])
        return max(128, 2 * max(bounds) + 2)

    @property
    def untrained_extension(self) -> str | None:
        """The extension in the model's configuration, if it is one that needs no training and is extended further."""
        rope_type, factor = self.native["rope_type"], self.native.get("factor") or 1.0
        is_added = rope_type in (*UNTRAINED, *ROPE_TYPES) or has_equal_factors(self.native)
        if is_added and factor > 1.0 and not self.request.starts_over:
            return f"{rope_type} with factor {factor:g}"
        return None


def served_rope(hf_config: Any) -> ServedRope | None:
    """Return the RoPE of the layers that attend to the whole text, None where the engine computes it.

    Args:
        hf_config: A configuration of transformers, of a text model or one that contains it.
    """
    parameters = getattr(hf_config.get_text_config(), "rope_parameters", None) or {}
    layers = {None: parameters} if KEY in parameters else parameters
    for layer_type, own in layers.items():
        if isinstance(own, Mapping) and not is_local(layer_type) and (served := ServedRope.of(own)) is not None:
            return served
    return None


def merged(
    given: Mapping[str, Any],
    native: Mapping[str, Any] | None,
    stated_length: float | None,
    folder: Path | None = None,
    model_keys: Collection[str] = (),
) -> dict[str, Any]:
    """Return ``rope_parameters`` that serve a user's request and keep what describes the model.

    Args:
        given: The user's ``rope_parameters``.
        native: The model's own; None where ``given`` are those of the model's ``config.json``.
        stated_length: The ``max_position_embeddings`` of the model's configuration.
        folder: The model's folder, where the path of a table may start.
        model_keys: Keys that describe this kind of model, besides those of ``native``.

    Raises:
        ValueError: A key or a value is invalid, or does not fit the model.
        FileNotFoundError: There is no file of a table.
    """
    model_keys = MODEL_KEYS.union(model_keys, native or {}) - EXTENSION_KEYS - {"rope_theta"}
    request = RopeRequest.read(given, model_keys, folder)
    if native is None:
        # The file states the extended length beside an original one, and a base that is the model's own.
        native = {key: value for key, value in given.items() if key == "rope_theta" or key in model_keys}
        stated_length = request.options.get("original_max_position", stated_length)
        request = request.without(PLAIN_ROPE_OPTIONS)
    elif request.options.get("base") == native.get("rope_theta"):
        # Overrides of engines' own types have to repeat the base, so it does not start over from plain RoPE.
        request = request.without({"base"})
    if (of_file := ServedRope.of(native)) is not None:
        native, stated_length = of_file._seen_by_transformers(request.starts_over), of_file.stated_length
    own = _checked_native(native)
    stated_length = stated_length or length_read(own, None) or request.options.get("original_max_position")
    if stated_length is None:
        raise ValueError(
            "rope_parameters: original_max_position_embeddings must be given for this model: its configuration "
            "states no native length"
        )
    kept = {key: value for key, value in own.items() if key not in EXTENSION_KEYS}
    kept |= {key: value for key, value in given.items() if key in model_keys or key == "rope_theta"}
    written = {"request": request.to_dict(), "native": own, "stated_length": stated_length}
    parameters = {**kept, "rope_type": ROPE_TYPE, KEY: written}
    served = ServedRope.of(parameters)
    assert served is not None
    try:
        served.reaches  # noqa: B018 (builds the tables: what does not fit is refused before any worker starts)
    except (TypeError, ValueError) as error:
        raise ValueError(f"rope_parameters {_shortened(given)} do not fit the model: {error}") from None
    return parameters


def _checked_native(native: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's own parameters; raise ValueError where transformers does not compute the same."""
    own = {key: value for key, value in native.items() if key != "type"}
    own["rope_type"] = native.get("rope_type") or native.get("type") or "default"
    if own["rope_type"] not in NATIVE_TYPES:
        raise ValueError(
            f"rope_parameters must extend a model with rope_type {', '.join(NATIVE_TYPES)}, and this one has "
            f"{own['rope_type']!r}"
        )
    if unknown := sorted(ENGINE_KEYS & own.keys()):
        raise ValueError(
            f"rope_parameters must extend a model whose RoPE transformers computes alike, and this one sets "
            f"{', '.join(unknown)}"
        )
    return own


@contextlib.contextmanager
def _float32_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _as_transformers_reads(native: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that choose frequencies, for a head of which all components rotate."""
    parameters = {key: value for key, value in native.items() if key in REPLACED}
    if native.get(APPLY_YARN_SCALING) is False:
        parameters["attention_factor"] = 1.0
    if native.get("long_mscale") is not None:
        parameters["attention_factor"] = native["long_mscale"]
    return parameters


def _shortened(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters for a message: tables in JSON are long."""

    def short(value: Any) -> Any:
        if isinstance(value, list):
            return [short(item) for item in value]
        return "..." if isinstance(value, Mapping) else value

    return {key: short(value) for key, value in given.items()}
