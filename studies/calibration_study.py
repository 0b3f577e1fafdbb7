"""Calibrated tables on held-out text: perplexity and pass keys beside every fixed method.

    python studies/calibration_study.py MODEL TEXTS HELD_OUT [--scales 16 4] [--lengths N,N,...] [--budget 4]
        [--documents 6] [--held-out-documents 8] [--retrieval 0.1] [--trials 12] [--sweep N] [--chunk 131072]
        [--output benchmarks/results/calibration]

MODEL is a folder, a name on the hub or a .gguf file. TEXTS and HELD_OUT are files or folders as for mrrope eval, with
documents as long as the longest length, by default the native length times the scale. For every scale S the script
calibrates within the budget of minutes, then measures the fixed methods and the calibrated table on the held-out
documents: perplexity at all lengths, pass keys at the three longest. It writes NAME_Sx.json, NAME_Sx.table.json and
plots. An interrupted run resumes, except for the pass keys.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from study_script import script_parser

from mrrope.calibration import report
from mrrope.calibration.command import calibrate, check
from mrrope.cli import parser as command_parser
from mrrope.evaluation import model_loading
from mrrope.evaluation.compared_methods import methods_named
from mrrope.evaluation.documents import long_documents
from mrrope.evaluation.evaluate import Evaluation
from mrrope.evaluation.report import draw, table
from mrrope.evaluation.results import Results
from mrrope.evaluation.truncated import TRUNCATED

PASSKEY = "passkey"
PASSKEY_METHODS = ("ntk", "yarn", "yarn_ratio", "mrrope_uni", "mrrope_pro", TRUNCATED)
"""Without plain RoPE and PI, which find no key at long range and take as long as the others."""


def read_passkeys(model: Any, tokenizer: Any, options: argparse.Namespace, scale: float, results: Results) -> None:
    """Measure pass keys at the three longest lengths, in the held-out documents."""
    lengths = results.data["lengths"][-3:]
    found = str(results.path.with_suffix(".table.json"))
    documents = long_documents(options.held_out, tokenizer, lengths[-1], options.held_out_documents)
    evaluation = Evaluation(model, tokenizer, documents, lengths, results, options.trials, options.chunk)
    evaluation.run(methods_named([*PASSKEY_METHODS, found], scale=scale), [PASSKEY])
    scores = results.data["results"][PASSKEY]
    scores[report.CALIBRATED] = scores.pop(found)
    results.save()


def comparison(results: Results) -> str:
    """The calibrated table beside the best fixed method, by length."""
    lines = ["", "calibrated against the best other"]
    for task, field, better in (("perplexity", "second_half_perplexity", min), (PASSKEY, "score", max)):
        by_method = results.data["results"][task]
        for length in by_method[report.CALIBRATED]:
            figures = {method: by_length[length][field] for method, by_length in by_method.items()}
            ours = figures.pop(report.CALIBRATED)
            best = better(figures, key=figures.__getitem__)
            lines.append(f"{task:12}{length:>8}{ours:>8.3f}{figures[best]:>8.3f}  {best}")
    means = results.data["calibration"]["held_out_geometric_means"]
    best_mean = min(mean for method, mean in means.items() if method != report.CALIBRATED)
    lines.append(f"geometric mean: {means[report.CALIBRATED]:.3f}, {means[report.CALIBRATED] / best_mean - 1:+.1%}")
    lines.append(f"calibration itself: {results.data['calibration']['seconds']:.0f} s")
    return "\n".join(lines)


def main() -> None:
    """Calibrate, measure, print and write."""
    parser = script_parser(__doc__, "calibration")
    parser.add_argument("model")
    parser.add_argument("texts", type=Path)
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--scales", type=float, nargs="+", default=[16.0, 4.0])
    parser.add_argument("--budget", type=float, default=4.0, help="minutes per scale")
    parser.add_argument(
        "--lengths",
        metavar="N,N,...",
        help="for all scales (default: the native length, doubled up to the scale)",
    )
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--held-out-documents", type=int, default=8)
    parser.add_argument("--retrieval", type=float, default=0.1)
    parser.add_argument("--sweep", type=int, help="also measure an N x N grid of bounds")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--chunk", type=int, default=131072, help="tokens per forward pass")
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)

    model, tokenizer = model_loading.load(options.model)
    for scale in options.scales:
        stem = options.output.with_name(f"{options.output.name}_{scale:g}x")
        given = {
            "--text": options.texts,
            "--held-out": options.held_out,
            "--scale": scale,
            "--budget": options.budget,
            "--documents": options.documents,
            "--held-out-documents": options.held_out_documents,
            "--retrieval": options.retrieval,
            "--chunk": options.chunk,
            "--output": stem,
            **({"--lengths": options.lengths} if options.lengths else {}),
            **({"--sweep": options.sweep} if options.sweep else {}),
        }
        arguments = [str(part) for option in given.items() for part in option]
        chosen = command_parser().parse_args(["calibrate", options.model, *arguments])
        check(chosen)
        results = calibrate(chosen, model, tokenizer)
        if options.trials:
            read_passkeys(model, tokenizer, options, scale, results)
        draw(results.data, stem)
        print(table(results.data), comparison(results) if options.trials else "", sep="\n")


if __name__ == "__main__":
    main()
