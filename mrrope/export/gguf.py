"""Export of a frequency table into a GGUF file, for unmodified llama.cpp.

llama.cpp divides the frequencies of the llama architecture by the tensor ``rope_freqs.weight`` if the file has one, and
multiplies cos/sin by ``llama.rope.scaling.attn_factor``. The rest of the file is copied byte for byte.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import IO, Any

from mrrope.export.hf_config import exportable_tables, require_one_table
from mrrope.table_lookup import ModelTables, NativeRope
from mrrope.tables import FrequencyTable, frequency_table

ARCHITECTURE = "llama"
FACTORS = "rope_freqs.weight"

CONTEXT_LENGTH = "llama.context_length"
BASE = "llama.rope.freq_base"
DIMENSIONS = "llama.rope.dimension_count"
SCALING = "llama.rope.scaling."
ATTENTION_FACTOR = f"{SCALING}attn_factor"
ORIGINAL_LENGTH = f"{SCALING}original_context_length"
LEGACY_SCALE = "llama.rope.scale_linear"

# GGUF's type codes of metadata and tensors.
UINT32, FLOAT32 = 4, 6
FLOAT32_TENSOR = 0


def export_gguf(
    source: str | Path,
    destination: str | Path,
    method: str | ModelTables | Path,
    *,
    scale: float = 1.0,
    original_max_position: float | None = None,
    **options: Any,
) -> FrequencyTable:
    """Write a copy of a GGUF file with another frequency table, for llama.cpp.

    Args:
        source: A file of the llama architecture, of any quantization; it is not modified.
        destination: The file to write.
        method: A method's name, which extends the file's own frequencies; a ``FrequencyTable``; or the path of its
            JSON.
        scale: Factor by which a method extends the file's context length.
        original_max_position: The training length. If given, the extension starts from plain RoPE and ignores the
            file's own factors.
        **options: More arguments of ``frequency_table``.

    Returns:
        The table that was written.

    Raises:
        ValueError: An argument is invalid, or llama.cpp cannot express the result; the message says why.
        TypeError: An argument has the wrong type.
        FileNotFoundError: There is no file ``source``.
        ImportError: The package ``gguf`` is not installed.
    """
    source, destination = Path(source), Path(destination)
    reader = _read(source)
    if destination.exists() and destination.samefile(source):
        raise ValueError(f"destination must be another file than the source, got {destination} for both")
    _check_architecture(reader)
    tables = exportable_tables(_trained(reader, original_max_position), method, scale, options)
    table = require_one_table("llama.cpp", tables)
    unfinished = destination.with_name(f"{destination.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            _write(reader, file, table)
        os.replace(unfinished, destination)
    finally:
        unfinished.unlink(missing_ok=True)
    return table


def _read(source: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ImportError("GGUF files need the package gguf: pip install 'mrrope[gguf]'") from None
    if not source.is_file():
        raise FileNotFoundError(f"source must be a .gguf file, and there is no {source}")
    try:
        return GGUFReader(source)
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"{source} is not a GGUF file that can be read: {error}") from None


def _value(reader: Any, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _check_architecture(reader: Any) -> None:
    architecture = _value(reader, "general.architecture")
    if architecture != ARCHITECTURE:
        raise ValueError(
            f"llama.cpp cannot run {architecture} by another table: it divides frequencies by {FACTORS} in the "
            f"{ARCHITECTURE} architecture, and refuses files of others that hold such a tensor or ignores it"
        )
    if (parts := _value(reader, "split.count", 1)) > 1:
        raise ValueError(f"source must be one whole file, and this is one of {parts}: join them by llama-gguf-split")


def _trained(reader: Any, original_max_position: float | None) -> NativeRope:
    """Return the file's own RoPE: its factors, if it has any, up to its context length.

    With ``original_max_position`` it is plain RoPE at that length instead.
    """
    rotary_dim = _value(reader, DIMENSIONS)
    if rotary_dim is None:
        heads = _value(reader, "llama.attention.head_count")
        rotary_dim = _value(reader, "llama.attention.key_length") or _value(reader, "llama.embedding_length") // heads
    base, context = _value(reader, BASE, 10_000.0), _value(reader, CONTEXT_LENGTH)
    trained = original_max_position or _value(reader, ORIGINAL_LENGTH)
    if trained is None and context is None:
        raise ValueError(f"source must have a {CONTEXT_LENGTH}")
    factors = next((tensor.data.tolist() for tensor in reader.tensors if tensor.name == FACTORS), None)
    scaling = _value(reader, f"{SCALING}type", "none")
    if original_max_position is None and scaling not in ("none", "linear"):
        raise ValueError(f"source is extended by {scaling} already: give original_max_position, to start over")
    linear = _value(reader, f"{SCALING}factor", 1.0) if scaling == "linear" else _value(reader, LEGACY_SCALE, 1.0)
    if linear not in (0.0, 1.0):
        factors = [linear * factor for factor in factors or [1.0] * (rotary_dim // 2)]
    if factors is None or original_max_position is not None or context is None:
        return NativeRope(rotary_dim, base, trained or context, trained_length=trained)
    native = frequency_table(
        "longrope",
        rotary_dim=rotary_dim,
        base=base,
        original_max_position=context,
        factors=factors,
        attention_factor=_value(reader, ATTENTION_FACTOR, 1.0),
    )
    return NativeRope(rotary_dim, base, context, native, trained_length=trained)


def _write(reader: Any, file: IO[bytes], table: FrequencyTable) -> None:
    """Write the file's own bytes with new metadata, and the factors as a new tensor or in place of the old ones."""
    order = ">" if reader.endianess.name == "BIG" else "<"
    raw, alignment = memoryview(reader.data), int(reader.alignment)
    factors = struct.pack(f"{order}{table.rotary_dim // 2}f", *table.cumulative_scale.tolist())

    def text(value: str) -> bytes:
        return struct.pack(f"{order}Q", len(value)) + value.encode()

    def field_bytes(field: Any) -> bytes:
        return bytes(raw[field.offset : field.offset + sum(part.nbytes for part in field.parts)])

    length = max(int(table.original_max_position * table.scale), _value(reader, CONTEXT_LENGTH, 0))
    metadata = [
        field_bytes(field)
        for key, field in reader.fields.items()
        if not key.startswith(("GGUF.", SCALING)) and key not in (LEGACY_SCALE, CONTEXT_LENGTH, BASE)
    ]
    metadata += [
        text(CONTEXT_LENGTH) + struct.pack(f"{order}II", UINT32, length),
        text(BASE) + struct.pack(f"{order}If", FLOAT32, table.base),
        text(ATTENTION_FACTOR) + struct.pack(f"{order}If", FLOAT32, table.attention_factor),
    ]
    tensors = [field_bytes(tensor.field) for tensor in reader.tensors]
    data = raw[reader.data_offset :]
    padding = -len(data) % alignment
    old = next((tensor for tensor in reader.tensors if tensor.name == FACTORS), None)
    if old is None:
        offset = len(data) + padding
        tensors.append(text(FACTORS) + struct.pack(f"{order}IQIQ", 1, table.rotary_dim // 2, FLOAT32_TENSOR, offset))
        parts: list[memoryview | bytes] = [data, bytes(padding), factors, bytes(-len(factors) % alignment)]
    else:
        start = old.data_offset - reader.data_offset
        if old.tensor_type != FLOAT32_TENSOR or old.n_bytes != len(factors):
            raise ValueError(f"source must have a {FACTORS} of {table.rotary_dim // 2} float32 numbers or none")
        parts = [data[:start], factors, data[start + len(factors) :]]

    file.write(raw[:8])  # the magic number and the version
    file.write(struct.pack(f"{order}QQ", len(tensors), len(metadata)))
    file.writelines(metadata + tensors)
    file.write(bytes(-file.tell() % alignment))
    file.writelines(parts)
