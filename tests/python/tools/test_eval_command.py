"""``mrrope eval``: figures against one pass by hand, partial results, and errors."""

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import smollm2
import torch
from byte_llama import byte_tokenizer, random_words
from evaluation_runs import FLOAT32_EPS, evaluate, evaluation_folder
from matplotlib.figure import Figure
from scripted_models import OutOfMemory, RepeatsLastToken
from transformers import AutoTokenizer, LlamaForCausalLM

import mrrope
from mrrope.evaluation import chunked_reader, documents, model_loading, perplexity, report
from mrrope.evaluation.compared_methods import Method
from mrrope.evaluation.evaluate import Evaluation, is_out_of_memory
from mrrope.evaluation.results import Results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return evaluation_folder(tmp_path_factory.mktemp("evaluation"))


@pytest.mark.parametrize(
    ("longest", "more", "scale"),
    [(64, {}, 2.0), (128, {}, 2.0), (129, {}, 4.0), (600, {}, 16.0), (200, {"--original-max-position": "16"}, 16.0)],
)
def test_without_a_scale_it_covers_the_longest_length(
    folder: Path, tmp_path: Path, longest: int, more: dict[str, str], scale: float, capsys
) -> None:
    given = {"--methods": "unpatched,yarn", "--lengths": f"16,{longest}", "--output": str(tmp_path / "out"), **more}
    assert evaluate(folder, **given, **{"--documents": "1"}) == 0
    native = more.get("--original-max-position", "64")
    said = f"mrrope eval: --scale {scale:g} extends {native} tokens over the longest of --lengths"
    assert said in capsys.readouterr().err
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["scale"] == scale
    found = data["results"]["perplexity"]["yarn"][str(longest)]["documents"][0]["loss"]
    assert evaluate(folder, **given, **{"--documents": "1", "--scale": str(scale)}) == 0
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["results"]["perplexity"]["yarn"][str(longest)]["documents"][0]["loss"] == found


def test_ready_tables_have_their_own_scale(folder: Path, tmp_path: Path, capsys) -> None:
    methods = f"unpatched,rope,{folder / 'table.json'}"
    given = {"--methods": methods, "--lengths": "16", "--output": str(tmp_path / "out"), "--documents": "1"}
    assert evaluate(folder, **given) == 0
    assert "--scale" not in capsys.readouterr().err
    assert "scale" not in json.loads((tmp_path / "out.json").read_text())


def losses_by_hand(folder: Path, document: str, length: int, method: str | None, **options) -> torch.Tensor:
    model = LlamaForCausalLM.from_pretrained(folder / "model").eval()
    if method:
        mrrope.patch(model, method, **options)
    read = [0, *(byte_tokenizer(adds_bos=False)(document).input_ids)][:length]
    with torch.no_grad():
        logits = model(torch.tensor([read])).logits[0, :-1].double()
    return -logits.log_softmax(-1)[torch.arange(length - 1), read[1:]]


