"""A model and its tokenizer, from a folder, a name or a GGUF file."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import torch

from mrrope.reporting.optional_packages import needs

MOST_SAID = 300
"""Characters of what another library says."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def chosen_device(device: str | None = None) -> torch.device:
    """The one asked for, or a GPU where there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device must be one that torch has here, got {device!r}: {_in_one_line(error)}") from None
    return chosen


def chosen_dtype(dtype: str | None, device: torch.device) -> torch.dtype:
    """The one asked for, or what the device is fast at."""
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


def short_name(name: str | Path) -> str:
    """Without the path, the owner on the hub and the ending of a file; a version with a dot in it is no ending."""
    return Path(name).name.removesuffix(".gguf")


def load(name: str | Path, *, dtype: str | None = None, device: str | None = None) -> tuple[Any, Any]:
    """A causal language model of transformers, ready to read, and its tokenizer.

    Args:
        name: a model's folder, its name on the hub, or a ``.gguf`` file.
        dtype: ``float32``, ``bfloat16`` or ``float16``; bfloat16 on GPUs and float32 elsewhere unless given.
        device: as torch names it; a GPU where there is one unless given.

    Raises:
        ValueError: saying what cannot be loaded, and why.
        ImportError: where the extra ``eval`` is not installed.
    """
    with needs("transformers"):
        import transformers
    place = chosen_device(device)
    kind = chosen_dtype(dtype, place)
    path = Path(name)
    source, options = str(name), {}
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"model must be a file that exists, and there is no {path}")
        with needs("gguf"):
            import gguf  # noqa: F401
        source, options = str(path.parent), {"gguf_file": path.name}
    elif path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"model must be a folder with a config.json, and {path} has none")
    elif path.is_file():
        raise ValueError(f"model must be a folder, a name on the hub or a .gguf file, got the file {path}")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=kind, **options)
    # Whatever a broken file makes transformers raise, the user wants to know which model it was.
    except Exception as error:
        raise ValueError(f"model {name} cannot be loaded: {_in_one_line(error)}") from error
    # It would remark that texts are longer than the model was trained on; that is the point here.
    tokenizer.model_max_length = int(1e30)
    return model.to(place).eval(), tokenizer


def _in_one_line(error: BaseException) -> str:
    # The first line alone may be the beginning of a list.
    return textwrap.shorten(str(error), MOST_SAID, placeholder=" ...") or type(error).__name__
