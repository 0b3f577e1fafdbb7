"""Load a model and its tokenizer from a folder, the hub or a GGUF file."""

from __future__ import annotations

import contextlib
import functools
import os
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mrrope.evaluation.gguf_model import take_over_rope, tokenizer_faults
from mrrope.export.gguf_file import GgufFile
from mrrope.hf.registration import register_rope_types
from mrrope.reporting.optional_packages import needs
from mrrope.reporting.options import DTYPES

MAX_MESSAGE = 300
"""Characters quoted from another library's error message."""


def chosen_device(device: str | None = None) -> torch.device:
    """The given device; by default a GPU if there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device must be one that torch has here, got {device!r}: {_in_one_line(error)}") from None
    return chosen


def chosen_dtype(dtype: str | None, device: torch.device) -> torch.dtype:
    """The given dtype; by default bfloat16 on GPUs and float32 elsewhere."""
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    chosen: torch.dtype = getattr(torch, dtype)
    return chosen


def short_name(name: str | Path) -> str:
    """The name without folders, hub owner and ``.gguf``; the dot of a version number is no suffix."""
    return Path(name).name.removesuffix(".gguf")


def load(name: str | Path, *, dtype: str | None = None, device: str | None = None) -> tuple[Any, Any]:
    """Load a causal language model of transformers in eval mode, and its tokenizer.

    Registers mrrope's rope types (:func:`mrrope.register_rope_types`).

    Args:
        name: a model's folder, its name on the hub, or a ``.gguf`` file.
        dtype: ``float32``, ``bfloat16`` or ``float16``; by default bfloat16 on GPUs and float32 elsewhere.
        device: a torch device; by default a GPU if there is one.

    Warns:
        UserWarning: the tokenizer that transformers makes of a ``.gguf`` file differs from the file's own.

    Raises:
        ValueError: the model cannot be loaded.
        ImportError: the extra ``eval`` is not installed.
    """
    with needs("transformers"):
        import transformers
    register_rope_types()  # the configuration may name one
    place = chosen_device(device)
    kind = chosen_dtype(dtype, place)
    source, options = _source(name)
    try:
        with _gguf_parsed_once() if options else contextlib.nullcontext():
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
            config = transformers.AutoConfig.from_pretrained(source, **options)
            if options:
                _complete(name, config, tokenizer)
            model = transformers.AutoModelForCausalLM.from_pretrained(source, config=config, dtype=kind, **options)
    # A broken file makes transformers raise almost any exception; name the model.
    except Exception as error:
        where = "" if Path(name).exists() else ", which is no folder here,"
        raise ValueError(f"model {name}{where} cannot be loaded: {_in_one_line(error)}") from error
    # Suppress the warning about texts beyond the trained length, which are the purpose here.
    tokenizer.model_max_length = int(1e30)
    return model.to(place).eval(), tokenizer


def _source(name: str | Path) -> tuple[str, dict[str, str]]:
    """Return what transformers loads, and the options of a GGUF file; raise ValueError where there is nothing."""
    path = Path(name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"model must be a file that exists, and there is no {path}")
        with needs("gguf"):
            import gguf  # noqa: F401
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"model must be a folder with a config.json, and {path} has none")
    if path.is_file():
        raise ValueError(f"model must be a folder, a name on the hub or a .gguf file, got the file {path}")
    # Names on the hub are OWNER/MODEL or MODEL.
    is_hub_name = not path.is_absolute() and len(path.parts) <= 2 and str(name)[:1] not in (".", "~")
    is_hub_name = is_hub_name and not str(name).endswith(os.sep)
    if not path.exists() and not is_hub_name:
        raise ValueError(f"model must be a folder, a name on the hub or a .gguf file, and there is no folder {path}")
    return str(name), {}


@contextlib.contextmanager
def _gguf_parsed_once() -> Iterator[None]:
    """Let transformers parse a GGUF file's metadata once, and map its tensors' names once.

    It does the former four times and the latter for every module: half of the 40 s that SmolLM2 took to load.
    """
    import gguf

    reader, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
    of_file = functools.cache(reader)
    gguf.GGUFReader = lambda path, *args: of_file(os.path.realpath(path), *args)
    gguf.get_tensor_name_map = functools.cache(name_map)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, name_map


def _complete(name: str | Path, config: Any, tokenizer: Any) -> None:
    """Add to a configuration what transformers leaves out of a GGUF file, and warn of a tokenizer that differs."""
    file = GgufFile(name)
    take_over_rope(config, file)
    if faults := tokenizer_faults(tokenizer, file):
        warnings.warn(
            f"transformers makes another tokenizer of {name} than the file's own: {'; '.join(faults)}. What the model "
            "reads is not the text it was trained on; take the model's folder",
            UserWarning,
            stacklevel=3,
        )


def _in_one_line(error: BaseException) -> str:
    # Not just the first line, which may be the beginning of a list.
    return textwrap.shorten(str(error), MAX_MESSAGE, placeholder=" ...") or type(error).__name__