def test_the_command_measures_what_one_pass_gives(folder: Path, tmp_path: Path, capsys) -> None:
    table = str(folder / "table.json")
    methods = f"unpatched,mrrope_pro,{table}"
    options = {"--methods": methods, "--scale": "4", "--output": str(tmp_path / "out"), "--documents": "2"}
    assert evaluate(folder, "--json", **options) == 0
    data = json.loads(capsys.readouterr().out)
    assert data == json.loads((tmp_path / "out.json").read_text())
    assert data["complete"]
    assert data["documents"] == ["text.txt#1", "text.txt#2"]
    assert (data["scale"], data["dtype"], data["device"]) == (4.0, "float32", "cpu")
    assert data["results"].keys() == {"perplexity"}
    assert list(data["results"]["perplexity"]) == methods.split(",")
    by_hand = {"unpatched": {}, "mrrope_pro": {"scale": 4.0}, table: {}}
    for method, settings in by_hand.items():
        for length in (64, 600):
            figures = data["results"]["perplexity"][method][str(length)]
            name = None if method == "unpatched" else method
            losses = [losses_by_hand(folder, random_words(120, seed), length, name, **settings) for seed in (0, 1)]
            wholes = [one.mean().item() for one in losses]
            halves = [one[length // 2 - 1 :].mean().item() for one in losses]
            # Means of float32 losses of about 6.
            assert [one["loss"] for one in figures["documents"]] == pytest.approx(wholes, rel=64 * FLOAT32_EPS)
            assert [one["second_half_loss"] for one in figures["documents"]] == pytest.approx(
                halves, rel=64 * FLOAT32_EPS
            )
            assert figures["perplexity"] == pytest.approx(math.exp(sum(wholes) / 2), rel=500 * FLOAT32_EPS)
            assert figures["second_half_perplexity"] == pytest.approx(math.exp(sum(halves) / 2), rel=500 * FLOAT32_EPS)


@pytest.mark.slow
def test_the_command_prints_tables_and_draws(folder: Path, tmp_path: Path, capsys) -> None:
    tasks = "perplexity,passkey,needle,multikey,tracking,tiled_copy"
    options = {"--methods": "rope,yarn", "--scale": "4", "--output": str(tmp_path / "out"), "--documents": "1"}
    assert evaluate(folder, **{**options, "--tasks": tasks, "--trials": "2", "--lengths": "500,600"}) == 0
    printed = capsys.readouterr().out
    data = json.loads((tmp_path / "out.json").read_text())
    assert list(data["results"]) == tasks.split(",")
    for task in tasks.split(","):
        assert (tmp_path / f"out.{task}.png").read_bytes().startswith(b"\x89PNG")
        for method in ("rope", "yarn"):
            assert list(data["results"][task][method]) == ["500", "600"]
    row = "".join(f"{data['results']['perplexity']['yarn'][length]['perplexity']:10.3f}" for length in ("500", "600"))
    assert f"yarn  {row}\n" in printed
    assert "needle\n             500       600\nrope       0.000     0.000\n" in printed


@pytest.mark.parametrize(
    ("explosions", "is_cut"), [([], False), ([[3.4, 33.8], [19.7, 20.4]], True), ([[3.4, 2405.0]], True)]
)
def test_methods_that_fail_leave_the_picture_to_the_others(explosions: list[list[float]], is_cut: bool) -> None:
    axes = Figure().subplots()
    lines = [*explosions, [3.6, 3.9], [3.4, 3.7], [3.5, 3.75]]
    for line in lines:
        axes.plot(line)
    report.cut_off_explosions(axes, lines)
    low, high = axes.get_ylim()
    assert low < 3.4 < 3.9 < high < 6
    assert ("cut off" in axes.get_title()) == is_cut


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        (
            {"--tasks": "perplexity,typing"},
            "--tasks must be of perplexity, .* or tasks of lm-evaluation-harness.*, got '.*,typing'",
        ),
        (
            {"--methods": "rope,rupe"},
            "methods must be unpatched, truncated, rope, .* got 'rupe': the nearest is 'rope'",
        ),
        ({"--methods": "missing.json"}, "methods must give a table, and missing.json does not: .*No such file"),
        ({"--methods": "mrrope_pow"}, "methods must give a table, and mrrope_pow does not: .*power"),
        ({"--methods": ","}, "methods must be one or more, with commas between them, got none"),
        ({"--scale": "much"}, "--scale must be a number, 1 or more, or auto, got 'much'"),
        ({"--scale": "0.5"}, "--scale must be a number, 1 or more, or auto, got '0.5'"),
        ({"--scale": "inf"}, "--scale must be a number, 1 or more, or auto, got 'inf'"),
        ({"--max-scale": "8"}, "--max-scale goes with --scale auto, got no --scale"),
        ({"--scale": "auto", "--max-scale": "1"}, "--max-scale must be a number above 1, got 1"),
        ({"--lengths": "64,many"}, "--lengths must be numbers of tokens, .* got '64,many'"),
        ({"--lengths": "1"}, "--lengths must be numbers of tokens, 2 or more, .* got '1'"),
        ({"--text": "missing.txt"}, "text must be a file or a folder, and there is no missing.txt"),
        ({"--trials": "0"}, "--trials must be a positive number, got 0"),
        ({"--chunk": "-1"}, "--chunk must be a positive number, got -1"),
        ({"--documents": "0"}, "--documents must be a positive number, got 0"),
        (
            {"--output": "no/such/folder/out"},
            "--output must be in a folder that exists, and there is no no/such/folder",
        ),
        ({"--output": "/proc/self/out"}, "--output must be where files can be written, got /proc/self/out: "),
        ({"--original-max-position": "0"}, "--original-max-position must be 1 or more, got 0"),
        ({"--dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"--device": "abacus"}, "device must be one that torch has here, got 'abacus'"),
        ({"model": "missing.gguf"}, "model must be a file that exists, and there is no missing.gguf"),
        ({"model": "./missing"}, "model must be a folder, .* and there is no folder missing"),
        ({"model": "/no/such/folder"}, "model must be a folder, .* and there is no folder /no/such/folder"),
        ({"model": "models/of/mine"}, "model must be a folder, .* and there is no folder models/of/mine"),
    ],
)
def test_bad_options_are_named_before_a_model_is_loaded(
    folder: Path, replaced: dict[str, str], message: str, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: pytest.fail("a model is loaded"))
    assert evaluate(folder, **replaced) == 2
    printed = capsys.readouterr().err
    assert re.search(f"^mrrope eval: {message}", printed, re.MULTILINE), printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"--lengths": "64,5000"}, "text must hold a document of at least 5000 tokens, and the longest of .*: 720"),
        (
            {"--methods": "{folder}/wide.json"},
            "methods must go with the model, and .*wide.json does not: .*rotary_dim 16",
        ),
    ],
)
def test_what_does_not_go_with_the_model_is_named(folder: Path, replaced: dict[str, str], message: str, capsys) -> None:
    mrrope.frequency_table("rope", rotary_dim=32, base=1e4, original_max_position=64).save(folder / "wide.json")
    assert evaluate(folder, **{option: value.format(folder=folder) for option, value in replaced.items()}) == 2
    printed = capsys.readouterr().err
    assert re.search(f"^mrrope eval: {message}", printed, re.MULTILINE), printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("name", "short"),
    [("Qwen/Qwen2.5-3B", "Qwen2.5-3B"), (Path("a/b.Q4_1.gguf"), "b.Q4_1"), ("folder/tiny/", "tiny")],
)
def test_short_names_of_models(name: str | Path, short: str) -> None:
    assert model_loading.short_name(name) == short


