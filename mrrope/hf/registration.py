"""``register_rope_types``: configurations of transformers that name mrrope's types, and models with their tables."""

from __future__ import annotations

import importlib

from mrrope.hf.embedded_tables import patch_models_as_configured
from mrrope.hf.rope_types import register_types


def register_rope_types() -> None:
    """Register ``mrrope_pro``, ``mrrope_uni``, ``mrrope_pow``, ``yarn_ratio`` and ``mrrope`` as a ``rope_type``.

    Call it before a configuration that names one of them is loaded or built: ``import mrrope`` changes nothing in
    transformers. This imports transformers and stays for the whole process; calling it again has no effect.

    The ``rope_parameters`` are ``rope_type``, ``rope_theta``, ``factor``, ``original_max_position_embeddings``, and
    ``power`` for ``mrrope_pow``. Optional are ``partial_rotary_factor``, ``beta_slow``, ``beta_fast``, ``bounds`` and
    ``attention_factor``. Names and meanings are those of transformers' ``yarn``.

    ``mrrope`` takes ready tables as ``table``: a dict of ``to_dict``, the path of a JSON, or the name of shipped ones.
    Models with head tables or a set are patched when they are built or loaded: ``PreTrainedModel.post_init`` and
    ``from_pretrained`` are wrapped, and leave models of other configurations alone. Phi-3 and its relatives keep their
    cache with all of these types.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers is older than 5.0.
    """
    register_types()
    patch_models_as_configured(importlib.import_module("transformers.modeling_utils"))
