"""The rope layer that an engine's models get for one of mrrope's rope types: 64-bit phases, several tables, our ops."""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import mrrope.ops  # noqa: F401 (registers the ops)
from mrrope.hf.auto_scale.ladder import Ladder
from mrrope.ops.decompositions import RADIANS_PER_PHASE_UNIT
from mrrope.serving.mark import ROPE_TYPE
from mrrope.serving.rope_settings import ServedRope
from mrrope.tables.frequency_table import FrequencyTable, words_per_head
from mrrope.tables.lookup import ModelTables
from mrrope.tables.position_rows import packed_rows, rows_of_sections
from mrrope.tables.query_factors import bits_of_factors, factor_rows
from mrrope.tables.table_set import OfOneLayer

CACHE_ROWS_AT_ONCE = 1 << 16
"""Rows of ``cos_sin_cache`` computed at a time: float64 intermediates of all rows would take gigabytes."""


class ServedRotaryEmbedding(nn.Module):
    """Rotates q and k by one table, or by the table of each token. Has the interface of engines' ``RotaryEmbedding``.

    ``is_neox_style`` is read in every call: some models of the engines set it after construction.
    """

    tables: torch.Tensor | None
    """Packed tables, int64: ``[words]``, ``[tables, words]``, with M-RoPE ``[tables, 2, words]``; of key heads with a
    table each ``[tables, 1 or 2, heads, words]``, and more rows with the factors of query heads. None where the ladder
    holds tables per layer or head: :func:`mrrope.serving.layer_tables.with_tables_of_layer` returns the layers that
    rotate."""
    query_heads: int | None
    """Number of query heads that have a factor each; None without factors."""
    _cos_sin_cache: torch.Tensor | None
    table_index: torch.Tensor | None
    """The table of each token slot, int32; None with one table. Set after loading, before the first call."""

    def __init__(
        self,
        ladder: Ladder[ModelTables],
        *,
        head_size: int,
        max_position: int,
        is_neox_style: bool,
        dtype: torch.dtype,
        mrope_section: Sequence[int] | None = None,
        mrope_interleaved: bool = False,
    ) -> None:
        """Build the layer on torch's default device.

        Args:
            ladder: The tables.
            head_size: Components of a head; those past the tables' rotary_dim are copied.
            max_position: Number of positions in ``cos_sin_cache``.
            is_neox_style: Whether pairs are halves (Llama) or interleaved (GPT-J).
            dtype: Of ``cos_sin_cache``.
            mrope_section: Pairs that each row of positions rotates (M-RoPE).
            mrope_interleaved: Whether pairs of the rows alternate, as in Qwen3-VL, or follow each other.

        Raises:
            ValueError: ``mrope_section`` does not cover the tables' pairs.
        """
        super().__init__()
        self.ladder = ladder
        self.head_size = head_size
        self.rotary_dim = ladder.tables[0].rotary_dim
        self.base = ladder.tables[0].base
        self.max_position_embeddings = max_position
        self.is_neox_style = is_neox_style
        self.dtype = dtype
        self.mrope_section = list(mrope_section) if mrope_section else None
        self.mrope_interleaved = mrope_interleaved
        # Engines that sleep save and restore buffers; casts of the model leave integers alone.
        for name in ("tables", "table_index", "_cos_sin_cache"):
            self.register_buffer(name, None, persistent=False)
        self.query_heads = None
        shared = [table for table in ladder.tables if isinstance(table, FrequencyTable)]
        if len(shared) == len(ladder.tables):
            self.tables = self._packed(shared, key_heads=1)

    def with_tables(
        self, tables: Sequence[OfOneLayer], key_heads: int, query_heads: int | None = None
    ) -> ServedRotaryEmbedding:
        """Return a copy of this layer with other tables, of the same lengths.

        Args:
            tables: The tables.
            key_heads: Number of key heads that have a table each; 1 where one table rotates all heads.
            query_heads: Number of query heads that have a factor each; 1 in tables without. None for no factors.
        """
        own = copy.copy(self)
        own._buffers = dict(self._buffers)  # copy.copy of a module shares the dict of buffers.
        own.ladder = replace(self.ladder, tables=tuple(tables))
        own.query_heads = query_heads
        own.tables = self._packed(tables, key_heads, query_heads)
        return own

    def _packed(self, tables: Sequence[OfOneLayer], key_heads: int, query_heads: int | None = None) -> torch.Tensor:
        """Return tables in the form of fewest dimensions that holds them, as the kernels of that form are faster."""
        per_head = [words_per_head(table.packed(torch.device("cpu"))).expand(key_heads, -1) for table in tables]
        words = torch.stack(per_head)
        rows = [words]
        if self.mrope_section:
            sources = position_rows(self.mrope_section, self.mrope_interleaved, self.rotary_dim // 2)
            rows.append(packed_rows(sources).expand_as(words))
        elif query_heads is not None:
            rows.append(torch.zeros_like(words))  # factors begin in the row after those of positions
        packed = torch.stack(rows, dim=1)
        if query_heads is not None:
            bits = [bits_of_factors(table.query_factors or (1.0,) * query_heads) for table in tables]
            packed = torch.cat([packed, torch.stack([factor_rows(own, *words.shape[1:]) for own in bits])], dim=1)
        elif key_heads == 1:
            packed = packed[:, :, 0] if self.mrope_section else words[0, 0] if len(tables) == 1 else words[:, 0]
        return packed.contiguous().to(torch.get_default_device())

    def forward(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        fused_set_kv_buffer_arg: object | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotate q and k: in place in eager mode, out of place in compiled graphs.

        In engines' compiled graphs, which reinplace their own ops only, an in-place op costs two copies of qkv a layer.

        Args:
            positions: ``[tokens]``, or ``[rows, tokens]`` with M-RoPE.
            query: ``[tokens, heads * head_size]`` or ``[tokens, heads, head_size]``.
            key: Like ``query``, or None.
            offsets: Must be None.
            fused_set_kv_buffer_arg: Must be None: SGLang's models pass it where their kernel also writes the cache.

        Returns:
            The rotated query and key in their shapes.

        Raises:
            ValueError: ``offsets`` or ``fused_set_kv_buffer_arg`` is given, or ``query`` has another number of heads
                than there are query factors.
            RuntimeError: There are several tables and ``table_index`` is not set.
        """
        for name, given in (("offsets", offsets), ("fused_set_kv_buffer_arg", fused_set_kv_buffer_arg)):
            if given is not None:
                raise ValueError(f"{name} must be None, got {type(given).__name__}")
        heads = [self._by_head(x) for x in (query, key) if x is not None]
        if self.query_heads not in (None, heads[0].shape[1]):
            raise ValueError(
                f"query must have {self.query_heads} heads, one for each of the table's query_factors, got "
                f"{heads[0].shape[1]}"
            )
        table_index = self._token_tables(positions.shape[-1])
        layout = "thd"
        if self.mrope_section and positions.dim() == 2:
            # Rows of positions need a layout with sequences; one token each, so that the index stays one per token.
            layout, positions, heads = "bshd", positions.unsqueeze(-1), [x.unsqueeze(1) for x in heads]
        else:
            positions = positions.flatten()
        pairing = "halves" if self.is_neox_style else "interleaved"
        arguments = (heads, positions, self.tables, layout, pairing)
        if not torch.compiler.is_compiling():
            torch.ops.mrrope.rotary_.default(*arguments, table_index=table_index)
            return query, key
        rotated = torch.ops.mrrope.rotary.default(*arguments, table_index=table_index)
        return rotated[0].view(query.shape), None if key is None else rotated[1].view(key.shape)

    # Some models name the implementation they call.
    forward_native = forward
    forward_cuda = forward

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        # No -1 in the shape, which is ambiguous without tokens.
        return x if x.dim() == 3 else x.view(x.shape[0], x.shape[1] // self.head_size, self.head_size)

    def _token_tables(self, tokens: int) -> torch.Tensor | None:
        if self.ladder.is_fixed:
            return None
        if self.table_index is None:
            raise RuntimeError(
                f"table_index must be set before the first call of a layer with {len(self.ladder.tables)} tables, "
                "got None: this model runner is not one that the plugin of mrrope knows"
            )
        return self.table_index[:tokens]

    @property
    def cos_sin_cache(self) -> torch.Tensor:
        """Cosines and sines of all positions, ``[max_position, rotary_dim]``, for models whose own kernels read them.

        Computed at the first access from 64-bit phases, times the attention factor, and rounded once.

        Raises:
            NotImplementedError: There are several tables.
        """
        if self._cos_sin_cache is None:
            if self.tables is None or self.tables.dim() == 4:
                raise NotImplementedError(
                    f"cos_sin_cache holds one table, and this layer has {self.ladder.tables[-1]!r}: the model's kernel "
                    "reads the cache, so table must be one for all layers and heads in rope_parameters"
                )
            if not self.ladder.is_fixed:
                raise NotImplementedError(
                    f"cos_sin_cache holds one table, and this layer has {len(self.ladder.tables)}: the model's kernel "
                    'reads the cache, so factor must be a number in rope_parameters, got "auto"'
                )
            self._cos_sin_cache = self._computed_cache(self.tables if self.tables.dim() == 1 else self.tables[0, 0])
        return self._cos_sin_cache

    def _computed_cache(self, words: torch.Tensor) -> torch.Tensor:
        turns, factor = words[:-1], words[-1:].view(torch.float64)
        device = words.device
        cache = torch.empty(self.max_position_embeddings, self.rotary_dim, dtype=self.dtype, device=device)
        for start in range(0, len(cache), CACHE_ROWS_AT_ONCE):
            rows = cache[start : start + CACHE_ROWS_AT_ONCE]
            positions = torch.arange(start, start + len(rows), device=device)
            # Overflow drops whole revolutions.
            angles = (positions[:, None] * turns).double() * RADIANS_PER_PHASE_UNIT
            rows.copy_(torch.cat([angles.cos(), angles.sin()], dim=-1) * factor)
        return cache

    def extra_repr(self) -> str:
        """Return the settings as ``print(model)`` shows them."""
        kinds = [getattr(table, "method", type(table).__name__) for table in self.ladder.tables]
        tables = ", ".join(f"{kind} {table.scale:g}" for kind, table in zip(kinds, self.ladder.tables, strict=True))
        return (
            f"head_size={self.head_size}, rotary_dim={self.rotary_dim}, base={self.base:g}, "
            f"is_neox_style={self.is_neox_style}, tables=[{tables}]"
        )


def position_rows(sections: Sequence[int], interleaved: bool, pairs: int) -> torch.Tensor:
    """Return the row of positions that rotates each pair, int64 ``[pairs]``.

    Args:
        sections: Pairs of each row.
        interleaved: As in :func:`mrrope.tables.position_rows.rows_of_sections`.
        pairs: Number of pairs.

    Raises:
        ValueError: The sections do not cover the pairs.
    """
    if sum(sections) != pairs:
        raise ValueError(f"mrope_section must have a sum of rotary_dim / 2, {pairs}, got {list(sections)}")
    return torch.tensor(rows_of_sections(sections, interleaved), dtype=torch.int64, device="cpu")


def served_layers(model: nn.Module) -> Iterator[ServedRotaryEmbedding]:
    """Yield the rope layers of this package in a model, each once."""
    return (module for module in model.modules() if isinstance(module, ServedRotaryEmbedding))


_layers: dict[int, weakref.WeakValueDictionary[tuple[Any, ...], ServedRotaryEmbedding]] = {}
"""The live layers by their settings, for each model that is alive, by the id of its configuration."""


def _layers_of(config: Any) -> weakref.WeakValueDictionary[tuple[Any, ...], ServedRotaryEmbedding]:
    """Return the layers of one model. Two engines in one process share none: each has a table_index of its own."""
    if id(config) not in _layers:
        _layers[id(config)] = weakref.WeakValueDictionary()
        weakref.finalize(config, _layers.pop, id(config))
    return _layers[id(config)]


def rope_layer(
    config: Any,
    rope_parameters: dict[str, Any],
    *,
    head_size: int,
    max_position: int,
    is_neox_style: bool,
    dtype: torch.dtype,
) -> ServedRotaryEmbedding:
    """Return the layer of merged ``rope_parameters``. Equal settings of one model and device share a layer.

    Engines also build a model on the meta device, to see its shapes: kernels do nothing with tables of that device.

    Args:
        config: The engine's configuration, which stands for the model; None where nothing is shared.
        rope_parameters: As :func:`mrrope.serving.rope_settings.merged` returns them.
        head_size: Components of a head.
        max_position: Number of positions that the engine expects; the tables' length if that is larger.
        is_neox_style: Whether pairs are halves (Llama) or interleaved (GPT-J).
        dtype: Of ``cos_sin_cache``.

    Raises:
        ValueError: The parameters do not fit the model.
    """
    device = torch.get_default_device()
    key = (head_size, max_position, is_neox_style, dtype, device, json.dumps(rope_parameters, sort_keys=True))
    layer = None if config is None else _layers_of(config).get(key)
    if layer is None:
        layer = _new_layer(rope_parameters, head_size, max_position, is_neox_style, dtype)
    if config is not None:
        _layers_of(config)[key] = layer
    return layer


def _new_layer(
    rope_parameters: dict[str, Any], head_size: int, max_position: int, is_neox_style: bool, dtype: torch.dtype
) -> ServedRotaryEmbedding:
    rope_type = rope_parameters.get("rope_type")
    if rope_type != ROPE_TYPE:
        raise ValueError(
            f"rope_type must still be {ROPE_TYPE!r} where the model builds its rope, got {rope_type!r}: this model "
            "replaces it by a type of its own, so mrrope cannot serve it"
        )
    if rope_parameters.get("use_fope"):
        raise ValueError("use_fope must be off with a rope type of mrrope, got true: the model does not rotate pairs")
    served = ServedRope.of(rope_parameters)
    assert served is not None
    rotary_dim = _rotary_dim(rope_parameters, head_size)
    ladder = served.ladder(rotary_dim)
    for table in ladder.tables:
        if table.rotary_dim != rotary_dim:
            raise ValueError(f"rope_parameters must give tables of the model's rotary_dim {rotary_dim}, got {table!r}")
    return ServedRotaryEmbedding(
        ladder,
        head_size=head_size,
        max_position=max(max_position, served.max_length),
        is_neox_style=is_neox_style,
        dtype=dtype,
        mrope_section=rope_parameters.get("mrope_section"),
        mrope_interleaved=rope_parameters.get("mrope_interleaved", False),
    )


def _rotary_dim(rope_parameters: dict[str, Any], head_size: int) -> int:
    """Return the number of rotated components: stated outright, or as a part of a head."""
    stated: int | None = rope_parameters.get("rope_dim")
    return stated or int(head_size * rope_parameters.get("partial_rotary_factor", 1.0))
