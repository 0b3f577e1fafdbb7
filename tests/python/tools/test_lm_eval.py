"""lm-evaluation-harness on patched models: the real one, and a fake where it needs data."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from byte_llama import byte_tokenizer, random_words
from evaluation_runs import evaluate, evaluation_folder
from markers import takes_minutes
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

import mrrope
from mrrope.hf.rotary_embedding import TableRotaryEmbedding


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return evaluation_folder(tmp_path_factory.mktemp("evaluation"))


# lm-evaluation-harness, and a fake of it


@pytest.fixture
def fake_harness(monkeypatch) -> list[dict]:
    """Install a fake lm_eval with a few tasks, one of them without data; return the list of its calls.

    As in the real one, a limit leaves only the prompts of the first length.
    """
    calls = []
    ruler = {64: 0.25, 600: 0.75}
    longbench2 = {"alias": "longbench2", "acc,none": 0.3, "acc_stderr,none": 0.1, "sample_len": 7}

    def ruler_results(length):
        measured = {f"{length},none": ruler[length], f"{length}_stderr,none": 0.1, "8192,none": -1}
        return {
            "ruler": {"alias": "ruler", "4096,none": 0.5, "4096_stderr,none": "N/A", "sample_len": 7},
            "ruler_vt": {"alias": " - ruler_vt", **measured},
        }

    def simple_evaluate(reader, tasks, limit, metadata, bootstrap_iters):
        if tasks == ["offline"]:
            raise ConnectionError("no route to the hub")
        assert isinstance(AutoTokenizer.from_pretrained(metadata["tokenizer"]), PreTrainedTokenizerFast)
        patched = any(isinstance(module, TableRotaryEmbedding) for module in reader.pretrained.modules())
        calls.append({"patched": patched, "limit": limit, "lengths": metadata["max_seq_lengths"]})
        calls[-1]["max_length"] = reader.max_length
        is_ruler = tasks == ["ruler"]
        return {"results": ruler_results(metadata["max_seq_lengths"][0]) if is_ruler else {"longbench2": longbench2}}

    class FakeModel(SimpleNamespace):
        def tok_encode(self, text):
            return self.tokenizer(text).input_ids

    class TaskManager:
        all_tasks = ("offline", "ruler", "ruler_vt", "longbench2")

    modules = {
        "lm_eval": SimpleNamespace(simple_evaluate=simple_evaluate),
        "lm_eval.tasks": SimpleNamespace(TaskManager=TaskManager),
        "lm_eval.models": SimpleNamespace(),
        "lm_eval.models.huggingface": SimpleNamespace(HFLM=FakeModel),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def test_tasks_of_the_harness_run_on_the_patched_model(folder: Path, tmp_path: Path, fake_harness: list[dict]) -> None:
    options = {"--methods": "unpatched,yarn,truncated", "--output": str(tmp_path / "out"), "--trials": "3"}
    assert evaluate(folder, **{**options, "--tasks": "ruler,longbench2"}) == 0
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert found["ruler_vt"]["yarn"] == {"64": {"score": 0.25}, "600": {"score": 0.75}}
    assert found["longbench2"]["yarn"] == {"600": {"score": 0.3, "metrics": {"acc": 0.3}}}
    assert "ruler" not in found  # it has no results for these lengths
    # RULER runs once per length, LongBench once.
    rows = [(False, 600), (True, 600), (False, 64)]  # truncated has the native length
    assert fake_harness == [
        {"patched": patched, "limit": 3, "lengths": lengths, "max_length": longest}
        for patched, longest in rows
        for lengths in ([64], [600], [64])
    ]


def test_a_task_without_data_does_not_keep_the_others_from_being_measured(
    folder: Path, tmp_path: Path, fake_harness: list[dict], capsys
) -> None:
    options = {"--methods": "rope,yarn", "--output": str(tmp_path / "out")}
    assert evaluate(folder, **{**options, "--tasks": "offline,longbench2"}) == 2
    message = "offline of lm-evaluation-harness needs data that is not on this machine"
    assert re.search(f"^mrrope eval: {message} .* no route to the hub", capsys.readouterr().err, re.MULTILINE)
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["stopped"].startswith(message)
    assert list(data["results"]["longbench2"]) == ["rope", "yarn"]


def test_without_the_harness_its_package_is_named(folder: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert evaluate(folder, **{"--tasks": "ruler"}) == 2
    assert "this needs the package lm_eval: pip install 'mrrope[harness]'" in capsys.readouterr().err


CHOICE_TASK = """\
task: mrrope_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0}}
"""


@takes_minutes
def test_the_real_harness_reads_by_the_patched_model(folder: Path, tmp_path: Path) -> None:
    """Run a task whose correct answers are those that the patched model finds likelier, and one of RULER's."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'lm_eval[ruler]'")
    model = LlamaForCausalLM.from_pretrained(folder / "model").eval()
    mrrope.patch(model, "mrrope_pro", scale=4.0)
    tokenizer = byte_tokenizer(adds_bos=True)

    def likelihood(text: str, choice: str) -> float:
        read, following = tokenizer(text).input_ids, tokenizer(f" {choice}", add_special_tokens=False).input_ids
        with torch.no_grad():
            logits = model(torch.tensor([read + following])).logits[0].double()
        steps = logits[len(read) - 1 : -1].log_softmax(-1)
        return steps[torch.arange(len(following)), following].sum().item()

    questions = []
    for seed in range(12):
        text, choices = random_words(30, seed), [random_words(1, 100 + seed), random_words(1, 200 + seed)]
        answer = max((0, 1), key=lambda which: likelihood(text, choices[which]))
        questions.append({"text": text, "choices": choices, "answer": answer})
    (tmp_path / "questions.json").write_text("\n".join(map(json.dumps, questions)))
    task = tmp_path / "choice.yaml"
    task.write_text(CHOICE_TASK.format(data=tmp_path / "questions.json"))
    (tmp_path / "text.txt").write_text(random_words(240))

    options = {"--text": str(tmp_path / "text.txt"), "--lengths": "600,1200", "--trials": "12", "--scale": "4"}
    options |= {"--methods": "unpatched,mrrope_pro", "--output": str(tmp_path / "out")}
    assert evaluate(folder, **options, **{"--tasks": f"{task},niah_single_1"}) == 0
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert found["mrrope_choice"]["mrrope_pro"] == {"1200": {"score": 1.0, "metrics": {"acc": 1.0}}}
    assert found["mrrope_choice"]["unpatched"]["1200"]["score"] < 1
    for method in ("unpatched", "mrrope_pro"):
        assert list(found["niah_single_1"][method]) == ["600", "1200"]