def test_models_that_cannot_be_loaded_are_named(folder: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    (tmp_path / "weights.bin").write_bytes(b"")
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "abacus"}')
    (tmp_path / "empty").mkdir()
    expected = {
        "broken.gguf": "model .*broken.gguf cannot be loaded: ",
        "weights.bin": "model must be a folder, a name on the hub or a .gguf file, got the file .*weights.bin",
        "unknown": "model .*unknown cannot be loaded: ",
        "empty": "model must be a folder with a config.json, and .*empty has none",
    }
    for name, message in expected.items():
        assert evaluate(folder, model=str(tmp_path / name)) == 2
        assert re.search(f"^mrrope eval: {message}", capsys.readouterr().err, re.MULTILINE)


def test_a_missing_folder_that_may_be_a_name_on_the_hub(folder: Path, monkeypatch, capsys) -> None:
    def refuse(*_, **__):
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    assert evaluate(folder, model="models/mine") == 2
    said = "mrrope eval: model models/mine, which is no folder here, cannot be loaded: We couldn't connect to the hub"
    assert said in capsys.readouterr().err
    for name in ("mine/", "./mine", "my/models/mine"):  # which are no names on the hub
        assert evaluate(folder, model=name) == 2
        said = "mrrope eval: model must be a folder, a name on the hub or a .gguf file, and there is no folder "
        assert said in capsys.readouterr().err


def test_what_transformers_says_of_a_model_is_not_cut_off_after_a_line(folder: Path, monkeypatch, capsys) -> None:
    def refuse(*_, **__):
        raise ValueError("one of these is missing:\n(1) this\n(2) that\n" + "more " * 100)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    assert evaluate(folder) == 2
    printed = capsys.readouterr().err
    assert re.search(r"cannot be loaded: one of these is missing: \(1\) this \(2\) that (more )+\.\.\.$", printed)
    assert len(printed) < 1000


