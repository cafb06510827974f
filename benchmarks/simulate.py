"""A small discrete-event simulation of training steps: stages of several batches on the resources of each rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Stage(NamedTuple):
    """Of a step: which resources it holds, seconds `[ranks]`, and the stages that it follows, so many batches before.

    `together`: an exchange, which starts when all ranks are ready and ends with the slowest.
    """

    name: str
    resources: tuple[str, ...]
    seconds: Array
    after: tuple[tuple[str, int], ...] = ()
    together: bool = False


class Span(NamedTuple):
    """That a stage ran, on a rank; -1: on all."""

    batch: int
    stage: str
    rank: int
    start: float
    end: float


def simulate(stages: Sequence[Stage], batches: int) -> list[Span]:
    """Runs the steps event by event. A resource does one thing at a time; of what waits, the oldest batch is first."""
    ranks, numbers = len(stages[0].seconds), {stage.name: number for number, stage in enumerate(stages)}
    shared = {name for stage in stages if stage.together for name in stage.resources}
    if wrong := [stage.name for stage in stages if not stage.together and shared & {*stage.resources}]:
        raise ValueError(f"stage {wrong[0]!r} has a resource of an exchange")
    follows: list[list[tuple[int, int]]] = [[] for _ in stages]
    left: dict[tuple[int, int, int], int] = {}  # what a task still waits for
    for number, stage in enumerate(stages):
        for name, back in stage.after:
            follows[numbers[name]].append((number, back))
        for batch in range(batches):
            parts = [stages[numbers[name]].together for name, back in stage.after if batch >= back]
            if stage.together:
                left[batch, number, -1] = sum(1 if each else ranks for each in parts)
            else:
                left.update({(batch, number, rank): len(parts) for rank in range(ranks)})
    waiting: dict[Any, list[tuple[int, int]]] = {}
    events: list[tuple[float, int, int, int]] = []
    busy, spans, touched, now = set[Any](), list[Span](), set[Any](), 0.0

    def ready(batch: int, number: int, rank: int) -> None:
        place = "together" if rank < 0 else (stages[number].resources[0], rank)
        heapq.heappush(waiting.setdefault(place, []), (batch, number))
        touched.add(place)

    def begin(batch: int, number: int, rank: int) -> None:
        stage = stages[number]
        busy.update(stage.resources if rank < 0 else [(stage.resources[0], rank)])
        end = now + float(stage.seconds.max() if rank < 0 else stage.seconds[rank])
        spans.append(Span(batch, stage.name, rank, now, end))
        heapq.heappush(events, (end, batch, number, rank))

    for task, count in left.items():
        if not count:
            ready(*task)
    while True:
        for place in sorted(touched, key=str):
            queue = waiting.get(place, [])
            if place == "together":
                for task in sorted(queue):
                    if not busy & {*stages[task[1]].resources}:
                        queue.remove(task)
                        begin(*task, -1)
                heapq.heapify(queue)
            elif queue and place not in busy:
                begin(*heapq.heappop(queue), place[1])
        touched.clear()
        if not events:
            return spans
        now = events[0][0]
        while events and events[0][0] == now:
            _, batch, number, rank = heapq.heappop(events)
            place = "together" if rank < 0 else (stages[number].resources[0], rank)
            busy.difference_update(stages[number].resources if rank < 0 else [place])
            touched.add(place)
            for other, back in follows[number]:
                if batch + back < batches:
                    local = not stages[other].together
                    for each in range(ranks) if rank < 0 and local else [rank if local else -1]:
                        left[batch + back, other, each] -= 1
                        if not left[batch + back, other, each]:
                            ready(batch + back, other, each)


def period(spans: Sequence[Span]) -> float:
    """Seconds from step to step, without the first ones."""
    batches = max(span.batch for span in spans) + 1
    ends = [max(span.end for span in spans if span.batch == batch) for batch in (batches // 2 - 1, batches - 1)]
    return (ends[1] - ends[0]) / (batches - batches // 2)
