"""What transformers leaves out of a GGUF file: the extension of its RoPE, and some of its tokenizer."""

from __future__ import annotations

import re
from typing import Any

from mrrope.evaluation.documents import encode
from mrrope.export.gguf_file import SINGLE_TABLE_TYPES, GgufFile
from mrrope.hf.rope_config import is_local
from mrrope.hf.rope_types import TABLE_TYPE
from mrrope.tables.lookup import NativeRope

WORD = re.compile("[▁Ġ]([a-z]{3,})")
"""A token that is a whole word with the space before it, as SentencePiece or GPT-2 write it."""
MAX_WORDS = 100
MAX_SPLIT = 0.1
"""Share of such words that may be split; a few tokens of any vocabulary are never reached."""


def take_over_rope(config: Any, file: GgufFile) -> None:
    """Give a configuration the frequencies and the attention factor of its GGUF file.

    transformers 5.17 reads ``rope.freq_base`` only, in all architectures but one. What it does read stays.

    Raises:
        ValueError: the file is extended by a type that no table of factors expresses.
    """
    parameters = getattr(config.get_text_config(), "rope_parameters", None)
    if not parameters:
        return
    by_layer_type = {None: parameters} if "rope_type" in parameters else parameters
    unextended = [
        own
        for layer_type, own in by_layer_type.items()
        if own.get("rope_type") == "default" and not is_local(layer_type)
    ]
    if unextended and file.scaling_type not in SINGLE_TABLE_TYPES:
        raise ValueError(
            f"model must be a GGUF file whose RoPE transformers reads, and it would read {file.path} as plain RoPE: "
            f"its extension is {file.scaling_type}; take the model's folder"
        )
    rope = file.rope() if unextended else None
    for own in unextended:
        own |= _table_parameters(rope)


def _table_parameters(rope: NativeRope | None) -> dict[str, Any]:
    """Return the ``rope_parameters`` of a RoPE; none for plain RoPE."""
    if rope is None or rope.native is None or rope.original_max_position is None:
        return {}
    trained = rope.trained_length or rope.original_max_position
    return {
        "rope_type": TABLE_TYPE,
        "table": rope.native.to_dict(),
        "factor": rope.original_max_position / trained,
        "original_max_position_embeddings": trained,
    }


def tokenizer_faults(tokenizer: Any, file: GgufFile) -> list[str]:
    """Return in what a tokenizer that transformers made of a GGUF file differs from the file's own token list."""
    tokens: list[str] = file.value("tokenizer.ggml.tokens", [])
    words = [(number, found[1]) for number, token in enumerate(tokens) if (found := WORD.fullmatch(token))][:MAX_WORDS]
    split = [word for number, word in words if encode(tokenizer, f"a {word}")[-1:] != [number]]
    faults = []
    if len(split) > MAX_SPLIT * len(words):
        faults.append(
            f"it splits {len(split)} of {len(words)} words that are one token in the file, such as {split[0]!r}"
        )
    first = file.value("tokenizer.ggml.bos_token_id")
    # Where the file does not say it, llama.cpp begins texts with the BOS token in SentencePiece models only.
    begins = file.value("tokenizer.ggml.add_bos_token", file.value("tokenizer.ggml.model") == "llama")
    if begins and first is not None and tokenizer("").input_ids[:1] != [first]:
        faults.append(f"it does not begin texts with {tokens[first]!r}")
    return faults