@pytest.mark.parametrize(
    ("options", "alike"),
    [
        ({"--methods": "unpatched,rope,yarn", "--scale": "1"}, "rope, yarn"),
        ({"--methods": "rope,yarn", "--scale": "1.0"}, "rope, yarn"),
        ({"--methods": "rope,yarn", "--scale": "2"}, None),
        ({"--methods": "unpatched,rope"}, None),
        ({"--methods": "rope,{folder}/table.json"}, None),
    ],
)
def test_methods_that_cannot_differ_are_said_to_be_alike(
    folder: Path, tmp_path: Path, options: dict[str, str], alike: str | None, capsys
) -> None:
    given = {"--output": str(tmp_path / "out"), "--lengths": "16", "--documents": "1"}
    given |= {option: value.format(folder=folder) for option, value in options.items()}
    assert evaluate(folder, **given) == 0
    said = f"mrrope eval: {alike} are the unpatched model at --scale 1; they differ at a larger --scale"
    assert (said in capsys.readouterr().err) == (alike is not None)
    measured = json.loads((tmp_path / "out.json").read_text())["results"]["perplexity"]
    losses = {name: figures["16"]["documents"][0]["loss"] for name, figures in measured.items()}
    if alike:
        assert max(losses.values()) == pytest.approx(min(losses.values()), rel=64 * FLOAT32_EPS)


@pytest.mark.parametrize("tasks", ["perplexity", "perplexity,passkey"])
def test_what_was_measured_before_the_memory_was_full_is_kept(
    folder: Path, tmp_path: Path, tasks: str, monkeypatch, capsys
) -> None:
    model = OutOfMemory(room=400)
    monkeypatch.setattr(model_loading, "load", lambda *_, **__: (model, byte_tokenizer(adds_bos=True)))
    options = {"--methods": "unpatched", "--tasks": tasks, "--output": str(tmp_path / "out")}
    assert evaluate(folder, **options) == 2
    printed = capsys.readouterr()
    path = tmp_path / "out.json"
    assert (
        "out of memory in perplexity with unpatched: of the lengths [64, 600] 1 were read; a smaller --chunk than 100"
        in printed.err
    )
    assert f"What was measured is in {path}" in printed.err
    data = json.loads(path.read_text())
    assert not data["complete"]
    assert data["stopped"] in printed.err
    assert list(data["results"]["perplexity"]["unpatched"]) == ["64"]
    assert "perplexity of the second half" in printed.out
    assert (tmp_path / "out.perplexity.png").exists()


