"""Perplexity of scale="auto": by length, beside fixed scales and truncation, and across a change of scale.

    python studies/auto_scale_study.py lengths MODEL TEXTS [--documents 9] [--output benchmarks/results/NAME]
    python studies/auto_scale_study.py step MODEL TEXTS [--documents 1] [--output benchmarks/results/NAME]

MODEL is a folder, a name on the hub or a .gguf file. TEXTS is a file or folder as for mrrope eval, with documents as
long as the longest length. ``lengths`` prints a table and writes NAME_lengths.json and .png. ``step`` decodes from 7/8
to 9/8 of the native length, token by token in float32, and writes NAME_step.json.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from study_script import script_parser
from tqdm import tqdm
from transformers import DynamicCache, StaticCache

import mrrope
from mrrope.evaluation import model_loading
from mrrope.evaluation.documents import long_documents, opening_tokens
from mrrope.evaluation.perplexity import document_losses, perplexity, token_losses
from mrrope.evaluation.truncated import TRUNCATED, Truncation, native_length
from mrrope.reporting import plotting
from mrrope.reporting.machine import machine_name

METHOD = "mrrope_pro"
SCALES = (1.0, 2.0, 4.0, 8.0, 16.0)


def by_length(
    model: Any, documents: list[list[int]], lengths: list[int], **options: Any
) -> dict[int, dict[str, float]]:
    """Perplexity of all tokens and of the second half, at every length."""
    found = [list(document_losses(model, document, lengths, **options)) for document in tqdm(documents, leave=False)]
    return {
        length: {
            "whole": perplexity([losses[i].whole for losses in found]),
            "second half": perplexity([losses[i].second_half for losses in found]),
        }
        for i, length in enumerate(lengths)
    }


def all_lengths(
    model: Any, documents: list[list[int]], lengths: list[int], opening: int
) -> dict[str, dict[int, dict[str, float]]]:
    """Every fixed scale, scale="auto" with one pass per length, and the stock model over windows.

    Args:
        model: the stock model.
        documents: as long as the longest length.
        lengths: ascending.
        opening: tokens at the beginning of every document that windows keep.
    """
    rows = {}
    for scale in tqdm(SCALES, desc="fixed scales"):
        with mrrope.patched(model, METHOD, scale=scale):
            rows[f"scale {scale:g}"] = by_length(model, documents, lengths, chunk=lengths[-1])
    with mrrope.patched(model, METHOD, scale="auto", max_scale=SCALES[-1]):
        rows["auto"] = by_length(model, documents, lengths, chunk=lengths[-1], one_reading=False)
    window = Truncation(native_length(model), opening)
    rows[TRUNCATED] = by_length(model, documents, lengths, chunk=lengths[-1], reader=window.reader)
    return rows


def caches(model: Any, length: int) -> dict[str, Any]:
    """One cache of every supported kind, with room for ``length`` tokens."""
    found = {
        "dynamic": DynamicCache(config=model.config),
        "static": StaticCache(config=model.config, max_cache_len=length),
    }
    if torch.cuda.is_available():
        found["offloaded"] = DynamicCache(config=model.config, offloading=True)
    return found


@torch.no_grad()
def decode(model: Any, cache: Any, tokens: list[int], start: int, follow: list[int] | None) -> tuple[list[int], float]:
    """Prefill ``start`` tokens, then decode one by one: teacher-forced with ``follow``, or greedily without it.

    Returns:
        The tokens read, and the mean loss of those past the native length.
    """
    native = model.config.max_position_embeddings
    device = next(model.parameters()).device
    read, losses = list(tokens[:start]), []
    step = torch.tensor([read], device=device)
    while len(read) < len(tokens):
        logits = model(step, past_key_values=cache, logits_to_keep=1).logits[0, -1].float()
        token = int(logits.argmax()) if follow is None else follow[len(read)]
        if len(read) >= native:
            losses.append(-logits.log_softmax(-1)[token])
        read.append(token)
        step = torch.tensor([[token]], device=device)
    return read, float(torch.stack(losses).mean())


def across_a_step(model: Any, documents: list[list[int]]) -> dict[str, Any]:
    """Decode from 7/8 to 9/8 of the native length, where the scale steps from 1 to 2."""
    native = model.config.max_position_embeddings
    start, end = native * 7 // 8, native * 9 // 8
    forced, fresh, written = [], [], {}
    for document in tqdm(documents, desc="across a step"):
        with mrrope.patched(model, METHOD, scale=2.0):
            losses = torch.cat(list(token_losses(model, document[:end], chunk=end)))
        fresh.append(float(losses[native - 1 :].mean()))
        with mrrope.patched(model, METHOD, scale="auto", max_scale=SCALES[-1]):
            cache = DynamicCache(config=model.config)
            forced.append(decode(model, cache, document[:end], start, document)[1])
    with mrrope.patched(model, METHOD, scale="auto", max_scale=SCALES[-1]):
        for kind, cache in tqdm(caches(model, end).items(), desc="greedy, by cache"):
            written[kind] = decode(model, cache, documents[0][:end], start, None)[0][start:]
    same = {kind: tokens == written["dynamic"] for kind, tokens in written.items()}
    return {
        "from": start,
        "to": end,
        "perplexity after the step": perplexity(forced),
        "perplexity after a fresh prefill with the new table": perplexity(fresh),
        "greedy text same as with the dynamic cache": same,
    }


def print_rows(rows: dict[str, dict[int, dict[str, float]]], figure: str) -> None:
    lengths = list(next(iter(rows.values())))
    print(f"\nPerplexity, {figure}\n{'':16}" + "".join(f"{length:>10}" for length in lengths))
    for name, row in rows.items():
        print(f"{name:16}" + "".join(f"{row[length][figure]:10.3f}" for length in lengths))
    best = {length: min(rows[f"scale {scale:g}"][length][figure] for scale in SCALES) for length in lengths}
    print(f"{'auto / best':16}" + "".join(f"{rows['auto'][length][figure] / best[length]:10.4f}" for length in lengths))


def plot(rows: dict[str, dict[int, dict[str, float]]], model: str, path: Path) -> None:
    """Plot perplexity over length for the fixed scales, scale="auto" and truncation."""
    from matplotlib import colormaps

    figure = plotting.new_figure(figsize=(7, 4.5))
    axes = figure.subplots()
    lengths = list(next(iter(rows.values())))
    highest = max(row["second half"] for row in rows["scale 16"].values())
    for i, scale in enumerate(SCALES):
        values = [rows[f"scale {scale:g}"][length]["second half"] for length in lengths]
        shown = [value if value < 1.5 * highest else math.nan for value in values]
        axes.plot(lengths, shown, marker="o", color=colormaps["viridis"](i / len(SCALES)), label=f"scale {scale:g}")
    values = [rows["auto"][length]["second half"] for length in lengths]
    axes.plot(lengths, values, color="tab:red", linewidth=3, alpha=0.6, label="auto")
    values = [rows[TRUNCATED][length]["second half"] for length in lengths]
    axes.plot(lengths, values, **plotting.line(TRUNCATED))
    axes.set(xscale="log", xlabel="tokens", ylabel="perplexity of the second half", title=f"{model}, {METHOD}")
    axes.set_xticks(lengths, list(map(plotting.thousands, lengths)))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, print and write."""
    parser = script_parser(__doc__, "auto_scale")
    parser.add_argument("part", choices=["lengths", "step"])
    parser.add_argument("model")
    parser.add_argument("texts", type=Path)
    parser.add_argument("--documents", type=int, default=9)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096 * 2**i for i in range(6)])
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)

    output = options.output.with_name(f"{options.output.name}_{options.part}")
    # float32 for "step": differences between caches are then not rounding.
    model, tokenizer = model_loading.load(options.model, dtype="float32" if options.part == "step" else None)
    native = model.config.max_position_embeddings
    longest = options.lengths[-1] if options.part == "lengths" else native * 9 // 8
    documents = [one.tokens for one in long_documents(options.texts, tokenizer, longest, options.documents)]
    record: dict[str, Any] = {
        "model": Path(options.model).stem,
        "dtype": str(model.dtype).removeprefix("torch."),
        "method": METHOD,
        "documents": len(documents),
        "machine": machine_name("cuda" if torch.cuda.is_available() else "cpu"),
    }
    if options.part == "lengths":
        opening = len(opening_tokens(tokenizer))
        record["perplexity"] = rows = all_lengths(model, documents, options.lengths, opening)
        for figure in ("second half", "whole"):
            print_rows(rows, figure)
        plot(rows, record["model"], output.with_suffix(".png"))
    else:
        record |= across_a_step(model, documents)
        print(json.dumps(record, indent=1))
    output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
