"""Topics of Kafka as streams, of a stub of the client, and of the mock cluster of librdkafka if it is installed."""

import functools
import itertools
import json
import os
import signal
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("pyarrow")

import tritonemb as te
from tests.data.logs import same
from tests.helpers import assert_same_bits
from tritonemb.data import LogOptions, Schema, build_vocabulary, kafka, open_dataset, open_for_scoring

OPTIONS = LogOptions(Schema("click", dense=("price",), sparse=("user", "tags"), num_embeddings=100))


class Message(SimpleNamespace):
    def __getattribute__(self, name):
        value = object.__getattribute__(self, name)
        return value if name.startswith("_") else lambda: value


class Cluster:
    """Topics by name: messages of each partition; `Consumer` hands them over in any order of the partitions."""

    def __init__(self, partitions=3):
        self.partitions = {number: [] for number in range(partitions)}
        self.first = dict.fromkeys(self.partitions, 0)  # earlier ones are no longer stored
        self.consumers, self.configs = 0, []

    def send(self, partition, *values):
        for value in values:
            number = len(self.partitions[partition])
            self.partitions[partition].append(Message(partition=partition, offset=number, value=value, error=None))

    def module(self):
        cluster = self

        class Consumer:
            def __init__(self, config):
                cluster.consumers += 1
                cluster.configs.append(config)
                self.paused, self.turn = set(), itertools.count()

            def list_topics(self, topic, timeout):
                if topic == "down":
                    raise module.KafkaException("no broker")
                error = None if topic == "clicks" else "unknown topic"
                return SimpleNamespace(topics={topic: SimpleNamespace(error=error, partitions=cluster.partitions)})

            def assign(self, partitions):
                self.next = {p.partition: 0 if p.offset == module.OFFSET_BEGINNING else p.offset for p in partitions}

            def pause(self, partitions):
                self.paused |= {p.partition for p in partitions}

            def resume(self, partitions):
                self.paused -= {p.partition for p in partitions}

            def consume(self, count, timeout):
                messages = []
                for number in sorted(self.next, reverse=next(self.turn) % 2 == 0):
                    offset = self.next[number]
                    if offset < cluster.first[number]:
                        return [Message(error="offset out of range", partition=number, offset=offset, value=None)]
                    if number not in self.paused:
                        messages += cluster.partitions[number][offset : offset + 70]
                        self.next[number] = min(offset + 70, len(cluster.partitions[number]))
                return messages

            def close(self):
                cluster.consumers -= 1

        module = ModuleType("confluent_kafka")
        module.Consumer, module.OFFSET_BEGINNING = Consumer, -2
        module.KafkaException = type("KafkaException", (Exception,), {})
        module.TopicPartition = lambda topic, partition, offset=-1: SimpleNamespace(partition=partition, offset=offset)
        return module


@pytest.fixture
def cluster(monkeypatch):
    cluster = Cluster()
    monkeypatch.setitem(sys.modules, "confluent_kafka", cluster.module())
    monkeypatch.setattr(kafka, "IDLE_SECONDS", 0.01)
    for partition in range(3):
        cluster.send(partition, *(row(partition, number) for number in range(1_000)))
    return cluster


def row(partition, number):
    values = {"click": number % 2, "price": 1000 * partition + number, "user": f"u{number % 9}"}
    return json.dumps(values | ({"tags": [number % 4]} if number % 3 else {})).encode()


def prices(batches):
    return [int(price) for batch in batches for price in batch.dense[:, 0].tolist()]


def take(stream, count):
    return [next(stream) for _ in range(count)]


def test_partitions_take_turns(cluster):
    log = open_dataset("kafka://one:9092,two:9092/clicks?security.protocol=ssl", log=OPTIONS)
    assert log.name == "clicks"
    assert cluster.configs[0]["bootstrap.servers"] == "one:9092,two:9092"
    assert cluster.configs[0]["security.protocol"] == "ssl"
    with log.open("train", 64) as stream:
        actual = prices(take(stream, 24))
    expected = [
        1000 * p + number for block in range(2) for p in range(3) for number in range(256 * block, 256 * block + 256)
    ]
    assert actual == expected
    assert cluster.consumers == 0
    assert list(log.open("train", 50, shard=(4, 5))) == []


