"""Export of a frequency table into a GGUF file, for unmodified llama.cpp.

llama.cpp divides the frequencies of some architectures by the tensor ``rope_freqs.weight`` if the file has one, and
multiplies cos/sin by ``rope.scaling.attn_factor``. The rest of the file is copied byte for byte.
"""

from __future__ import annotations

import os
import struct
import warnings
from pathlib import Path
from typing import IO, Any

from mrrope.export.gguf_file import (
    ATTENTION_FACTOR,
    BASE,
    CONTEXT_LENGTH,
    FACTORS,
    LEGACY_SCALE,
    LONGROPE_FACTORS,
    ORIGINAL_LENGTH,
    ROTATES,
    SCALING,
    GgufFile,
)
from mrrope.export.hf_config import exportable_tables, require_one_table
from mrrope.tables.frequency_table import FrequencyTable
from mrrope.tables.lookup import PLAIN_ROPE_OPTIONS, ModelTables

ARCHITECTURES = (
    *("llama", "llama4", "deci", "arcee", "mistral3", "apertus", "exaone", "exaone4"),
    *("exaone-moe", "granite", "granitemoe", "granite_swa", "minicpm", "nanbeige"),
)
"""Architectures whose code in llama.cpp loads ``rope_freqs.weight`` and rotates every layer with RoPE by it.

From ``src/models/*.cpp`` of llama.cpp: the file creates ``LLM_TENSOR_ROPE_FREQS`` and its graph, or the one that it
shares with another architecture, passes ``get_rope_factors`` to ``ggml_rope_ext``. Others refuse a file with such a
tensor (Qwen, Gemma 3), or load it and rotate without it (Falcon-H1, LLaDA, Pangu).
"""

CONTEXT_SHIFT = (
    "llama.cpp's context shift multiplies every cached key by the attention factor again, here {factor:.6g}: run it "
    "with --no-context-shift, the default of current versions, and without --cache-reuse"
)

# GGUF's type codes of metadata and tensors.
UINT32, FLOAT32 = 4, 6
FLOAT32_TENSOR = 0


def export_gguf(
    source: str | Path,
    destination: str | Path,
    method: str | ModelTables | Path,
    *,
    scale: float | None = None,
    original_max_position: float | None = None,
    **options: Any,
) -> FrequencyTable:
    """Write a copy of a GGUF file with another frequency table, for llama.cpp.

    Args:
        source: A file of any quantization, of an architecture that takes such a table; it is not modified.
        destination: The file to write.
        method: A method's name, which extends the file's own frequencies; a ``FrequencyTable``; or the path of its
            JSON.
        scale: Factor by which a method extends the file's context length; required with one that extends. Ready
            tables have their own.
        original_max_position: The training length. If given, the extension starts from plain RoPE and ignores the
            file's own factors.
        **options: More arguments of ``frequency_table``.

    Returns:
        The table that was written.

    Warns:
        UserWarning: The file is extended already, which may be meant to be replaced instead of extended; or the table
            has an attention factor, which llama.cpp's context shift would apply again.

    Raises:
        ValueError: An argument is invalid, or llama.cpp cannot express the result; the message says why.
        TypeError: An argument has the wrong type.
        FileNotFoundError: There is no file ``source``.
        ImportError: The package ``gguf`` is not installed.
    """
    file, destination = GgufFile(source), Path(destination)
    if destination.exists() and destination.samefile(file.path):
        raise ValueError(f"destination must be another file than the source, got {destination} for both")
    _check_source(file)
    rope = file.rope(original_max_position)
    table = require_one_table("llama.cpp", exportable_tables(rope, method, scale, options))
    warning = rope.extension_warning(file.path.name, scale)
    if warning is not None and options.keys().isdisjoint(PLAIN_ROPE_OPTIONS):
        warnings.warn(warning, UserWarning, stacklevel=2)
    if table.attention_factor != 1.0:
        warnings.warn(CONTEXT_SHIFT.format(factor=table.attention_factor), UserWarning, stacklevel=2)
    unfinished = destination.with_name(f"{destination.name}.unfinished")
    try:
        with unfinished.open("wb") as output:
            _write(file, output, table)
        os.replace(unfinished, destination)
    finally:
        unfinished.unlink(missing_ok=True)
    return table


def _check_source(file: GgufFile) -> None:
    """Raise ValueError where llama.cpp would not rotate a copy by another table."""

    def cannot(why: str) -> ValueError:
        return ValueError(f"llama.cpp cannot run {file.architecture} by another table: {why}")

    if file.architecture not in ARCHITECTURES:
        raise cannot(
            f"it divides frequencies by {FACTORS} in the architectures {', '.join(ARCHITECTURES)}, and refuses files "
            "of others that hold such a tensor or ignores it"
        )
    if file.architecture in ("granite", "granitemoe") and file.of_model(ROTATES, True) is False:
        raise cannot("the file says that it does not rotate")
    if any(file.tensor(name) is not None for name in LONGROPE_FACTORS):
        raise cannot(
            f"the file holds the factors of longrope, {' and '.join(LONGROPE_FACTORS)}, which it takes instead"
        )
    if (parts := file.value("split.count", 1)) > 1:
        raise ValueError(f"source must be one whole file, and this is one of {parts}: join them by llama-gguf-split")


def _write(source: GgufFile, file: IO[bytes], table: FrequencyTable) -> None:
    """Write the file's own bytes with new metadata, and the factors as a new tensor or in place of the old ones."""
    reader = source.reader
    order = ">" if reader.endianess.name == "BIG" else "<"
    raw, alignment = memoryview(reader.data), int(reader.alignment)
    factors = struct.pack(f"{order}{table.rotary_dim // 2}f", *table.cumulative_scale.tolist())

    def text(value: str) -> bytes:
        return struct.pack(f"{order}Q", len(value)) + value.encode()

    def field_bytes(field: Any) -> bytes:
        return bytes(raw[field.offset : field.offset + sum(part.nbytes for part in field.parts)])

    length = max(int(table.original_max_position * table.scale), source.of_model(CONTEXT_LENGTH, 0))
    replaced = {source.full_key(key) for key in (LEGACY_SCALE, CONTEXT_LENGTH, BASE)}
    scaling, kept = source.full_key(SCALING), source.full_key(ROTATES)
    metadata = [
        field_bytes(field)
        for key, field in reader.fields.items()
        if key == kept or not (key.startswith(("GGUF.", scaling)) or key in replaced)
    ]
    numbers: list[tuple[str, str, int, float]] = [
        (CONTEXT_LENGTH, "I", UINT32, length),
        (BASE, "f", FLOAT32, table.base),
        (ATTENTION_FACTOR, "f", FLOAT32, table.attention_factor),
    ]
    if source.original_length is not None:
        numbers.append((ORIGINAL_LENGTH, "I", UINT32, source.original_length))
    metadata += [
        text(source.full_key(key)) + struct.pack(f"{order}I{form}", kind, value) for key, form, kind, value in numbers
    ]
    tensors = [field_bytes(tensor.field) for tensor in reader.tensors]
    data = raw[reader.data_offset :]
    padding = -len(data) % alignment
    old = source.tensor(FACTORS)
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
