"""A topic of Kafka as a stream: its messages are rows as JSON objects, `{"click": 1, "user": "a"}`."""

import json
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from types import NoneType
from typing import Any
from urllib.parse import parse_qsl

from tritonemb.data.files import pa
from tritonemb.data.protocol import Shard
from tritonemb.data.schema import CATEGORIES, LogOptions
from tritonemb.data.streams import IDLE_SECONDS, Offsets
from tritonemb.utils import require

SCHEME = "kafka://"
BLOCK = 256  # messages of a partition before those of the next one: a record batch, large enough to parse at once
MAX_QUEUED = 16 * BLOCK  # messages of a partition in memory, while another has none
SAMPLE_POLLS = 10  # at most, for the first block, whose rows show the columns
TIMEOUT = 10.0  # seconds for a broker to describe the topic


class KafkaStream:
    """Messages of a topic, `kafka://HOST:PORT,HOST:PORT/TOPIC?option=value`, with options of librdkafka. Partitions are
    read in turns, a block of messages each, so that rows have one order: a stream waits for a partition without any.
    Shard i of n has the partitions p with p % n = i. With `on_bad_row="skip"` a message is skipped if a value has
    another type than most of the first block. Raise ConnectionError if no broker answers, or if messages at the offsets
    are gone; ValueError for an invalid URI, an unknown topic, or another number of partitions."""

    def __init__(self, uri: str, options: LogOptions) -> None:
        address, _, query = uri.removeprefix(SCHEME).partition("?")
        brokers, _, self._topic = address.partition("/")
        if not brokers or not self._topic or "/" in self._topic:
            raise ValueError(f"invalid URI {SCHEME}{address}: expected {SCHEME}HOST:PORT/TOPIC")
        self.path, self._kafka = f"{SCHEME}{address}", require("confluent_kafka", "kafka")
        # Offsets are those of checkpoints: brokers must not store them, nor skip messages that are gone.
        fixed = {"group.id": "tritonemb", "enable.auto.commit": False, "auto.offset.reset": "error"}
        self._config = dict(parse_qsl(query)) | fixed | {"bootstrap.servers": brokers}
        self._skips, self._sparse = options.on_bad_row == "skip", options.schema.sparse or CATEGORIES
        self._types: dict[str, str] = {}  # of most values in the first block, by column, if bad rows are skipped

    def read(self, offsets: Offsets, shard: Shard, columns: Sequence[str]) -> Iterator[tuple[Offsets, Any]]:
        """See `RowStream.read`. Offsets are those of partitions, their number, and that of the messages ("turn")."""
        with closing(self._kafka.Consumer(self._config)) as consumer:
            # Partitions of the shard, from their offsets on.
            try:
                topic = consumer.list_topics(self._topic, TIMEOUT).topics[self._topic]
            except self._kafka.KafkaException as error:
                raise ConnectionError(f"{self.path} does not answer: {error}") from error
            offsets = {"partitions": (count := len(topic.partitions)), "turn": 0} | offsets
            if topic.error is not None or offsets["partitions"] != count:
                text = f"it has {count} partitions, and had {offsets['partitions']} at the position; start a new run"
                raise ValueError(f"{self.path}: {text if topic.error is None else topic.error}")
            queues = {number: deque[Any]() for number in range(shard[0], count, shard[1])}
            starts = {number: offsets.get(str(number), self._kafka.OFFSET_BEGINNING) for number in queues}
            consumer.assign([self._kafka.TopicPartition(self._topic, *start) for start in starts.items()])
            # Messages of the partition whose turn it is.
            while queues:
                turn = offsets["turn"]
                queue = queues[number := [*queues][turn // BLOCK % len(queues)]]
                for _ in range(1 if columns else SAMPLE_POLLS):
                    if len(queue) < (1 if columns else BLOCK):
                        self._receive(consumer, queues)
                messages = [queue.popleft() for _ in range(min(len(queue), BLOCK - turn % BLOCK))]
                yield offsets, self._to_batch(messages, columns) if messages else None
                if messages:
                    offsets = offsets | {"turn": turn + len(messages), str(number): messages[-1].offset() + 1}

    def _receive(self, consumer: Any, queues: dict[int, deque[Any]]) -> None:
        """Queue messages that have arrived, except of partitions with many queued ones."""
        for change, is_full in ((consumer.pause, True), (consumer.resume, False)):
            numbers = [number for number, queue in queues.items() if (len(queue) >= MAX_QUEUED) == is_full]
            change([self._kafka.TopicPartition(self._topic, number) for number in numbers])
        for message in consumer.consume(BLOCK, IDLE_SECONDS):
            if message.error() is not None:
                raise ConnectionError(f"{self.path}: {message.error()}")
            queues[message.partition()].append(message)

    def _to_batch(self, messages: Sequence[Any], columns: Sequence[str]) -> Any:
        rows = list(map(_parse, messages))
        if columns and self._skips:
            rows = [row if all(self._fits(name, row.get(name)) for name in columns) else {} for row in rows]
        arrays = dict[str, Any]()
        for name in columns or dict.fromkeys(name for row in rows for name in row):
            values = [row.get(name) for row in rows]
            if not columns and self._skips:
                types = Counter(kind for v in values if (kind := self._type_of(name, v)) not in ("", "list of "))
                self._types[name] = max(types, key=types.__getitem__, default="")
                values = [value if self._fits(name, value) else None for value in values]
            if {bool} < {*map(type, values)} - {NoneType} <= {bool, int, float}:
                values = [int(value) if isinstance(value, bool) else value for value in values]
            try:
                arrays[name] = pa.array(values)
            except (pa.ArrowException, OverflowError) as error:
                if columns:
                    where = f"partition {messages[0].partition()}, offsets {messages[0].offset()} to"
                    text = f"{where} {messages[-1].offset()}: values of {name!r} have several types"
                    raise ValueError(f"{self.path}, {text} ({error})") from error
                arrays[name] = pa.nulls(len(rows))  # of the first block, which has columns that are not needed, too
        return pa.RecordBatch.from_pydict(arrays)

    def _fits(self, name: str, value: Any) -> bool:
        expected, actual = self._types.get(name, ""), self._type_of(name, value)
        return expected.startswith(actual) or actual.startswith(expected)  # a list of nothing fits any list

    def _type_of(self, name: str, value: Any) -> str:
        """Name the type of a value, "" if it is missing; numbers have one type, except in sparse columns."""
        if isinstance(value, list):
            types = {type(e).__name__ if isinstance(e, list) else self._type_of(name, e) for e in value} - {""}
            return f"list of {''.join(types)}" if len(types) < 2 else "mixed list"
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            return "large int"
        if isinstance(value, int | float) and name not in self._sparse:
            return "number"
        return "" if value is None else type(value).__name__


def _parse(message: Any) -> dict[str, Any]:
    """Parse a row; any other message is a row without values, which is bad."""
    with suppress(ValueError, RecursionError):
        if isinstance(row := json.loads(message.value() or b""), dict):
            return row
    return {}