def test_what_was_measured_before_an_interrupt_is_kept(folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    class Interrupted(OutOfMemory):
        def forward(self, input_ids, position_ids, **options):
            try:
                return super().forward(input_ids, position_ids, **options)
            except torch.OutOfMemoryError:
                raise KeyboardInterrupt from None

    model = Interrupted(room=400)
    monkeypatch.setattr(model_loading, "load", lambda *_, **__: (model, byte_tokenizer(adds_bos=True)))
    assert evaluate(folder, **{"--methods": "unpatched", "--output": str(tmp_path / "out")}) == 130
    printed = capsys.readouterr()
    assert f"mrrope eval: interrupted; what was measured is in {tmp_path / 'out.json'}\n" in printed.err
    assert "Traceback" not in printed.err
    data = json.loads((tmp_path / "out.json").read_text())
    assert (data["complete"], data["stopped"]) == (False, "interrupted")
    assert list(data["results"]["perplexity"]["unpatched"]) == ["64"]
    assert "perplexity of the second half" in printed.out


# 600 tokens of each of 3 documents are 6 chunks of 100, of which the first covers 64; or windows of 64, moved by 8.
@pytest.mark.parametrize(("second", "calls_per_document"), [("yarn", 6), ("truncated", 1 + 67)])
def test_figures_of_fewer_documents_are_marked(
    second: str, calls_per_document: int, folder: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    """An interrupt in the second document of the second method, between its two lengths."""

    calls, forward = [], LlamaForCausalLM.forward

    def interrupted(self, *arguments, **options):
        if len(calls) == 3 * 6 + calls_per_document + 1:
            raise KeyboardInterrupt
        calls.append(None)
        return forward(self, *arguments, **options)

    monkeypatch.setattr(LlamaForCausalLM, "forward", interrupted)
    labels: list[str] = []
    legend = Figure.legend
    monkeypatch.setattr(
        Figure,
        "legend",
        lambda self, handles, names, **more: labels.extend(names) or legend(self, handles, names, **more),
    )
    options = {"--methods": f"unpatched,{second}", "--scale": "4", "--output": str(tmp_path / "out")}
    assert evaluate(folder, **options) == 130
    figures = json.loads((tmp_path / "out.json").read_text())["results"]["perplexity"][second]
    assert [len(figures[length]["documents"]) for length in ("64", "600")] == [2, 1]
    block = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert "*" not in block[2]
    assert re.fullmatch(rf"{second} +[\d.]+\* +[\d.]+\*", block[3])
    assert block[4:] == [
        f"* {second} at 64: 2 of 3 documents; not to be compared",
        f"* {second} at 600: 1 of 3 documents; not to be compared",
    ]
    assert labels == ["unpatched", f"{second} (1 of 3 documents)"]


def test_the_machines_own_memory_counts_too() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8, device="cpu")
    assert is_out_of_memory(caught.value)
    # The message of other builds of torch.
    words = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1152921504606846976 bytes."
    assert is_out_of_memory(RuntimeError(f"[enforce fail at alloc_cpu.cpp:124] err == 0. {words} Error code 12"))


def test_other_errors_of_the_model_are_not_taken_for_memory(folder: Path, tmp_path: Path, monkeypatch) -> None:
    class Broken(OutOfMemory):
        def forward(self, *_, **__):
            raise RuntimeError("shapes do not match")

    monkeypatch.setattr(model_loading, "load", lambda *_, **__: (Broken(0), byte_tokenizer(adds_bos=True)))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        evaluate(folder, **{"--methods": "unpatched", "--output": str(tmp_path / "out")})


def test_missing_packages_are_named(folder: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert evaluate(folder) == 2
    assert "mrrope eval: this needs the package matplotlib: pip install 'mrrope[eval]'" in capsys.readouterr().err


def test_every_length_is_read_by_itself_where_the_scale_follows_it(folder: Path, tmp_path: Path) -> None:
    model = RepeatsLastToken()
    document = documents.Document("one", [0] * 64)
    evaluation = Evaluation(model, None, [document], [16, 64], Results(tmp_path / "out.json", {}))
    for scale, expected in (("auto", [15, 63]), (4.0, [63])):
        method = Method("yarn", (("scale", scale),))
        model.lengths_of_calls.clear()
        evaluation.measure_perplexity(method, lambda _: None)
        assert model.lengths_of_calls == expected
        assert evaluation.tokens_of("perplexity", method) == sum(expected)


# Models in GGUF, and attention backends


def test_a_gguf_file_is_read(tmp_path: Path) -> None:
    model, tokenizer = model_loading.load(smollm2.gguf_file(), device="cpu")
    assert (model.dtype, model.config.model_type) == (torch.float32, "llama")
    (tmp_path / "text.txt").write_text(smollm2.real_text())
    (document,) = documents.long_documents(tmp_path / "text.txt", tokenizer, 512)
    (figures,) = perplexity.document_losses(model, document.tokens, [512], chunk=200)
    # A trained model; uniform guessing has a loss of ln 49152 = 10.8.
    assert figures.whole < 5
    assert figures.second_half < 5


@pytest.mark.parametrize(
    ("tokens", "first", "on_gpu", "capability", "prefers"),
    [
        (8192, 0, True, 9, True),
        (8191, 0, True, 9, False),
        (8192, 1, True, 9, False),
        (8192, 0, True, 8, False),
        (8192, 0, False, 9, False),
    ],
)
def test_long_texts_read_whole_go_to_the_faster_attention(
    tokens: int, first: int, on_gpu: bool, capability: int, prefers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other backends stay enabled: cuDNN does not take every head size."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    rows = SimpleNamespace(shape=(1, tokens), is_cuda=on_gpu, device="cuda")
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with chunked_reader.fast_attention(rows, first):
            assert torch.backends.cuda.cudnn_sdp_enabled() == prefers
            assert torch.backends.cuda.flash_sdp_enabled()
            assert torch.backends.cuda.math_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
