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


def change_result(x: Tensor) -> Tensor:
    scaled = x * 2
    moved = torch.cat([scaled, x], dim=1) + 1
    scaled.mul_(0)
    return moved + scaled.sum()


def change_values(x: Tensor) -> Tensor:
    with torch.no_grad():
        moved = (x + 1) * 2
        x[1:].fill_(0)
        x.detach()[:1] = 5
        x.mul_(3)
        return moved * x


@pytest.mark.parametrize("change", [change_result, change_values])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_deferred_operators_read_the_values_before_a_change_in_place(change, mode):
    values, twin = (torch.arange(15.0).reshape(5, 3).requires_grad_() for _ in range(2))
    with mode():
        inputs, log = arriving(values)
        actual, expected = change(inputs), change(twin * 1)
    assert torch.equal(to_ordinary(actual), expected)
    assert log == ["received"]
    if expected.requires_grad:
        actual.sum().backward()
        expected.sum().backward()
        assert torch.equal(values.grad, twin.grad)


@pytest.mark.parametrize(
    "combine",
    [lambda x, y: torch.cat([x, y], dim=1), lambda x, y: x + y, lambda x, y: y.index_copy(0, torch.arange(5), x)],
)
def test_an_operand_that_changes_before_the_values_arrive_is_an_error(combine):
    inputs, _ = arriving(torch.ones(5, 3))
    operand = torch.ones(5, 3)
    waited, result = combine(inputs, operand), combine(inputs, operand)
    expected = combine(torch.ones(5, 3), operand)
    waited.wait()
    operand[0].mul_(0)
    assert torch.equal(waited, expected)
    with pytest.raises(RuntimeError, match=r"of shape \[5, 3\] was changed in place before"):
        result.sum()
    # Memory of values that have arrived.
    for handle in (lambda x: x[0], lambda x: x.detach(), wait):
        first, second = arriving(torch.ones(5, 3))[0], arriving(torch.ones(5, 3))[0]
        view = handle(first)
        result = combine(first, second)
        view.mul_(0)
        with pytest.raises(RuntimeError, match="changed in place before"):
            result.sum()
    first = arriving(torch.ones(5, 3))[0]
    result = combine(first, torch.ones(5, 3))
    wait(first).mul_(0)
    with pytest.raises(RuntimeError, match="changed in place before"):
        result.sum()
    with torch.inference_mode():
        operand = torch.ones(5, 3)  # has no version
        result = combine(arriving(torch.ones(5, 3))[0], operand)
        operand.mul_(0)
        assert torch.equal(result, expected)


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
