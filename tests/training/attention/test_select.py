"""Which kernel computes, by device, precision and how much it would have to copy."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.training.attention.trees import Heads, Problem, chain
from treadle.training.attention.dense import Dense
from treadle.training.attention.flex import Flex
from treadle.training.attention.interface import Shape
from treadle.training.attention.select import KERNELS, Cuda, kernel_for
from treadle.training.attention.tiles import Tiles
from treadle.training.attention.varlen import Varlen


@dataclass(frozen=True)
class Named(Exception):
    """A kernel that only says its name."""

    name: str

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        raise self


def fan(trunk: int, leaves: int) -> Shape:
    """A trunk with so many leaves below it."""
    nodes = trunk + leaves
    depth = [*range(trunk), *([trunk] * leaves)]
    return Shape(torch.tensor(depth), torch.tensor([nodes] * trunk + [*range(trunk + 1, nodes + 1)]), 0)


def chosen(shape: Shape, dtype: torch.dtype, size: int = 8, window: int | None = None) -> str:
    kernel = Cuda(shape, Named("varlen"), Named("flex"))
    with pytest.raises(Named) as caught:
        Problem.of(shape, Heads(size=size), window, dtype=dtype).forward(kernel)
    return caught.value.name


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [(torch.bfloat16, "varlen"), (torch.float16, "varlen"), (torch.float32, "flex"), (torch.float64, "flex")],
)
def test_flash_attention_computes_in_half_precision_only(dtype: torch.dtype, wanted: str) -> None:
    assert chosen(chain(10), dtype) == wanted


@pytest.mark.parametrize(("size", "wanted"), [(8, "varlen"), (12, "flex"), (256, "varlen"), (264, "flex")])
def test_and_for_its_sizes_of_heads(size: int, wanted: str) -> None:
    assert chosen(chain(10), torch.bfloat16, size) == wanted


def test_a_tree_of_which_more_than_four_copies_would_be_gathered_is_not() -> None:
    """A leaf's path below a trunk of 20 has 21 keys."""
    assert chosen(fan(20, 4), torch.bfloat16) == "varlen"  # 84 of 96
    assert chosen(fan(20, 5), torch.bfloat16) == "flex"  # 105 of 100
    assert chosen(fan(20, 5), torch.bfloat16, window=19) == "varlen"  # 21 and 4 x 19 of 100


def test_any_kernel_can_be_asked_for_by_name() -> None:
    found = {name: type(kernel_for(torch.device("cpu"), name)(chain(3))) for name in KERNELS}
    assert found == {"tiles": Tiles, "dense": Dense, "varlen": Varlen, "flex": Flex}
    assert kernel_for(torch.device("cpu"), "auto") is kernel_for(torch.device("cpu"))
