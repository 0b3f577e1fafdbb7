"""The engine on a GPU: the log-probabilities of the patched transformers model, and a scale for every request."""

import itertools
from pathlib import Path

import engine_process
import pytest
import smollm2
import torch
from engine_process import Engine
from markers import needs_cuda

import mrrope

pytestmark = needs_cuda
LENGTH, SCALE = 12_000, 4.0
MRROPE_PRO = {"rope_parameters": {"rope_type": "mrrope_pro", "factor": SCALE}}
AUTO = {"rope_parameters": {"rope_type": "mrrope_pro", "factor": "auto", "max_factor": 8}}
SAME_NLL = 0.0015
"""Mean over thousands of tokens: rounding of bfloat16 cancels. vLLM's own rounded cosines are 0.003 off."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engine_process.save_smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def text(model: Path) -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)(smollm2.real_text())["input_ids"]


def quarters(nll: tuple[float, ...]) -> list[float]:
    return [part.mean().item() for part in torch.tensor(nll, dtype=torch.float64).chunk(4)]


def patched_nll(model: Path, tokens: list[int]) -> tuple[float, ...]:
    """Of transformers with `mrrope.patch`, in bfloat16."""
    from transformers import AutoModelForCausalLM

    patched = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda().eval()
    mrrope.patch(patched, "mrrope_pro", scale=SCALE)
    ids = torch.tensor([tokens], device="cuda")
    with torch.no_grad():
        logits = patched(ids).logits[0, :-1].float()
    return tuple(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").tolist())


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "compiled"])
@pytest.mark.parametrize("runner", ["0", "1"], ids=["V1 runner", "V2 runner"])
def test_nll_is_that_of_the_patched_model(model, text, enforce_eager, runner):
    if not enforce_eager and runner == "0":
        pytest.skip("the V1 runner compiles as the V2 runner does")
    environment = {"VLLM_USE_V2_MODEL_RUNNER": runner}
    with Engine(model, environment, hf_overrides=MRROPE_PRO, enforce_eager=enforce_eager) as engine:
        want = quarters(patched_nll(model, text[:LENGTH]))
        got = quarters(engine.ask([text[:LENGTH]], prompt_logprobs=0)[0].nll)
    print(f"vLLM {got}, transformers {want}")
    assert got == pytest.approx(want, abs=SAME_NLL, rel=0)


@pytest.mark.parametrize("runner", ["0", "1"], ids=["V1 runner", "V2 runner"])
@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "compiled"])
def test_a_scale_for_every_request(model, text, runner, enforce_eager):
    if not enforce_eager and runner == "0":
        pytest.skip("the V1 runner compiles as the V2 runner does")
    environment = {"VLLM_USE_V2_MODEL_RUNNER": runner}
    # Texts of different places, so that no prefix is shared: native, 2, 4 and 8 times the native length.
    lengths = [300, 4000, 9000, 14_000, 20_000, 40_000]
    starts = itertools.accumulate(lengths, initial=0)
    prompts = [text[start : start + length] for start, length in zip(starts, lengths, strict=False)]
    stock = Engine(model, environment, max_model_len=smollm2.NATIVE_LENGTH, enforce_eager=enforce_eager)
    with stock, Engine(model, environment, hf_overrides=AUTO, enforce_eager=enforce_eager) as engine:
        short = stock.ask(prompts[:2], prompt_logprobs=0)
        together = engine.ask(prompts, prompt_logprobs=0)
        alone = [engine.ask([prompt], prompt_logprobs=0)[0] for prompt in prompts]
        forced = engine.ask([prompts[1]], extra_args={"mrrope_scale": 8}, prompt_logprobs=0)[0]
    for stock_answer, answer in zip(short, together, strict=False):
        difference = torch.tensor(stock_answer.nll) - torch.tensor(answer.nll)
        print(f"short: mean {difference.mean():.5f}, mean absolute {difference.abs().mean():.5f}")
        assert difference.mean().abs() < 2 * SAME_NLL
        assert difference.abs().mean() < 0.02
    for length, one, many in zip(lengths, alone, together, strict=True):
        difference = torch.tensor(one.nll) - torch.tensor(many.nll)
        print(f"{length}: alone {torch.tensor(one.nll).mean():.4f}, mean difference {difference.mean():.5f}")
        assert difference.mean().abs() < SAME_NLL
        assert difference.abs().mean() < 0.02
    # A scale that is not needed shows, so the checks above can fail.
    assert (torch.tensor(forced.nll) - torch.tensor(alone[1].nll)).abs().mean() > 0.05


@pytest.mark.parametrize("runner", ["0", "1"], ids=["V1 runner", "V2 runner"])
def test_prefixes_are_shared_within_a_scale_only(model, text, runner):
    environment = {"VLLM_USE_V2_MODEL_RUNNER": runner}
    prefix = text[:6000]
    prompts = {1: prefix + text[20_000:20_500], 2: prefix + text[30_000:36_000], 4: prefix + text[50_000:64_000]}
    with Engine(model, environment, hf_overrides=AUTO, enforce_eager=True) as engine:
        first = {scale: engine.ask([prompt])[0] for scale, prompt in prompts.items()}
        again = {scale: engine.ask([prompt])[0] for scale, prompt in prompts.items()}
        # The same scale, another continuation.
        other = engine.ask([prefix + text[70_000:76_000]])[0]
        metrics = engine.state()["metrics"]
    assert [answer.cached_tokens for answer in first.values()] == [0, 0, 0]
    for scale, prompt in prompts.items():
        assert again[scale].cached_tokens >= len(prompt) - 64
        assert again[scale].logprobs == pytest.approx(first[scale].logprobs, abs=0.1)
    assert len(prefix) - 64 <= other.cached_tokens <= len(prefix)
    assert metrics["vllm:prefix_cache_hits"] == sum(a.cached_tokens for a in again.values()) + other.cached_tokens
