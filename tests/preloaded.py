"""The state of rank processes before the first fork: modules imported, and kernels of a train step loaded or compiled.

It starts no thread, because a forked process has none of its parent's.
"""

import gc

import torch

import tritonemb as te
from tests.tracing import collect_seldom, hasten_compilation

hasten_compilation()
collect_seldom()
torch.set_num_threads(1)
model = te.nn.DLRM([te.TableConfig("table", 4, 8)], 2, (8,), (8,), optimizer=te.optim.SGD(lr=0.1))
features = te.KeyedJaggedTensor(["table"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))
model(torch.ones(2, 2), features).sum().backward()
gc.collect()
gc.freeze()
