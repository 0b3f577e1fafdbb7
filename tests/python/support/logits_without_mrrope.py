"""Script: logits of exported models by transformers alone, in a process that never imports mrrope."""

import sys
from pathlib import Path

import torch
import transformers
from tiny_models import inputs, tokens


@torch.no_grad()
def logits_of(folder: Path, lengths: list[int]) -> list[torch.Tensor]:
    """Return the logits of one forward per length, all of the same model."""
    config = transformers.AutoConfig.from_pretrained(folder)
    weights = torch.load(folder / "weights.pt")
    # Attention implementations of some models give different logits.
    model_class = getattr(transformers, weights["class"])
    model = model_class._from_config(config, attn_implementation=weights["attention"]).eval()
    model.load_state_dict(weights["state"])
    return [model(**inputs(model, tokens(1, length))).logits for length in lengths]


def main(folder: Path, lengths: list[int]) -> None:
    """Write the logits beside each exported config, or the error that transformers raised."""
    transformers.logging.set_verbosity_error()
    for path in sorted(folder.iterdir()):
        try:
            found: list[torch.Tensor] | str = logits_of(path, lengths)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        torch.save(found, path / "logits.pt")
    assert "mrrope" not in sys.modules


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(length) for length in sys.argv[2:]])
