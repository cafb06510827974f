"""Rows and gradients that cross the network in fewer bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tritonemb as te
from tests.server.jobs import batches, local_servers, make, same, train, train_on
from tritonemb.server import flush
from tritonemb.sharding import ExchangePrecision
from tritonemb.types import CODECS

HALF = ExchangePrecision("fp16", "bf16")
DYNAMIC = {
    "capacity": 70, "eviction": te.EvictionConfig(protect=4), "admission": te.AdmissionConfig(appearances=2),
}  # fmt: skip


@pytest.mark.parametrize("exchange", [HALF, ExchangePrecision("int8", "fp16"), ExchangePrecision("fp32", "fp8_e4m3")])
@pytest.mark.few(1)
def test_bits_depend_on_the_codecs_and_the_staleness_alone(exchange):
    expected = None
    for servers, cache in ((1, None), (3, None), (2, 64)):
        options = {"trainers": 2, "staleness": 2, "ahead": 1, "dynamic": DYNAMIC}
        actual = train_on(servers, 8, **options, exchange=exchange, cache=cache)
        expected = expected or actual
        same(actual, expected)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_what_is_read_and_trained_is_that_of_the_codec(codec):
    """A row is rounded once, on its way; its gradient once, on its way back."""
    step = {"fp32": 0.0, "fp16": 2**-11, "bf16": 2**-8, "fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3, "int8": 1 / 127}[codec]
    with local_servers(2) as servers:
        exact, coarse = (
            te.nn.EmbeddingBagCollection([te.TableConfig("a", 300, 8, placement="server")], te.optim.SGD(lr=1.0))
            for _ in range(2)
        )
        te.server.attach(exact, servers, 1)
        initial = exact.state_dict()["a.weight"]
    with local_servers(2) as servers:
        te.server.attach(coarse, servers, 1, exchange=ExchangePrecision(codec, codec))
        coarse.load_state_dict({"a.weight": initial, "step": coarse.state_dict()["step"]})
        ids = torch.arange(0, 300, 7)
        batch = te.KeyedJaggedTensor(["a"], ids, lengths=torch.ones_like(ids))
        gradient = torch.randn(len(ids), 8, generator=torch.Generator().manual_seed(1))
        output = coarse(batch)
        bound = initial[ids].abs() * step if codec != "int8" else initial[ids].abs().amax(1, keepdim=True) * step
        floor = {"fp8_e4m3": 2**-10, "fp8_e5m2": 2**-17}.get(codec, 1e-7)  # half the distance of the smallest numbers
        assert ((output.detach() - initial[ids]).abs() <= bound + floor).all()
        assert (codec == "fp32") == torch.equal(output.detach(), initial[ids])
        output.backward(gradient)
        flush(coarse)
        moved = initial[ids] - coarse.state_dict()["a.weight"][ids]
        bound = gradient.abs() * step if codec != "int8" else gradient.abs().amax(1, keepdim=True) * step
        assert ((moved - gradient).abs() <= bound + 1e-6).all()


def test_fewer_bytes_are_sent(monkeypatch):
    sent = []
    for exchange in (ExchangePrecision("fp32", "fp32"), HALF):
        with local_servers(1) as servers:
            model = make(servers, 1, exchange=exchange)
            train(model, 2)
            flush(model)
            bytes_of = [0]
            receive = servers._local_servers[0].receive

            def count(message, reply, receive=receive, bytes_of=bytes_of):
                bytes_of[0] += sum(item.nbytes for item in message[1])

                def answer(result):
                    bytes_of[0] += sum(item.nbytes for item in result[1])
                    reply(result)

                receive(message, answer)

            monkeypatch.setattr(servers._local_servers[0], "receive", count)
            for batch in batches(3):
                model(batch).sum().backward()
            flush(model)
            sent.append(bytes_of[0])
    assert sent[1] < 0.8 * sent[0]  # ids take 8 bytes, a row of 4 to 6 elements 16 to 24


def test_rows_that_a_trainer_holds_are_moved_as_they_are():
    with (
        local_servers(1) as servers,
        pytest.raises(ValueError, match="without staleness rows are transferred in their dtype"),
    ):
        make(servers, 0, exchange=HALF)


def test_servers_refuse_a_scale_of_gradients():
    with local_servers(1) as servers, pytest.raises(ValueError, match=r"scale per message.* omit gradient_scale"):
        make(servers, 1, exchange=replace(HALF, gradient_scale=1024.0))


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_costs_no_other_row_its_own(codec, value):
    """It is skipped; the scale of the others is that of the finite ones."""
    with local_servers(2) as servers:
        table = te.TableConfig("a", 9, 4, placement="server")
        model = te.nn.EmbeddingBagCollection([table], te.optim.SGD(lr=1.0))
        te.server.attach(model, servers, 1, exchange=ExchangePrecision("fp32", codec))
        initial = model.state_dict()["a.weight"]
        gradient = torch.ones(3, 4)
        gradient[0, 1] = value
        with pytest.warns(RuntimeWarning, match="'a'"):
            model(te.KeyedJaggedTensor.from_lists({"a": [[6], [7], [8]]})).backward(gradient)
        flush(model)
        moved = initial - model.state_dict()["a.weight"]
    torch.testing.assert_close(moved[6:], torch.tensor([[0.0], [1.0], [1.0]]).expand(3, 4), rtol=0, atol=1e-6)
