"""Checks of the errors that ops raise."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rotary_cases import whole_memory
from tensor_bits import bits_of


def assert_refused(call: Callable[[], Any], error: type[Exception], *texts: str) -> None:
    """Assert that a call raises exactly this error, with all these texts in its message."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    for text in texts:
        assert text in str(caught.value)


def assert_refused_untouched(
    op: Callable[..., Any], arguments: dict[str, Any], error: type[Exception], *texts: str
) -> None:
    """Assert that, and that tensors among the arguments keep their bits, those around them, and their versions."""
    given = [x for value in arguments.values() for x in (value if isinstance(value, list) else [value])]
    tensors = [x for x in given if isinstance(x, torch.Tensor) and not x.is_meta]
    memory = [bits_of(whole_memory(x.detach())) for x in tensors]
    before, versions = [x.clone() for x in memory], [x._version for x in tensors]
    assert_refused(lambda: op(**arguments), error, *texts)
    assert all(torch.equal(x, y) for x, y in zip(memory, before, strict=True))
    assert [x._version for x in tensors] == versions
