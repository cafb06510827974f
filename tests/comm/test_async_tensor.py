"""Values that are on their way: an ordinary tensor to whoever uses them, asked for when they are first read."""

import pytest
import torch
from torch import Tensor, nn

from tritonemb.comm.async_tensor import AsyncTensor, send_gradients_first, to_ordinary, wait


class Arriving(torch.autograd.Function):
    """The values themselves, later; `log` says when."""

    @staticmethod
    def forward(ctx, values: Tensor, log: list[str]) -> Tensor:
        ctx.log = log

        def receive() -> Tensor:
            log.append("received")
            return values.detach().clone()

        return AsyncTensor(torch.empty_like(values, device="meta"), values.device, receive)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.log.append("sent back")
        return grad, None


def arriving(values: Tensor) -> tuple[Tensor, list[str]]:
    log: list[str] = []
    return Arriving.apply(values, log), log


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor) -> Tensor:
        return values * 2

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * 2


WEIGHT = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
USES = {
    "linear": lambda x: nn.functional.linear(x, WEIGHT.T),
    "columns": lambda x: x[:, 1:],
    "split": lambda x: torch.cat(x.split([1, 2], dim=1)[::-1], dim=1),
    "in place": lambda x: (x * 1.0).add_(x),
    "reshape": lambda x: x.reshape(-1).relu(),
    "function": Twice.apply,
    "double": lambda x: x.double() ** 2,
    "postponed": lambda x: torch.cat([torch.ones(5, 1), x * 2 + x], dim=1).index_select(1, torch.tensor([3, 0, 1])),
    "padded": lambda x: nn.functional.pad(x, (1, 0)).to(torch.bfloat16),
    "copied": lambda x: torch.zeros(7, 3).index_copy(0, torch.arange(5), x),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_is_that_of_the_values(use):
    values, twin = (torch.arange(15.0).reshape(5, 3).requires_grad_() for _ in range(2))
    inputs, log = arriving(values)
    assert (inputs.shape, inputs.dtype, inputs.requires_grad, log) == ((5, 3), torch.float32, True, [])
    actual, expected = use(inputs), use(twin)
    assert torch.equal(to_ordinary(actual), expected)
    actual.sum().backward()
    expected.sum().backward()
    assert torch.equal(values.grad, twin.grad)
    assert log.count("received") == 1


@pytest.mark.parametrize("name", ["postponed", "padded", "copied"])
def test_what_only_moves_columns_waits_for_nothing(name):
    inputs, log = arriving(torch.ones(5, 3))
    result = USES[name](inputs)
    assert isinstance(result, AsyncTensor)
    assert log == []
    assert torch.equal(result, USES[name](torch.ones(5, 3)))
    assert log == ["received"]
    again = USES[name](inputs)  # has arrived
    assert type(again) is Tensor


def test_what_is_no_operator():
    values = torch.arange(6.0).reshape(2, 3)
    for read in (lambda x: x.numpy().tolist(), lambda x: x.tolist(), lambda x: wait(x).tolist()):
        assert read(arriving(values)[0]) == values.tolist()
    assert repr(arriving(values)[0]) == f"AsyncTensor({values})"
    assert type(to_ordinary(arriving(values)[0])) is Tensor
    assert to_ordinary(values) is values


def test_a_change_in_place_stays():
    inputs, _ = arriving(torch.ones(2, 3))
    with torch.no_grad():
        inputs.mul_(3.0)
        inputs[0] = 7.0
    assert inputs.tolist() == [[7.0] * 3, [3.0] * 3]


def test_what_fails_elsewhere_is_raised_where_values_are_read():
    def fail() -> Tensor:
        raise RuntimeError("rank 3 is gone")

    inputs = AsyncTensor(torch.empty(2, 3, device="meta"), torch.device("cpu"), fail)
    postponed = torch.cat([inputs, inputs], dim=1)
    for item in (inputs, postponed, inputs):  # once more
        with pytest.raises(RuntimeError, match="rank 3 is gone"):
            item.sum()


def test_gradients_are_sent_before_younger_nodes_are_run():
    values = torch.ones(5, 3, requires_grad=True)
    inputs, log = arriving(values)
    pooled = torch.cat([inputs, inputs], dim=1) * 2.0
    dense = nn.Linear(4, 6)
    dense.weight.register_hook(lambda _: log.append("dense"))
    out = (dense(torch.ones(5, 4)) * 1.0 * 1.0 + pooled).sum()
    log.clear()
    out.backward(retain_graph=True)
    assert log == ["dense", "sent back"]  # the youngest first
    send_gradients_first(pooled, Arriving)
    log.clear()
    out.backward()
    assert log == ["sent back", "dense"]
    assert torch.equal(values.grad, torch.full((5, 3), 8.0))
