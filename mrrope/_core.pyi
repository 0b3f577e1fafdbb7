"""Types of the compiled module in bindings/tables_module.cpp."""

from collections.abc import Sequence
from typing import TypedDict

class BuildInfo(TypedDict):
    torch: list[str]
    compiler: str
    instruction_sets: list[str]
    nvcc: str | None
    without_cuda: str | None
    machine_code: list[str]
    ptx: list[str]
    cutlass: str | None
    wgmma: bool

class Table:
    def __init__(
        self,
        *,
        method: str,
        rotary_dim: int,
        base: float,
        original_max_position: float,
        scale: float,
        bounds: tuple[int, int] | None,
        attention_factor: float,
        inv_freq: Sequence[float],
        cumulative_scale: Sequence[float],
        turns: Sequence[int],
    ) -> None: ...
    @property
    def method(self) -> str: ...
    @property
    def rotary_dim(self) -> int: ...
    @property
    def base(self) -> float: ...
    @property
    def original_max_position(self) -> float: ...
    @property
    def scale(self) -> float: ...
    @property
    def bounds(self) -> tuple[int, int] | None: ...
    @property
    def attention_factor(self) -> float: ...
    @property
    def inv_freq(self) -> list[float]: ...
    @property
    def cumulative_scale(self) -> list[float]: ...
    @property
    def radix_factors(self) -> list[float]: ...
    @property
    def turns(self) -> list[int]: ...
    def packed(self) -> list[int]: ...

class MethodTraits:
    @property
    def name(self) -> str: ...
    @property
    def has_temperature(self) -> bool: ...
    @property
    def needs(self) -> str | None: ...
    @property
    def power(self) -> float | None: ...

def build_table(
    *,
    method: str,
    rotary_dim: int,
    base: float,
    original_max_position: float,
    scale: float,
    alpha: float,
    beta: float,
    bounds: tuple[int, int] | None,
    power: float | None,
    factors: Sequence[float],
    attention_factor: float | None,
    native_scale: Sequence[float],
    native_attention_factor: float,
) -> Table: ...
def relative(*, to: Table, from_: Table) -> Table: ...
def inverse(table: Table) -> Table: ...
def methods() -> list[MethodTraits]: ...
def build_info() -> BuildInfo: ...
def cpu_instruction_set() -> str: ...
