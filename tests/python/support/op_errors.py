"""Checks of the errors that ops raise."""

from collections.abc import Callable
from typing import Any

import pytest


def assert_refused(call: Callable[[], Any], error: type[Exception], *texts: str) -> None:
    """Assert that a call raises exactly this error, with all these texts in its message."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    for text in texts:
        assert text in str(caught.value)
