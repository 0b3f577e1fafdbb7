"""The engine on a GPU: the log-probabilities of the patched transformers model, and a scale for every request."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import engine_process
import pytest
import smollm2
import torch
from engine_process import Answer, Engine
from markers import needs_cuda

import mrrope

pytestmark = needs_cuda
LENGTH, TEXTS, SCALE = 12_000, 10, 4.0
FIXED = {"rope_parameters": {"rope_type": "mrrope_pro", "factor": SCALE}}
AUTO = {"rope_parameters": {"rope_type": "mrrope_pro", "factor": "auto", "max_factor": 8}}
V1, V2 = ({"VLLM_USE_V2_MODEL_RUNNER": runner} for runner in "01")
ENGINES = {
    "fixed eager": (V2, {"hf_overrides": FIXED, "enforce_eager": True}),
    "fixed compiled": (V2, {"hf_overrides": FIXED}),
    "fixed V1": (V1, {"hf_overrides": FIXED, "enforce_eager": True}),
    "auto": (V2, {"hf_overrides": AUTO}),
    "auto V1": (V1, {"hf_overrides": AUTO, "enforce_eager": True}),
    "stock": (V2, {"max_model_len": smollm2.NATIVE_LENGTH}),
}
SAME_MEAN = 0.0015
"""Difference of mean log-probabilities over ten texts. For one text it is too strict: there, compiled and eager graphs
of the same model differ by up to 0.0019 in a quarter."""
ROUNDING = 0.06
"""Mean absolute difference per token. Stock and mrrope differ by 0.033 to 0.037 as measured, a wrong scale by 0.47."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engine_process.save_smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def text(model: Path) -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)(smollm2.real_text())["input_ids"]


@pytest.fixture(scope="module")
def engines(model: Path) -> Iterator[dict[str, Engine]]:
    """All engines: they start at once, in the time of one."""
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(Engine(model, environment, **options))
            for name, (environment, options) in ENGINES.items()
        }


@pytest.fixture(scope="module")
def patched_quarters(engines: dict[str, Engine], model: Path, text: list[int]) -> list[float]:
    """Mean NLL per quarter of transformers with `mrrope.patch`, in bfloat16, while the engines start."""
    from transformers import AutoModelForCausalLM

    patched = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda().eval()
    mrrope.patch(patched, "mrrope_pro", scale=SCALE)
    nll = []
    for prompt in prompts_of(text):
        ids = torch.tensor([prompt], device="cuda")
        with torch.no_grad():
            logits = patched(ids).logits[0, :-1].float()
        nll.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").tolist())
    return quarters(nll)


def prompts_of(text: list[int]) -> list[list[int]]:
    return [text[i * LENGTH : (i + 1) * LENGTH] for i in range(TEXTS)]


def quarters(nll: list[tuple[float, ...]] | list[list[float]]) -> list[float]:
    """Mean per quarter of the prompt, over all prompts."""
    return [part.mean().item() for part in torch.tensor(nll, dtype=torch.float64).chunk(4, dim=1)]


def differences(first: Answer, second: Answer) -> torch.Tensor:
    return torch.tensor(first.nll) - torch.tensor(second.nll)


@pytest.mark.parametrize("name", ["fixed eager", "fixed compiled", "fixed V1"])
def test_nll_is_that_of_the_patched_model(engines, patched_quarters, text, name):
    answers = engines[name].ask(prompts_of(text), prompt_logprobs=0)
    got = quarters([answer.nll for answer in answers])
    off = [a - b for a, b in zip(got, patched_quarters, strict=True)]
    print(f"NLL {name}: {[round(x, 4) for x in got]}, off by {[round(x, 5) for x in off]}")
    one = quarters([answers[0].nll])
    print(f"NLL {name}, first text: {[round(x, 4) for x in one]}")
    assert got == pytest.approx(patched_quarters, abs=SAME_MEAN, rel=0)


@pytest.mark.parametrize("name", ["auto", "auto V1"])
def test_a_scale_for_every_request(engines, text, name):
    # Texts of different places, so that no prefix is shared: up to 1, 1, 2, 2, 4 and 8 native lengths.
    lengths = [300, 7000, 9000, 14_000, 20_000, 40_000]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    prompts = [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    engine = engines[name]
    together = engine.ask(prompts, prompt_logprobs=0)
    alone = [engine.ask([prompt], prompt_logprobs=0)[0] for prompt in prompts]
    forced = engine.ask([prompts[1]], extra_args={"mrrope_scale": 8}, prompt_logprobs=0)[0]
    for length, one, many in zip(lengths, alone, together, strict=True):
        off = differences(one, many)
        print(f"{name} {length}: alone or together off by {off.mean():.5f}, absolute {off.abs().mean():.5f}")
        assert off.abs().mean() < ROUNDING
        assert length < 1000 or off.mean().abs() < SAME_MEAN
    # A scale that the text does not need shows, so that these checks can fail.
    sensitivity = differences(forced, alone[1])
    print(f"{name}: scale 8 is off by {sensitivity.mean():.4f}, absolute {sensitivity.abs().mean():.4f}")
    assert sensitivity.abs().mean() > 2 * ROUNDING


def test_a_short_request_gets_stock_log_probabilities(engines, text):
    prompts = [text[i * 7000 : (i + 1) * 7000] for i in range(8)]
    stock, served = (engines[name].ask(prompts, prompt_logprobs=0) for name in ("stock", "auto"))
    off = torch.stack([differences(a, b) for a, b in zip(served, stock, strict=True)])
    print(f"short requests are off stock by {off.mean():.5f}, absolute {off.abs().mean():.5f}")
    assert off.abs().mean() < ROUNDING
    assert off.mean().abs() < SAME_MEAN


@pytest.mark.parametrize("name", ["auto", "auto V1"])
def test_prefixes_are_shared_within_a_scale_only(engines, text, name):
    engine = engines[name]
    prefix = text[100_000:106_000]
    prompts = {1: prefix + text[20_000:20_500], 2: prefix + text[30_000:36_000], 4: prefix + text[50_000:64_000]}
    before = engine.state()["cached"]
    first = {scale: engine.ask([prompt])[0] for scale, prompt in prompts.items()}
    again = {scale: engine.ask([prompt])[0] for scale, prompt in prompts.items()}
    other = engine.ask([prefix + text[70_000:76_000]])[0]  # scale 2, another continuation
    assert [answer.cached_tokens for answer in first.values()] == [0, 0, 0]
    for scale, prompt in prompts.items():
        assert again[scale].cached_tokens >= len(prompt) - 64
        assert again[scale].logprobs == pytest.approx(first[scale].logprobs, abs=0.2)
    assert len(prefix) - 64 <= other.cached_tokens <= len(prefix)
    hits = engine.state()["cached"] - before
    assert hits == sum(answer.cached_tokens for answer in (*again.values(), other))


@pytest.mark.parametrize("name", ["auto", "auto V1"])
def test_a_request_that_no_table_fits_is_refused(engines, text, name):
    with pytest.raises(ValueError, match="mrrope_scale must be one of 2, 4, 8"):
        engines[name].ask([text[:9000]], extra_args={"mrrope_scale": 1})
    assert engines[name].state()["requests"] == 0