def test_errors_name_topic_and_offsets(cluster):
    for uri in ("kafka://one:9092", "kafka:///clicks", "kafka://one:9092/clicks/more"):
        with pytest.raises(ValueError, match="expected kafka://HOST:PORT/TOPIC"):
            open_dataset(uri, log=OPTIONS)
    with pytest.raises(ConnectionError, match="kafka://one:9092/down does not answer: no broker"):
        open_dataset("kafka://one:9092/down", log=OPTIONS)
    with pytest.raises(ValueError, match="kafka://one:9092/other: unknown topic"):
        open_dataset("kafka://one:9092/other", log=OPTIONS)
    log = open_dataset("kafka://one:9092/clicks", log=OPTIONS)
    with log.open("train", 64) as stream:
        take(stream, 13)
        position = stream.position
    cluster.partitions[3] = []
    with pytest.raises(ValueError, match="it has 4 partitions, and had 3 at the position"):
        next(log.open("train", 64, position=position))
    del cluster.partitions[3]
    cluster.first[0] = 500
    with pytest.raises(ConnectionError, match="kafka://one:9092/clicks: offset out of range"):
        next(log.open("train", 64, position=position))


def test_messages_that_are_no_rows_are_bad_rows(cluster):
    cluster.partitions[0][3:6] = [
        Message(partition=0, offset=3 + index, value=value, error=None)
        for index, value in enumerate((b"{", b"[1]", None))
    ]
    with pytest.raises(ValueError, match=r"kafka://one:9092/clicks at .*row 4: field 1 \(click\) is 'missing'"):
        next(open_dataset("kafka://one:9092/clicks", log=OPTIONS).open("train", 64))
    cluster.partitions[0][3:6] = [
        Message(partition=0, offset=3 + index, value=json.dumps({"click": 1, "user": value}).encode(), error=None)
        for index, value in enumerate((3, "b", "c"))
    ]
    with pytest.raises(ValueError, match=r"partition 0, offsets 0 to .*: values of 'user' have several types"):
        next(open_dataset("kafka://one:9092/clicks", log=OPTIONS).open("train", 64))


def test_messages_with_values_of_other_types_are_skipped(cluster):
    values = ({"user": 3}, {"user": ["a"]}, {"price": "x"}, {"price": 2**70}, {"click": [1]}, {"tags": ["t", 1]})
    values += ({"tags": functools.reduce(lambda value, _: [value], range(600), "t")},)
    places = {7 * number: value for number, value in enumerate((*values, {"tags": 3}, {"tags": ["t"]}, {"click": {}}))}
    for number, value in (*places.items(), *((number + 300, value) for number, value in places.items())):
        message = cluster.partitions[0][number]
        message.value = json.dumps(json.loads(message.value()) | value).encode()
    cluster.partitions[1][9].value = json.dumps(json.loads(cluster.partitions[1][9].value()) | {"click": True}).encode()
    log = open_dataset("kafka://one:9092/clicks", log=replace(OPTIONS, on_bad_row="skip"))
    assert [feature.kind for feature in log.features] == ["strings", "integers"]
    with log.open("train", 64) as stream:
        actual = prices(take(stream, 23))
        assert stream.report.skipped == 2 * len(places)
    expected = [1000 * p + block + n for block in (0, 256) for p in range(3) for n in range(256)]
    assert actual == [price for price in expected if price not in {*places, *(n + 300 for n in places)}][: 23 * 64]
    with pytest.raises(ValueError, match=r"values of '(user|price|click|tags)' have several types"):
        next(open_dataset("kafka://one:9092/clicks", log=OPTIONS).open("train", 64))


def test_a_stream_is_neither_scored_nor_counted(cluster, tmp_path):
    log = open_dataset("kafka://one:9092/clicks", log=OPTIONS)
    with pytest.raises(ValueError, match="kafka://one:9092/clicks has no end, so its rows cannot be scored"):
        open_for_scoring("kafka://one:9092/clicks", OPTIONS, log.features)
    with pytest.raises(ValueError, match="clicks has no end, so its values cannot be counted"):
        build_vocabulary(log, tmp_path / "vocabulary.parquet")


