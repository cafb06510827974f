"""The threads that CPU kernels run on: as many as `torch.get_num_threads()`, the caller one of them.

Where torch's own threads are GNU OpenMP's (its Linux wheels), kernels run on those: they are awake already. Threads of
another pool would share the cores with them, because OpenMP's threads keep spinning for a while after each of torch's
parallel regions. Elsewhere, and in a forked child, whose copy of OpenMP has lost its threads, a pool of our own serves.

Kernels call each other's tasks on several threads without coming back to Python in between.

A thread that runs Python code waits for the interpreter's lock first, which costs more than a small task. Here tasks
are drawn and run by compiled code alone.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0
_forked = False
_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Team = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


def num_threads() -> int:
    """Threads that a kernel may use now."""
    return max(1, torch.get_num_threads())


def team() -> int:
    """The address of `void f(void (*body)(void *), void *data, unsigned num_threads, unsigned flags)`; 0: stay alone.

    It calls `body(data)` on each of several threads, the calling one among them, and returns when all have.
    """
    if num_threads() == 1:
        return 0
    return _own_team_address if _forked else _openmp_team() or _own_team_address


def run(work: Callable[[int], object], num_tasks: int) -> None:
    """Call `work(0) … work(num_tasks - 1)`, each once, on threads of our own, the calling one among them.

    `work` must release the GIL to gain from it. Safe from several threads at once and after a fork. Returns when all
    tasks have ended; an exception stops its thread from drawing more tasks and is raised again here.
    """
    tasks = iter(range(num_tasks))
    draw = threading.Lock()
    failures: list[BaseException] = []

    def drain() -> None:
        try:
            while True:
                with draw:
                    task = next(tasks, None)
                if task is None:
                    return
                work(task)
        except BaseException as failure:
            failures.append(failure)

    futures = [_submit(drain) for _ in range(min(num_tasks, num_threads()) - 1)]
    drain()
    for future in futures:
        if not future.cancel():
            future.result()
    if failures:
        raise failures[0]


@_Team
def _own_team(body: int, data: int, size: int, flags: int) -> None:
    work = _Body(body)
    try:
        run(lambda _: work(data), size)
    finally:
        work(data)  # there is nothing left to do, unless no thread could be started


_own_team_address: int = ctypes.cast(_own_team, ctypes.c_void_p).value or 0


@functools.cache
def _openmp_team() -> int:
    """The address of `GOMP_parallel` of the OpenMP that torch has loaded, if it is GNU's, else 0."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return 0
    loaded = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    if len(loaded) != 1:
        return 0
    return ctypes.cast(ctypes.CDLL(loaded.pop()).GOMP_parallel, ctypes.c_void_p).value or 0


def _submit(work: Callable[[], None]) -> Future[None]:
    global _pool, _pool_size
    with _lock:
        if _pool is None or _pool_size < num_threads() - 1:
            if _pool is not None:
                _pool.shutdown(wait=False)
            _pool_size = num_threads() - 1
            _pool = ThreadPoolExecutor(_pool_size, thread_name_prefix="tritonemb")
        return _pool.submit(work)


def _forget() -> None:
    """A forked child has the parent's pools without their threads."""
    global _pool, _lock, _forked
    _pool, _lock, _forked = None, threading.Lock(), True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


_LONG, _INT = ir.IntType(64), ir.IntType(32)
_POINTER = ir.IntType(8).as_pointer()


@intrinsic
def run_tasks(
    typing_context: Any, team: types.Type, num_threads: types.Type, num_tasks: types.Type, kernel: Any, args: Any
) -> Any:
    """`kernel(task, *args)` for each task in [0, num_tasks), shared among the threads of `team`, an address.

    `team` is the address of a function like `GOMP_parallel` (see `pool.team`), or 0 to run on this thread alone.
    """
    argument_types = tuple(types.unliteral(argument) for argument in args.types)
    signature = kernel.get_call_type(typing_context, (types.int64, *argument_types), {})
    compiled = kernel.dispatcher.overloads[signature.args]

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        context.active_code_library.add_linking_library(compiled.library)
        team_address, threads, tasks, _, arguments = values
        pieces = cgutils.unpack_tuple(builder, arguments)
        pieces = [
            context.cast(builder, piece, given, wanted)
            for piece, given, wanted in zip(pieces, args.types, argument_types, strict=True)
        ]
        shared_type = ir.LiteralStructType([_LONG, _LONG, _LONG, *(piece.type for piece in pieces)])
        shared = cgutils.alloca_once(builder, shared_type)
        for index, value in enumerate([_LONG(0), tasks, _LONG(0), *pieces]):
            builder.store(value, cgutils.gep_inbounds(builder, shared, 0, index))
        body = _make_body(context, builder.module, shared_type, compiled.fndesc, signature)
        data = builder.bitcast(shared, _POINTER)
        no_team, few = builder.icmp_signed("==", team_address, _LONG(0)), builder.icmp_signed("<=", tasks, _LONG(1))
        with builder.if_else(builder.or_(no_team, few)) as (alone, together):
            with alone:
                builder.call(body, [data])
            with together:
                team_type = ir.FunctionType(ir.VoidType(), [body.type, _POINTER, _INT, _INT])
                function = builder.inttoptr(team_address, team_type.as_pointer())
                builder.call(function, [body, data, builder.trunc(threads, _INT), _INT(0)])
        failed = builder.load(cgutils.gep_inbounds(builder, shared, 0, 2))
        with cgutils.if_unlikely(builder, builder.icmp_signed("!=", failed, _LONG(0))):
            context.call_conv.return_user_exc(builder, MemoryError, ("a kernel found no memory",))
        return context.get_dummy_value()

    return types.void(team, num_threads, num_tasks, kernel, args), generate


def _make_body(context: Any, module: Any, shared_type: Any, descriptor: Any, signature: Any) -> Any:
    """What each thread runs: draw a task's number, run the task, until none is left."""
    name = module.get_unique_name("run_tasks_body")
    body = ir.Function(module, ir.FunctionType(ir.VoidType(), [_POINTER]), name)
    body.linkage = "internal"
    labels = ("start", "draw", "work", "failed", "end")
    start, draw, work, failed, end = (body.append_basic_block(label) for label in labels)
    builder = ir.IRBuilder(start)
    shared = builder.bitcast(body.args[0], shared_type.as_pointer())
    counter, num_tasks, failure, *pieces = (
        cgutils.gep_inbounds(builder, shared, 0, index) for index in range(len(shared_type.elements))
    )
    arguments = [builder.load(piece) for piece in pieces]
    last = builder.load(num_tasks)
    builder.branch(draw)
    builder.position_at_end(draw)
    task = builder.atomic_rmw("add", counter, _LONG(1), "monotonic")
    builder.cbranch(builder.icmp_signed("<", task, last), work, end)
    builder.position_at_end(work)
    status, _ = context.call_internal_no_propagate(builder, descriptor, signature, [task, *arguments])
    builder.cbranch(status.is_error, failed, draw)
    builder.position_at_end(failed)
    builder.store(_LONG(1), failure)
    builder.branch(end)
    builder.position_at_end(end)
    builder.ret_void()
    return body
