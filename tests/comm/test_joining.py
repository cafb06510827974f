"""Meeting beside what earlier attempts have left in the store."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from tritonemb.comm.control import init_from_env, rendezvous_name


def meet(store: dist.Store, size: int, seconds: float = 30.0) -> list[str]:
    names = [""] * size

    def join(rank: int) -> None:
        names[rank] = rendezvous_name(store, rank, size, timedelta(seconds=seconds))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return names


@pytest.mark.parametrize("sizes", [[1, 1], [2, 2, 2], [4, 2, 4], [1, 3]], ids=str)
def test_every_attempt_has_a_name_of_its_own(sizes):
    store = dist.HashStore()
    results = [set(meet(store, size)) for size in sizes]
    assert all(len(names) == 1 for names in results)
    assert len(set.union(*results)) == len(sizes)


@pytest.mark.parametrize(
    ("name", "text"), [("MASTER_PORT", "abc"), ("MASTER_PORT", "70000"), ("RANK", "-1"), ("WORLD_SIZE", "")]
)
def test_a_malformed_environment_is_named(monkeypatch, name, text):
    values = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0", name: text}
    for item, value in values.items():
        monkeypatch.setenv(item, value)
    with pytest.raises(ValueError, match=f"the environment has {name}={text}, expected an integer below 65536; torch"):
        init_from_env("gloo", timedelta(seconds=1))


def test_an_attempt_that_did_not_come_together_leaves_nothing_in_the_way():
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match=r"the ranks did not rendezvous in time: ranks \[1\] did not come"):
        rendezvous_name(store, 0, 2, timedelta(seconds=0.1))
    with pytest.raises(RuntimeError, match="rank 0 did not answer"):
        rendezvous_name(store, 1, 2, timedelta(seconds=0.1))
    assert len(set(meet(store, 2))) == 1
