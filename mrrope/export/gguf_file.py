"""GGUF files: their metadata, and their RoPE as llama.cpp reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mrrope.tables.frequency_table import frequency_table
from mrrope.tables.lookup import NativeRope

FACTORS = "rope_freqs.weight"
"""The tensor by which llama.cpp divides the frequencies."""
LONGROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
"""The tensors of ``longrope``, of which llama.cpp takes one by the context that it is started with."""

SINGLE_TABLE_TYPES = ("none", "linear")
"""Types of extension that a table of factors expresses."""

CONTEXT_LENGTH = "context_length"
BASE = "rope.freq_base"
DIMENSIONS = "rope.dimension_count"
SCALING = "rope.scaling."
ATTENTION_FACTOR = f"{SCALING}attn_factor"
ORIGINAL_LENGTH = f"{SCALING}original_context_length"
ROTATES = f"{SCALING}finetuned"
"""Whether a model of Granite's architectures rotates at all."""
LEGACY_SCALE = "rope.scale_linear"


class GgufFile:
    """A GGUF file. Keys of the model are given without the architecture that they start with in the file."""

    def __init__(self, path: str | Path) -> None:
        """Read the metadata; tensors stay on disk.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not a GGUF file.
            ImportError: the package ``gguf`` is not installed.
        """
        try:
            from gguf import GGUFReader
        except ImportError:
            raise ImportError("GGUF files need the package gguf: pip install 'mrrope[gguf]'") from None
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"source must be a .gguf file, and there is no {self.path}")
        try:
            self.reader: Any = GGUFReader(self.path)
        except (ValueError, KeyError, IndexError) as error:
            raise ValueError(f"{self.path} is not a GGUF file that can be read: {error}") from None
        self.architecture = str(self.value("general.architecture"))

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key, as the file has it."""
        field = self.reader.get_field(key)
        return default if field is None else field.contents()

    def full_key(self, key: str) -> str:
        """A key of the model, as the file has it."""
        return f"{self.architecture}.{key}"

    def of_model(self, key: str, default: Any = None) -> Any:
        """The value of a key of the model."""
        return self.value(self.full_key(key), default)

    def tensor(self, name: str) -> Any:
        """A tensor of gguf's reader, or None."""
        return next((tensor for tensor in self.reader.tensors if tensor.name == name), None)

    @property
    def original_length(self) -> int | None:
        """The length before an extension, to which llama.cpp also ties the temperature of Mistral 3's attention."""
        length: int | None = self.of_model(ORIGINAL_LENGTH) or self.of_model(CONTEXT_LENGTH)
        return length

    @property
    def scaling_type(self) -> str:
        """The type of extension beside a tensor of factors: ``none``, ``linear``, ``yarn``, ``longrope``."""
        if any(self.tensor(name) is not None for name in LONGROPE_FACTORS):
            return "longrope"
        # llama.cpp's default; without a factor it changes nothing.
        return str(self.of_model(f"{SCALING}type", "linear"))

    def rope(self, original_max_position: float | None = None) -> NativeRope:
        """The file's own RoPE: its factors, if it has any, up to its context length.

        Args:
            original_max_position: the training length. If given, the RoPE is plain RoPE at that length instead.

        Raises:
            ValueError: the file does not say how it rotates, or by a type that has no single table.
        """
        rotary_dim, base = self._rotary_dim(), self.of_model(BASE, 10_000.0)
        trained, context = self.of_model(ORIGINAL_LENGTH), self.of_model(CONTEXT_LENGTH)
        if original_max_position is not None:
            return NativeRope(rotary_dim, base, original_max_position, trained_length=original_max_position)
        if trained is None and context is None:
            raise ValueError(f"source must have a {self.full_key(CONTEXT_LENGTH)}")
        factors, attention_factor = self._factors(rotary_dim // 2), self.of_model(ATTENTION_FACTOR, 1.0)
        if context is None or (attention_factor == 1.0 and all(factor == 1.0 for factor in factors)):
            return NativeRope(rotary_dim, base, trained or context, trained_length=trained)
        native = frequency_table(
            "longrope",
            rotary_dim=rotary_dim,
            base=base,
            original_max_position=context,
            factors=factors,
            attention_factor=attention_factor,
        )
        extension = f"{FACTORS}, from {trained} to {context} tokens" if trained and trained < context else None
        return NativeRope(rotary_dim, base, context, native, trained_length=trained, untrained_extension=extension)

    def _rotary_dim(self) -> int:
        heads = self.of_model("attention.head_count")
        width = self.of_model("embedding_length")
        per_head = width // heads if isinstance(heads, int) and isinstance(width, int) else None
        rotary_dim: int | None = self.of_model(DIMENSIONS) or self.of_model("attention.key_length") or per_head
        if rotary_dim is None:
            raise ValueError(f"source must have a {self.full_key(DIMENSIONS)}")
        return rotary_dim

    def _factors(self, pairs: int) -> list[float]:
        """Return what llama.cpp divides the frequency of every pair by."""
        scaling = self.scaling_type
        if scaling not in SINGLE_TABLE_TYPES:
            raise ValueError(f"source is extended by {scaling} already: give original_max_position, to start over")
        linear = self.of_model(f"{SCALING}factor", self.of_model(LEGACY_SCALE, 1.0)) if scaling == "linear" else 1.0
        tensor = self.tensor(FACTORS)
        factors = [1.0] * pairs if tensor is None else tensor.data.tolist()
        return [(linear or 1.0) * factor for factor in factors]
