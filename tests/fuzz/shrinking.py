"""Draw and shrink cases: dataclasses whose fields list their values, simplest first."""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Callable
from dataclasses import asdict, field, fields, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

MAX_TRIALS = 400


class Case(Protocol):
    """A dataclass of fields made by :func:`choice`."""

    __dataclass_fields__: Any

    def normalized(self) -> Any:
        """Return the nearest case that can run; fields that exclude each other are changed."""


AnyCase = TypeVar("AnyCase", bound=Case)


class CaseError(Exception):
    """A failure of a case. The first argument is its kind, the second the detail."""

    @property
    def kind(self) -> str:
        return str(self.args[0])

    def __str__(self) -> str:
        return ": ".join(map(str, self.args))


def unexpected_error(where: str, error: Exception) -> CaseError:
    """Return the failure of a valid call that raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(last.filename).name}:{last.name}"
    return CaseError(f"{where}: raises {type(error).__name__} in {place}", str(error).partition("\n")[0])


def choice(*values: Any) -> Any:
    """Return a field with these values, simplest first; the first is the default, repeated ones are likelier."""
    return field(default=values[0], metadata={"values": values})


def draw(kind: type[AnyCase], rng: random.Random, **given: Any) -> AnyCase:
    """Return a random case with the given fields fixed."""
    drawn = {f.name: rng.choice(f.metadata["values"]) for f in fields(kind)}
    return kind(**drawn | {"seed": rng.randrange(2**31)} | given).normalized()


def shrink(case: AnyCase, failure_of: Callable[[AnyCase], CaseError | None]) -> AnyCase:
    """Return the simplest case, field by field, with the same kind of failure."""
    kind = failure_of(case)
    if kind is None:
        return case
    trials = 0
    is_smaller = True
    while is_smaller and trials < MAX_TRIALS:
        is_smaller = False
        for simpler in simpler_cases(case):
            trials += 1
            failure = failure_of(simpler)
            if failure is not None and failure.kind == kind.kind:
                case, is_smaller = simpler, True
                break
    return case


def simpler_cases(case: AnyCase) -> list[AnyCase]:
    """Return the cases with a simpler value in one field."""
    found: dict[AnyCase, None] = {}
    for f in fields(case):
        values = list(dict.fromkeys(f.metadata["values"]))
        value = getattr(case, f.name)
        for simpler in values[: values.index(value)] if value in values else values:
            changed = replace(case, **{f.name: simpler}).normalized()
            if complexity(changed) < complexity(case):
                found[changed] = None
    return list(found)


def complexity(case: Case) -> int:
    """Return the sum over the fields of their distance from the simplest value."""
    total = 0
    for f in fields(case):
        values = list(dict.fromkeys(f.metadata["values"]))
        value = getattr(case, f.name)
        total += values.index(value) if value in values else len(values)
    return total


def changed_fields(case: Case) -> dict[str, Any]:
    """Return the fields that are not at their defaults."""
    return {f.name: getattr(case, f.name) for f in fields(case) if getattr(case, f.name) != f.default}


def reproduction_script(case: Case, failure: CaseError) -> str:
    """Return a script that reproduces a failure, with the equivalent command in its comments."""
    kind = type(case)
    arguments = ", ".join(f"{name}={value!r}" for name, value in changed_fields(case).items())
    packed = json.dumps({"kind": kind.__name__, **asdict(case)})
    message = str(failure).replace("\n", "\n# ")
    return (
        f"# {message}\n"
        f"# In tests/: PYTHONPATH=.:python/support python {{this file}}, or\n"
        f"# PYTHONPATH=python/support python -m fuzz --replay '{packed}'\n"
        f"from {kind.__module__} import {kind.__name__}\n\n"
        f"{kind.__name__}({arguments}).run()\n"
    )
