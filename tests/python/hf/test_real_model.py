"""A real model finds a pass key past its training length when patched, and does not when unpatched."""

import pytest
import smollm2
import torch
from markers import takes_minutes

import mrrope

pytestmark = pytest.mark.slow

LENGTH, DEPTH = 12_000, 1_200
PASS_KEY = "71432"


def question_after_a_long_text(tokenizer) -> torch.Tensor:
    """Tokens of a real text with a pass key near its start, and a question for it."""
    assert LENGTH - DEPTH > smollm2.NATIVE_LENGTH
    text = tokenizer(smollm2.real_text())["input_ids"]
    subject = "pass key to the garden gate"
    fact = f"\n\nThe {subject} is {PASS_KEY}. Remember it: the {subject} is {PASS_KEY}.\n\n"
    question = f"\n\nQuestion: What is the {subject}? Answer: The {subject} is"
    fact, question = (tokenizer(part)["input_ids"] for part in (fact, question))
    return torch.tensor([text[:DEPTH] + fact + text[DEPTH:LENGTH] + question])


def answer(model, tokenizer, tokens: torch.Tensor) -> str:
    output = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False)
    return tokenizer.decode(output[0, tokens.shape[1] :])


@takes_minutes
def test_a_patched_model_finds_what_lies_further_back_than_it_was_trained_to_look(device):
    model, tokenizer = smollm2.model_and_tokenizer(device)
    tokens = question_after_a_long_text(tokenizer).to(device)
    with mrrope.patched(model, "mrrope_pro", scale=4.0):
        patched = answer(model, tokenizer, tokens)
    print(f"patched: {patched!r}")
    assert PASS_KEY in patched
    unpatched = answer(model, tokenizer, tokens)
    print(f"unpatched: {unpatched!r}")
    assert PASS_KEY not in unpatched
