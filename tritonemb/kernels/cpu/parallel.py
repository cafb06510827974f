"""Kernels call each other's tasks on several threads without coming back to Python in between.

A thread that runs Python code waits for the interpreter's lock first, which costs more than a small task. Here tasks
are drawn and run by compiled code alone.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

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