def test_columns_that_are_not_needed_may_have_any_values(cluster):
    expected = take(open_dataset("kafka://one:9092/clicks", log=OPTIONS).open("train", 64), 3)
    for message, value in zip(cluster.partitions[0], (1, "a", {}, [2], 2**70), strict=False):
        message.value = json.dumps(json.loads(message.value()) | {"other": value}).encode()
    assert same(take(open_dataset("kafka://one:9092/clicks", log=OPTIONS).open("train", 64), 3), expected)


@pytest.fixture
def mock_cluster():
    """The mock cluster of librdkafka, with four partitions per topic, and a function that sends messages to one."""
    confluent_kafka = pytest.importorskip("confluent_kafka")
    producer = confluent_kafka.Producer({"test.mock.num.brokers": 2, "log_level": 0})  # the cluster ends with it
    hosts = ",".join(f"{broker.host}:{broker.port}" for broker in producer.list_topics(timeout=30).brokers.values())

    def send(partitions, numbers, topic="clicks"):
        for partition, number in itertools.product(partitions, numbers):
            producer.produce(topic, row(partition, number), partition=partition)
        assert producer.flush(30) == 0

    return hosts, send


def test_batches_of_the_mock_cluster_resume_at_offsets(mock_cluster):
    hosts, send = mock_cluster
    send(range(4), range(600))
    log = open_dataset(f"kafka://{hosts}/clicks?log_level=0", log=OPTIONS)
    with log.open("train", 64) as stream:
        whole = take(stream, (2 * 4 * 256 + 88) // 64)  # then the third block of partition 0 waits for other rows
        send((3, 2, 1), range(600, 800))
        send((0,), range(600, 900))
        whole += take(stream, 43 - len(whole))
    assert prices(whole)[:512] == [*range(256), *range(1000, 1256)]
    assert len(set(prices(whole))) == 43 * 64
    for count in (0, 9, 20, 38):
        with log.open("train", 64) as stream:
            take(stream, count)
            position = json.loads(json.dumps(stream.position))
        with open_dataset(f"kafka://{hosts}/clicks", log=OPTIONS).open("train", 64, position=position) as stream:
            assert same(take(stream, 43 - count), whole[count:])
    with log.open("train", 64, shard=(1, 3)) as stream:
        assert prices(take(stream, 4)) == list(range(1000, 1256))


def test_errors_of_the_mock_cluster_name_the_topic(mock_cluster, monkeypatch):
    hosts, _ = mock_cluster
    with pytest.raises(ValueError, match=f"kafka://{hosts}/other: .*Unknown topic or partition"):
        open_dataset(f"kafka://{hosts}/other?log_level=0", log=OPTIONS)
    monkeypatch.setattr(kafka, "TIMEOUT", 0.5)
    with pytest.raises(ConnectionError, match=r"kafka://127\.0\.0\.1:9/clicks does not answer"):
        open_dataset("kafka://127.0.0.1:9/clicks?log_level=0", log=OPTIONS)


def test_training_on_the_mock_cluster_stops_and_resumes(mock_cluster, tmp_path):
    pytest.importorskip("psutil")
    from tritonemb.training import Callback, Interrupted

    hosts, send = mock_cluster
    send(range(4), range(300))

    class SignalAfter(Callback):
        def on_step(self, step):
            if step.step == 1024 // 64:
                os.kill(os.getpid(), signal.SIGTERM)

    def trainer(name, *callbacks):
        torch.manual_seed(0)
        log = open_dataset(f"kafka://{hosts}/clicks?log_level=0", log=OPTIONS)
        model = te.nn.DLRM(log.tables(4), 1, bottom_mlp=(4,), top_mlp=(4,), optimizer=te.optim.SGD(lr=0.1))
        options = {"batch_size": 64, "max_steps": 30, "verbose": False}
        return te.Trainer(model, log, folder=tmp_path / name, callbacks=callbacks, **options)

    with pytest.raises(Interrupted):  # it waits for partition 0, in whose turn 44 rows have come
        trainer("first", SignalAfter()).fit()
    send(range(4), range(300, 512))
    resumed, whole = trainer("first"), trainer("whole")
    resumed.resume()
    assert resumed.fit().steps == whole.fit().steps == 30
    assert_same_bits(resumed.model.state_dict(), whole.model.state_dict())
